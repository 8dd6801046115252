"""Verbs that train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fldiag.cli.app import app
from fldiag.cli.options import (
    AllowCode,
    Debug,
    Device,
    Download,
    Executor,
    Format,
    Json,
    Out,
    Seed,
    Shard,
    Width,
)
from fldiag.console import Console, errors
from fldiag.device import device_of
from fldiag.errors import FldiagError


@app.command()
def demo(
    out: Out = None,
    width: Width = None,
    format: Format = None,
    json: Json = False,
    device: Device = "cpu",
    seed: Seed = None,
    debug: Debug = False,
) -> None:
    """Train FedAvg and FedSOL on the digits data and compare their loss landscapes; under a minute.

    Example: fldiag demo
    """
    with errors(debug):
        from fldiag.plotting import sheet
        from fldiag.verbs import demo as verb

        with sheet.use_sheet(width, format):
            verb.demo(Console(json), out, device_of(device), 0 if seed is None else seed)


@app.command()
def train(
    config: Annotated[
        str | None, typer.Argument(help="A preset (fldiag list presets) or a TOML file.")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            "--like",
            metavar="RUN",
            help="Instead of a preset: data, partition, model and settings of this run, which fldiag trained or recorded.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Override a setting: section.key=value; may be given several times."
        ),
    ] = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a stopped run.")] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Delete an existing run in this folder, with its results, and train again.",
        ),
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="key=a,b,c: train every value, as fldiag sweep --over does."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only show the config and a forecast of time and disk space."
        ),
    ] = False,
    executor: Executor = "serial",
    shard: Shard = None,
    allow_code: AllowCode = None,
    download: Download = False,
    json: Json = False,
    device: Device = "auto",
    seed: Seed = None,
    debug: Debug = False,
) -> None:
    """Train a federated model and write a checkpoint every round; can be stopped and resumed at any moment.

    Example: fldiag train digits --set method.name=fedsol --set method.rho=2.0
    """
    with errors(debug):
        from fldiag.verbs import train as verb

        overrides = [*(set_ or []), *([f"seed={seed}"] if seed is not None else [])]
        console = Console(json)
        source = verb.source(console, config, like, overrides, allow_code or [])
        overrides = overrides if like is None else []
        if sweep:
            if overwrite:
                raise FldiagError(
                    "--overwrite works for a single run only",
                    "give a sweep another --out",
                    usage=True,
                )
            from fldiag.verbs import sweep as sweeps

            return sweeps.sweep(
                console,
                source,
                sweep,
                overrides,
                [],
                None,
                out,
                dry_run,
                executor,
                shard,
                download,
                device_of(device),
            )
        if shard:
            raise FldiagError(
                "--shard selects a part of several runs", "give --sweep key=a,b,c too", usage=True
            )
        verb.train(
            console,
            source,
            overrides,
            out,
            resume,
            overwrite,
            dry_run,
            executor,
            download,
            device_of(device),
        )


@app.command()
def sweep(
    config: Annotated[str, typer.Argument(help="A preset (fldiag list presets) or a TOML file.")],
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            help="key=a,b,c: values to train. May be given several times; every "
            "combination is trained.",
        ),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Override a setting: section.key=value; may be given several times."
        ),
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            "--tune",
            help="key=a,b,c: choose the best of these values for each "
            "setting, on held-out training examples.",
        ),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum number of candidates tried for each setting (default: all)."
        ),
    ] = None,
    out: Out = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list the runs that would be trained.")
    ] = False,
    executor: Executor = "serial",
    shard: Shard = None,
    download: Download = False,
    json: Json = False,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Train every combination of the given values; write one table and one report. Finished runs are reused.

    Example: fldiag sweep digits --over method.name=fedavg,fedsol --over seed=0,1,2
    """
    with errors(debug):
        from fldiag.verbs import sweep as verb

        verb.sweep(
            Console(json),
            config,
            over,
            set_ or [],
            tune or [],
            budget,
            out,
            dry_run,
            executor,
            shard,
            download,
            device_of(device),
        )


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds the runs.")] = Path(
        "checkpoints"
    ),
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the runs in a folder: status, rounds done, size and age.

    Example: fldiag runs checkpoints
    """
    with errors(debug):
        from fldiag.verbs import runs as verb

        verb.runs(Console(json), folder)


@app.command()
def prune(
    run: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep",
            help="Also delete the checkpoints of all rounds except these: "
            "last, every:10 or 5,20-30.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be deleted.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Delete files that finished runs no longer need: client states and, with --keep, checkpoints. Asks first.

    Example: fldiag prune checkpoints/digits-scaffold-s0-0a1b2c3d --keep last --dry-run
    """
    with errors(debug):
        from fldiag.verbs import runs as verb

        verb.thin(Console(json), run, keep, dry_run, yes)
