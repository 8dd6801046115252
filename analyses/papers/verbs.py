"""The verb ``figures``. Nothing heavy is imported before it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import fldiag
from fldiag.cli.console import Console
from fldiag.cli.options import Debug, Device, Download, Executor, Json, Out

PAPERS = ("fedalign", "fedproj", "fedsol", "fedtoga")
figures = typer.Typer()


def studies() -> dict[str, Any]:
    """Name (``fedsol/fig6``) -> study."""
    from importlib import import_module

    modules = [import_module(f".{paper}", __package__) for paper in PAPERS]
    return {study.name: study for module in modules for study in module.STUDIES}


def titles() -> dict[str, str]:
    """Name of a study -> its title and source: the list ``fldiag list figures``."""
    return {name: f"{study.title} ({study.source})" for name, study in studies().items()}


@figures.command(rich_help_panel="Papers")
def reproduce(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            help="Figures, such as fedsol/fig6, or fedsol for a whole paper (fldiag list figures). Default: all."
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(help="smoke (digits, minutes) or paper (the full protocol)."),
    ] = "smoke",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key of every config, such as train.precision=bf16."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds.")] = None,
    out: Out = None,
    runs: Annotated[
        Path | None, typer.Option(help="Folder for the runs. Default: checkpoints/figures.")
    ] = None,
    executor: Executor = "serial",
    device: Device = "cpu",
    download: Download = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Reproduce the papers' figures and tables. A call that was stopped goes on where it was.

    fldiag figures ledger compares what lies in the folder of figures with what the papers print.

    Example: fldiag figures fedsol/fig6 --scale smoke
    """
    from . import study

    if ids == ["ledger"]:
        from . import ledger

        Console(json).done(*ledger.write(out or study.OUT))
        return
    by_name, failures, files = studies(), [], []
    names = _selected(ids or list(PAPERS), list(by_name))
    if scale not in study.SCALES:
        remedy = f"choose of {', '.join(study.SCALES)}"
        raise fldiag.FldiagError(f"unknown scale {scale!r}", remedy, usage=True)
    console = Console(json)
    with console.progress("figures") as bar:
        base = study.SCALES[scale]
        size = replace(
            base,
            seeds=seeds or base.seeds,
            over={**base.over, **dict(t.partition("=")[::2] for t in set_ or [])},
            training={"executor": executor, "device": device, "download": download},
            store=runs or study.STORE,
            listen=lambda event: bar(event["round"], event["rounds"], "training"),
        )
        for name in names:
            try:
                files += study.make(by_name[name], size, out or study.OUT)
            except fldiag.FldiagError as error:  # does not stop the others
                if len(names) == 1:
                    raise
                failures.append(f"{name}: {error.what}")
    console.done(*files)
    if failures:
        what = f"{len(failures)} of {len(names)} could not be made: {'; '.join(failures)}"
        raise fldiag.FldiagError(
            what, "the others were written; the same command tries these again"
        )


def _selected(ids: list[str], names: list[str]) -> list[str]:
    """The studies called for."""
    hits = {id: [name for name in names if id in (name, name.split("/")[0])] for id in ids}
    for id in ids:
        if not hits[id]:
            raise fldiag.FldiagError(
                f"unknown figure {id!r}", "fldiag list figures names them", usage=True
            )
    return list(dict.fromkeys(name for id in ids for name in hits[id]))
