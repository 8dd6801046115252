"""The verbs. Nothing heavy is imported before a verb runs, so ``fldiag --help`` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fldiag.console import Console, errors

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Diagnose federated learning: train, and look at what the checkpoints say.")
toy = typer.Typer(no_args_is_help=True, help="The two toys: pictures one can check by hand.")
app.add_typer(toy, name="toy")

Out = Annotated[Path | None, typer.Option(help="Folder to write to.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Seed = Annotated[int | None, typer.Option(help="Seed of what is random here.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Model = Annotated[str | None, typer.Option(help="Model of a plain state_dict: NAME or pkg.mod:factory.")]
Data = Annotated[str | None, typer.Option(help="Its data: NAME, npz:PATH or pkg.mod:loader.")]
Root = Annotated[str | None, typer.Option(help="Folder that holds the data (default $FLDIAG_DATA).")]
Download = Annotated[bool, typer.Option("--download", help="Fetch a missing public data set.")]
Slice = Annotated[str, typer.Option("--slice", help="train, test, client:7, client:7/test (its class mixture) or client:7/own "
                                                    "(its classes).")]
Samples = Annotated[int | None, typer.Option(help="At most this many examples, classes kept in proportion.")]
Client = Annotated[int | None, typer.Option(help="The trained weights of this client, not the global ones.")]
Precision = Annotated[str, typer.Option(help="fp32 or fp64.")]
Rounds = Annotated[str | None, typer.Option(help="Only these rounds: 5, 1,5,20-30, every:10 or last.")]
Checkpoints = Annotated[list[Path], typer.Argument(help="Checkpoint files (.pt, .safetensors) or run folders.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from fldiag.results.provenance import provenance

        print(provenance()["fldiag"])
        raise typer.Exit


@app.command()
def demo(out: Out = None, json: Json = False, device: Device = "cpu", seed: Seed = None, debug: Debug = False) -> None:
    """Train FedAvg and FedSOL on the digits data and compare their loss landscapes; under a minute.

    Example: fldiag demo
    """
    with errors(debug):
        from fldiag.verbs import demo as verb

        verb.demo(Console(json), out, _device(device), 0 if seed is None else seed)


@app.command()
def train(config: Annotated[str, typer.Argument(help="A preset (fldiag list presets) or a TOML file.")],
          set_: Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value.")] = None,
          out: Out = None, resume: Annotated[bool, typer.Option("--resume", help="Continue a stopped run.")] = False,
          dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the config; forecast time and disk.")] = False,
          executor: Annotated[str, typer.Option(help="serial or processes[:N].")] = "serial",
          download: Download = False, json: Json = False, device: Device = "auto", seed: Seed = None,
          debug: Debug = False) -> None:
    """Train, one checkpoint a round; can be stopped and resumed at any moment.

    Example: fldiag train digits --set method.name=fedsol --set method.rho=2.0
    """
    with errors(debug):
        from fldiag.verbs import train as verb

        overrides = [*(set_ or []), *([f"seed={seed}"] if seed is not None else [])]
        verb.train(Console(json), config, overrides, out, resume, dry_run, executor, download, _device(device))


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
              slice_: Slice = "train", samples: Samples = None, client: Client = None, model: Model = None, data: Data = None,
              root: Root = None, download: Download = False, out: Out = None, json: Json = False, device: Device = "auto",
              seed: Seed = None, debug: Debug = False) -> None:
    """Draw the loss surface around checkpoints, with λ1 and λ1/λ5: png, interactive html, table.

    Example: fldiag landscape checkpoints/example/fedsol-digits.pt
    """
    with errors(debug):
        from fldiag.verbs import landscape as verb

        verb.landscape(Console(json), checkpoints, out, directions=directions, line=line, points=points, span=span,
                       grid_rtol=grid_rtol, full=full, precision=precision, seed=seed or 0, model=model, data=data,
                       where={"slice": slice_, "samples": samples, "client": client, "root": root, "download": download,
                              "device": _device(device)})


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
             memory: Annotated[str | None, typer.Option(help="Working memory, such as 500M (default 2G).")] = None,
             engine: Annotated[str, typer.Option(help="lanczos, or pyhessian: as papers did it, with that package's power "
                                                      "iteration, probes and stopping rules.")] = "lanczos",
             batches: Annotated[int | None, typer.Option(help="With pyhessian: only so many batches of 64, as FedAlign's code "
                                                              "(10).")] = None,
             resample: Annotated[bool, typer.Option("--resample", help="With --batches: drawn anew for every product.")] = False,
             precision: Precision = "fp32", slice_: Slice = "train", samples: Samples = None, client: Client = None,
             model: Model = None, data: Data = None, root: Root = None, download: Download = False, out: Out = None,
             json: Json = False, device: Device = "auto", seed: Seed = None, debug: Debug = False) -> None:
    """Top-k Hessian eigenvalues, each with its residual and whether it converged; on request trace, diagonal and density.

    Example: fldiag spectrum checkpoints/example/fedsol-digits.pt --k 5 --trace
    """
    with errors(debug):
        from fldiag.verbs import spectrum as verb

        verb.spectrum(Console(json), checkpoints, out, model=model, data=data, precision=precision, trace=trace,
                      diagonal=diagonal, density=density, rtol=rtol, memory=memory, engine=engine, batches=batches,
                      resample=resample,
                      options={"k": k, "which": which, "tol": tol, "max_products": max_products, "matrix": matrix,
                               "params": params, "per_layer": per_layer, "seed": seed or 0},
                      where={"slice": slice_, "samples": samples, "client": client, "root": root, "download": download,
                             "device": _device(device)})


@app.command()
def matching(run: Annotated[Path, typer.Argument(help="A run folder with client weights.")],
             on: Annotated[str, typer.Option(help="Hessians on each client's own data (client), on everybody's (global), or "
                                                  "both.")] = "both",
             k: Annotated[int, typer.Option("--k", "-k", help="How many eigenvectors (0: none).")] = 5,
             split: Annotated[bool, typer.Option(help="The clients' shares of the global model's curvature.")] = True,
             rtol: Annotated[float, typer.Option(help="Relative standard error allowed where diagonals are estimated.")] = 0.02,
             max_products: Annotated[int, typer.Option(help="Hessian-vector products allowed for an estimate or a "
                                                            "spectrum.")] = 200,
             rounds: Rounds = None, samples: Samples = None, precision: Precision = "fp32", model: Model = None,
             data: Data = None, root: Root = None, download: Download = False, out: Out = None, json: Json = False,
             device: Device = "auto", seed: Seed = None, debug: Debug = False) -> None:
    """How alike the clients' Hessians are: H_N, H_D, top eigenvalues, traces, overlap of eigenspaces; of the last round.

    Example: fldiag matching checkpoints/digits-fedavg-s0-1a2b3c4d --samples 500
    """
    with errors(debug):
        from fldiag.verbs import matching as verb
        from fldiag.verbs import output

        verb.matching(Console(json), run, out, rounds=rounds,
                      options={"data": on, "k": k, "split": split, "rtol": rtol, "max_products": max_products, "seed": seed or 0},
                      where={"samples": samples, "dtype": output.dtype(precision), "device": _device(device), "root": root,
                             "download": download, "model": model, "data": data})


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
                        where={"samples": samples, "dtype": output.dtype(precision), "device": _device(device), "root": root,
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
                   where={"samples": samples, "dtype": output.dtype(precision), "device": _device(device), "root": root,
                          "download": download, "model": model, "data": data})


@app.command()
def personalise(run: Annotated[Path, typer.Argument(help="A finished run folder.")],
                epochs: Annotated[str | None, typer.Option(help="Epochs of fine-tuning, such as 0,1,5 (the default, if the "
                                                                "run's method has no plan of its own).")] = None,
                lr: Annotated[str | None, typer.Option(help="decayed (lr after the last round) or initial.")] = None,
                knn: Annotated[bool, typer.Option("--knn", help="Let the 5 nearest training examples vote with the "
                                                                "model.")] = False,
                clients: Annotated[str | None, typer.Option(help="Only these clients, such as 0,3,7.")] = None,
                test: Annotated[str, typer.Option(help="Tested on test (the client's class mixture) or own (all its "
                                                       "classes).")] = "test",
                model: Model = None, data: Data = None, root: Root = None, download: Download = False, out: Out = None,
                json: Json = False, device: Device = "auto", seed: Seed = None, debug: Debug = False) -> None:
    """Each client's own model, fine-tuned from the final one: accuracy on its own class mixture, mean and std.

    Example: fldiag personalise checkpoints/digits-fedavg-s0-1a2b3c4d --epochs 0,1,5
    """
    with errors(debug):
        from fldiag.verbs import personalise as verb

        verb.personalise(Console(json), run, out, epochs=epochs, clients=clients, knn=knn,
                         options={"lr": lr, "test": test, "seed": seed, "device": _device(device), "root": root,
                                  "download": download, "model": model, "data": data})


@app.command()
def partition(config: Annotated[str, typer.Argument(help="A preset, a TOML file or a run folder.")],
              set_: Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value.")] = None,
              download: Download = False, out: Out = None, json: Json = False, debug: Debug = False) -> None:
    """Draw who holds what: the papers' bubble chart of classes over clients.

    Example: fldiag partition digits --set partition.alpha=0.5
    """
    with errors(debug):
        from fldiag.verbs import partition as verb

        verb.partition(Console(json), config, set_ or [], out, download)


@toy.command()
def plane(rho: Annotated[float, typer.Option(help="FedSOL's perturbation radius.")] = 1.5,
          beta: Annotated[float, typer.Option(help="FedProx's weight.")] = 1.0,
          a: Annotated[list[float] | None, typer.Option(help="Curvature along x, once per client.")] = None,
          out: Out = None, json: Json = False, debug: Debug = False) -> None:
    """FedSOL against FedProx in the plane: where clients end, drawn and compared with the closed forms.

    Example: fldiag toy plane --rho 0.5
    """
    with errors(debug):
        from fldiag.verbs import toys as verb

        verb.plane(Console(json), rho, beta, tuple(a) if a else None, out)


@app.command("list")
def list_(what: Annotated[str, typer.Argument(help="methods, models, datasets, diagnostics or presets.")], json: Json = False,
          debug: Debug = False) -> None:
    """What there is.

    Example: fldiag list methods
    """
    with errors(debug):
        from fldiag.verbs import inform as verb

        verb.listing(Console(json), what)


@app.command()
def explain(name: str, json: Json = False, debug: Debug = False) -> None:
    """A method, model, data set or diagnostic: equations, options with defaults, source.

    Example: fldiag explain fedsol
    """
    with errors(debug):
        from fldiag.verbs import inform as verb

        verb.explain(Console(json), name)


def _device(name: str) -> str:
    if name == "cpu":
        return name
    import torch

    from fldiag.errors import FldiagError, unknown

    if name not in ("auto", "cuda"):
        raise unknown("device", name, ("auto", "cpu", "cuda"))
    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise FldiagError("no CUDA device is available", "use --device cpu", usage=True)
    return "cpu"


def main() -> None:
    app()


if __name__ == "__main__":
    main()
