"""Verbs that train."""

from __future__ import annotations

from typing import Annotated

import typer

from fldiag.cli.app import app
from fldiag.cli.options import Debug, Device, Download, Json, Out, Seed
from fldiag.console import Console, errors
from fldiag.device import device_of


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
