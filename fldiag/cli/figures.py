"""The verb that makes the papers' figures again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fldiag.cli.app import app
from fldiag.cli.options import Debug, Device, Download, Format, Json, Out, Shard, Width
from fldiag.console import Console, errors
from fldiag.device import device_of
from fldiag.errors import FldiagError


@app.command()
def figures(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            help="Figures, such as fedsol/fig6, or fedsol for a whole paper "
            "(fldiag list figures). Default: all."
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="smoke (digits, minutes), small (hours), real (language "
            "tasks, hours), paper (the full protocol) or paper-bf16 (the "
            "same, but trained in bf16)."
        ),
    ] = "smoke",
    out: Out = None,
    runs: Annotated[
        Path | None, typer.Option(help="Folder for the runs. Default: checkpoints/figures.")
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which finished runs are also kept without their weights "
            "(some kB each), and read where --runs lacks them."
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Short for --executor processes:N.")] = None,
    executor: Annotated[
        str | None,
        typer.Option(
            help="Where runs, or a single run's clients, are trained: serial, "
            "processes[:N] or dask[:ADDRESS]. Default: processes."
        ),
    ] = None,
    shard: Shard = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Forecast runs, hours and disk; train nothing.")
    ] = False,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Train nothing; draw from the existing runs.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Train only runs with KEY=VALUE[,VALUE], such as "
            "method.name=fedavg,fedsol (keys as in train --set; "
            "several keys must all hold)."
        ),
    ] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Only rebuild the ledger from existing results.")
    ] = False,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Only redraw the pictures from existing csv files.")
    ] = False,
    width: Width = None,
    format: Format = None,
    download: Download = False,
    json: Json = False,
    device: Device = "cpu",
    debug: Debug = False,
) -> None:
    """Reproduce the papers' figures and tables, and the ledger of reported and measured numbers.

    Example: fldiag figures fedsol/fig6 --scale smoke
    """
    with errors(debug):
        from fldiag.plotting import sheet
        from fldiag.verbs import figures as verb

        with sheet.asked(width, format):
            verb.figures(
                Console(json),
                ids or [],
                scale,
                out,
                runs,
                records,
                _executor(executor, jobs),
                shard,
                dry_run,
                as_is,
                only or [],
                ledger,
                redraw,
                download,
                device_of(device),
                debug,
            )


def _executor(executor: str | None, jobs: int | None) -> str:
    if executor and jobs is not None:
        raise FldiagError(
            "--jobs and --executor both say where runs are trained", "give one of them", usage=True
        )
    if jobs is not None and jobs < 1:
        raise FldiagError(f"jobs = {jobs}", "give --jobs 1 or more", usage=True)
    return executor or {None: "processes", 1: "serial"}.get(jobs, f"processes:{jobs}")
