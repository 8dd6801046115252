"""Verbs that train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fldiag.cli.app import app
from fldiag.cli.options import Debug, Device, Download, Executor, Json, Out, Seed, Shard
from fldiag.console import Console, errors
from fldiag.device import device_of
from fldiag.errors import FldiagError


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
          overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove the run that is there, with its answers, and "
                                                                      "train anew.")] = False,
          sweep: Annotated[list[str] | None, typer.Option("--sweep", help="key=a,b,c, as fldiag sweep has it.")] = None,
          dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the config; forecast time and disk.")] = False,
          executor: Executor = "serial", shard: Shard = None,
          download: Download = False, json: Json = False, device: Device = "auto", seed: Seed = None,
          debug: Debug = False) -> None:
    """Train, one checkpoint a round; can be stopped and resumed at any moment.

    Example: fldiag train digits --set method.name=fedsol --set method.rho=2.0
    """
    with errors(debug):
        from fldiag.verbs import train as verb

        overrides = [*(set_ or []), *([f"seed={seed}"] if seed is not None else [])]
        if sweep:
            if overwrite:
                raise FldiagError("--overwrite is for one run", "give a sweep another --out", usage=True)
            from fldiag.verbs import sweep as sweeps

            return sweeps.sweep(Console(json), config, sweep, overrides, [], None, out, dry_run, executor, shard, download,
                                device_of(device))
        if shard:
            raise FldiagError("--shard is a part of several runs", "give --sweep key=a,b,c too", usage=True)
        verb.train(Console(json), config, overrides, out, resume, overwrite, dry_run, executor, download, device_of(device))


@app.command()
def sweep(config: Annotated[str, typer.Argument(help="A preset (fldiag list presets) or a TOML file.")],
          over: Annotated[list[str], typer.Option("--over", help="key=a,b,c, several times: every combination is trained.")],
          set_: Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value.")] = None,
          tune: Annotated[list[str] | None, typer.Option("--tune", help="key=a,b,c: the value is chosen for every setting, on "
                                                                        "held-out training examples.")] = None,
          budget: Annotated[int | None, typer.Option(min=1, help="So many candidates are tried for every setting (default: "
                                                                 "all).")] = None,
          out: Out = None,
          dry_run: Annotated[bool, typer.Option("--dry-run", help="Say which runs there will be.")] = False,
          executor: Executor = "serial", shard: Shard = None,
          download: Download = False, json: Json = False, device: Device = "auto", debug: Debug = False) -> None:
    """Train every combination of some values; one table and one report of all. Goes on with what is there.

    Example: fldiag sweep digits --over method.name=fedavg,fedsol --over seed=0,1,2
    """
    with errors(debug):
        from fldiag.verbs import sweep as verb

        verb.sweep(Console(json), config, over, set_ or [], tune or [], budget, out, dry_run, executor, shard, download,
                   device_of(device))


@app.command()
def runs(folder: Annotated[Path, typer.Argument(help="The folder that holds runs.")] = Path("checkpoints"), json: Json = False,
         debug: Debug = False) -> None:
    """List the runs in a folder: how far they are, how large, and since when.

    Example: fldiag runs checkpoints
    """
    with errors(debug):
        from fldiag.verbs import runs as verb

        verb.runs(Console(json), folder)


@app.command()
def prune(run: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
          keep: Annotated[str | None, typer.Option("--keep", help="Also remove the checkpoints of all rounds but these: last, "
                                                                  "every:10 or 5,20-30.")] = None,
          dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
          yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False, json: Json = False,
          debug: Debug = False) -> None:
    """Remove what finished runs no longer need: the clients' states, and checkpoints if --keep says so. Asks before.

    Example: fldiag prune checkpoints/digits-scaffold-s0-0a1b2c3d --keep last --dry-run
    """
    with errors(debug):
        from fldiag.verbs import runs as verb

        verb.thin(Console(json), run, keep, dry_run, yes)
