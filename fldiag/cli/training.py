"""Verbs that train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fldiag.cli.app import app
from fldiag.cli.options import Data, Debug, Device, Download, Json, Model, Out, Root, Seed, device_of
from fldiag.console import Console, errors


@app.command()
def demo(out: Out = None, json: Json = False, device: Device = "cpu", seed: Seed = None, debug: Debug = False) -> None:
    """Train FedAvg and FedSOL on the digits data and compare their loss landscapes; under a minute.

    Example: fldiag demo
    """
    with errors(debug):
        from fldiag.verbs import demo as verb

        verb.demo(Console(json), out, device_of(device), 0 if seed is None else seed)


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
        verb.train(Console(json), config, overrides, out, resume, dry_run, executor, download, device_of(device))


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
                         options={"lr": lr, "test": test, "seed": seed, "device": device_of(device), "root": root,
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
