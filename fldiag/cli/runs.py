"""Verbs that look at whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fldiag.cli.app import app
from fldiag.cli.options import (
    Data,
    Debug,
    Device,
    Download,
    Json,
    Memory,
    Model,
    Out,
    Precision,
    Root,
    Rounds,
    Samples,
    Seed,
    device_of,
    room_of,
)
from fldiag.console import Console, errors


@app.command()
def matching(run: Annotated[Path, typer.Argument(help="A run folder with client weights.")],
             on: Annotated[str, typer.Option(help="Hessians on each client's own data (client), on everybody's (global), or "
                                                  "both.")] = "both",
             k: Annotated[int, typer.Option("--k", "-k", help="How many eigenvectors (0: none).")] = 5,
             split: Annotated[bool, typer.Option(help="The clients' shares of the global model's curvature.")] = True,
             rtol: Annotated[float, typer.Option(help="Relative standard error allowed where diagonals are estimated.")] = 0.02,
             max_products: Annotated[int, typer.Option(help="Hessian-vector products allowed for an estimate or a "
                                                            "spectrum.")] = 200,
             rounds: Rounds = None, samples: Samples = None, precision: Precision = "fp32", memory: Memory = None,
             model: Model = None, data: Data = None, root: Root = None, download: Download = False, out: Out = None,
             json: Json = False, device: Device = "auto", seed: Seed = None, debug: Debug = False) -> None:
    """How alike the clients' Hessians are: H_N, H_D, top eigenvalues, traces, overlap of eigenspaces; of the last round.

    Example: fldiag matching checkpoints/digits-fedavg-s0-1a2b3c4d --samples 500
    """
    with errors(debug):
        from fldiag.verbs import matching as verb
        from fldiag.verbs import output

        verb.matching(Console(json), run, out, rounds=rounds,
                      options={"data": on, "k": k, "split": split, "rtol": rtol, "max_products": max_products, "seed": seed or 0},
                      where={"samples": samples, "dtype": output.dtype(precision), "device": device_of(device), "root": root,
                             "download": download, "model": model, "data": data, **room_of(memory)})


@app.command()
def forgetting(run: Annotated[Path, typer.Argument(help="A run folder with client weights.")],
               why: Annotated[bool, typer.Option("--why", help="Also the second-order account of each update on the global loss, "
                                                               "of the last round (or all of --rounds).")] = False,
               min_count: Annotated[int, typer.Option(help="Mask numbers on fewer examples.")] = 5,
               confidence: Annotated[float, typer.Option(help="Of the intervals of accuracies.")] = 0.95,
               slice_: Annotated[str, typer.Option("--slice", help="With --why: the loss on train or test.")] = "train",
               k: Annotated[int, typer.Option("--k", "-k", help="With --why: how many Hessian eigenvectors.")] = 5,
               rounds: Rounds = None, samples: Samples = None, precision: Precision = "fp32", model: Model = None,
               data: Data = None, root: Root = None, download: Download = False, out: Out = None, json: Json = False,
               device: Device = "auto", seed: Seed = None, debug: Debug = False) -> None:
    """What local training forgets and averaging restores: accuracy before and after, by class, client and round.

    Example: fldiag forgetting checkpoints/digits-fedavg-s0-1a2b3c4d --why
    """
    with errors(debug):
        from fldiag.verbs import forgetting as verb
        from fldiag.verbs import output

        verb.forgetting(Console(json), run, out, rounds=rounds, why=why, slice_=slice_, k=k, seed=seed or 0,
                        options={"min_count": min_count, "confidence": confidence},
                        where={"samples": samples, "dtype": output.dtype(precision), "device": device_of(device), "root": root,
                               "download": download, "model": model, "data": data})


@app.command()
def drift(run: Annotated[Path, typer.Argument(help="A run folder with client weights.")],
          rho: Annotated[list[float] | None, typer.Option(help="Radius of the perturbation in g_u, several times "
                                                               "(default 0, 0.5, 1, 2).")] = None,
          loss: Annotated[str, typer.Option(help="Proximal loss: kl or l2.")] = "kl",
          tau: Annotated[float, typer.Option(help="Temperature of kl.")] = 3.0,
          strength: Annotated[str, typer.Option(help="adaptive or fixed.")] = "adaptive",
          part: Annotated[str, typer.Option(help="Perturbed weights: full, body or head.")] = "full",
          batch: Annotated[int | None, typer.Option(help="Minibatches of so many examples (default: all of a client's).")] = None,
          gradients: Annotated[bool, typer.Option(help="Cosines with the global gradient.")] = True,
          representation: Annotated[bool, typer.Option(help="CKA of trained and received models.")] = True,
          propositions: Annotated[bool, typer.Option(help="Propositions 1 and 2 in the last round.")] = True,
          rounds: Rounds = None, samples: Samples = None, precision: Precision = "fp32", model: Model = None, data: Data = None,
          root: Root = None, download: Download = False, out: Out = None, json: Json = False, device: Device = "auto",
          debug: Debug = False) -> None:
    """How clients drift apart: distances and cosines of weights, updates and gradients, proximal loss, CKA.

    Example: fldiag drift checkpoints/digits-fedavg-s0-1a2b3c4d --rho 0 --rho 2
    """
    with errors(debug):
        from fldiag.verbs import drift as verb
        from fldiag.verbs import output

        verb.drift(Console(json), run, out, rounds=rounds,
                   options={"rho": tuple(rho) if rho else (0.0, 0.5, 1.0, 2.0), "loss": loss, "tau": tau, "strength": strength,
                            "part": part, "batch": batch, "gradients": gradients, "representation": representation,
                            "propositions": propositions},
                   where={"samples": samples, "dtype": output.dtype(precision), "device": device_of(device), "root": root,
                          "download": download, "model": model, "data": data})
