"""Verbs that look at single checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from fldiag.cli.app import app
from fldiag.cli.options import (
    Checkpoints,
    Client,
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
    Samples,
    Seed,
    Slice,
    device_of,
    room_of,
)
from fldiag.console import Console, errors


@app.command()
def landscape(checkpoints: Checkpoints,
              directions: Annotated[str, typer.Option(help="eigen, random, plane (through three checkpoints), pca (the axes of a "
                                                           "run's trajectory) or clients (ways to the clients' models)."
                                                      )] = "eigen",
              line: Annotated[bool, typer.Option("--line", help="Profiles along the directions, with parabolas.")] = False,
              points: Annotated[int | None, typer.Option(help="Grid points along each axis (odd; default 41).")] = None,
              span: Annotated[float | None, typer.Option(help="Largest coefficient (default 1).")] = None,
              grid_rtol: Annotated[float, typer.Option(help="Error allowed between evaluated points, as a share of the loss "
                                                            "range.")] = 0.01,
              full: Annotated[bool, typer.Option("--full", help="Evaluate every point.")] = False,
              precision: Annotated[str, typer.Option(help="fp32, fp64 or bf16 (its error is measured and printed).")] = "fp32",
              memory: Memory = None, slice_: Slice = "train", samples: Samples = None, client: Client = None,
              model: Model = None, data: Data = None, root: Root = None, download: Download = False, out: Out = None,
              json: Json = False, device: Device = "auto", seed: Seed = None, debug: Debug = False) -> None:
    """Draw the loss surface around checkpoints, with λ1 and λ1/λ5: png, interactive html, table.

    Example: fldiag landscape checkpoints/example/fedsol-digits.pt
    """
    with errors(debug):
        from fldiag.verbs import landscape as verb

        verb.landscape(Console(json), checkpoints, out, directions=directions, line=line, points=points, span=span,
                       grid_rtol=grid_rtol, full=full, precision=precision, seed=seed or 0, model=model, data=data,
                       where={"slice": slice_, "samples": samples, "client": client, "root": root, "download": download,
                              "device": device_of(device), **room_of(memory)})


@app.command()
def spectrum(checkpoints: Checkpoints, k: Annotated[int, typer.Option("--k", "-k", help="How many eigenvalues.")] = 5,
             which: Annotated[str, typer.Option(help="largest, smallest or magnitude.")] = "largest",
             trace: Annotated[bool, typer.Option("--trace", help="Also the trace, whole and by layer.")] = False,
             diagonal: Annotated[bool, typer.Option("--diagonal", help="Also the trace and a summary of the diagonal, whole and "
                                                                       "by layer.")] = False,
             density: Annotated[bool, typer.Option("--density", help="Also the spectral density, with a picture.")] = False,
             params: Annotated[str | None, typer.Option(help="Eigenvalues of the block of these tensors only, such as "
                                                             "'features.*'.")] = None,
             per_layer: Annotated[bool, typer.Option("--per-layer", help="Also the largest eigenvalue of every layer's "
                                                                         "block.")] = False,
             matrix: Annotated[str, typer.Option(help="hessian, or ggn (Gauss-Newton).")] = "hessian",
             tol: Annotated[float, typer.Option(help="Relative error allowed in each eigenvalue.")] = 1e-3,
             rtol: Annotated[float, typer.Option(help="Relative standard error allowed in a trace that is no closed "
                                                      "form.")] = 0.02,
             max_products: Annotated[int | None, typer.Option(help="Hessian-vector products allowed (default: 100, or 8 k; "
                                                                   "200 for a trace).")] = None,
             engine: Annotated[str, typer.Option(help="lanczos, or pyhessian: as papers did it, with that package's power "
                                                      "iteration, probes and stopping rules.")] = "lanczos",
             batches: Annotated[int | None, typer.Option(help="With pyhessian: only so many batches of 64, as FedAlign's code "
                                                              "(10).")] = None,
             resample: Annotated[bool, typer.Option("--resample", help="With --batches: drawn anew for every product.")] = False,
             precision: Precision = "fp32", memory: Memory = None, slice_: Slice = "train", samples: Samples = None,
             client: Client = None, model: Model = None, data: Data = None, root: Root = None, download: Download = False,
             out: Out = None, json: Json = False, device: Device = "auto", seed: Seed = None, debug: Debug = False) -> None:
    """Top-k Hessian eigenvalues, each with its residual and whether it converged; on request trace, diagonal and density.

    Example: fldiag spectrum checkpoints/example/fedsol-digits.pt --k 5 --trace
    """
    with errors(debug):
        from fldiag.verbs import spectrum as verb

        verb.spectrum(Console(json), checkpoints, out, model=model, data=data, precision=precision, trace=trace,
                      diagonal=diagonal, density=density, rtol=rtol, engine=engine, batches=batches,
                      resample=resample,
                      options={"k": k, "which": which, "tol": tol, "max_products": max_products, "matrix": matrix,
                               "params": params, "per_layer": per_layer, "seed": seed or 0},
                      where={"slice": slice_, "samples": samples, "client": client, "root": root, "download": download,
                             "device": device_of(device), **room_of(memory)})
