"""The verb ``figures``. Nothing heavy is imported before it runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from click import Choice
from rich.console import Console
from rich.progress import Progress

import fldiag

Out = Annotated[Path | None, typer.Option(help="Folder to write to.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Debug = Annotated[
    bool, typer.Option("--debug", help="On an error, show the traceback.", expose_value=False)
]
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


def progress() -> Progress:
    """Bars on a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def say(paths: list[Path], as_json: bool, **more: Any) -> None:
    """Print the paths of what was written, the main file last; as JSON with ``more``."""
    texts = [str(path) for path in paths]
    print(json.dumps({**more, "paths": texts}) if as_json else "\n".join(texts))


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
        typer.Option(
            click_type=Choice(["smoke", "paper"]),
            help="smoke (digits, minutes) or paper (the full protocol).",
        ),
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
    executor: Annotated[
        str, typer.Option(help="Where work runs: serial, processes[:N] or dask[:ADDRESS].")
    ] = "serial",
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda or mps.")] = "cpu",
    download: Annotated[
        bool, typer.Option("--download", help="Download a missing public data set.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Reproduce the papers' figures and tables. A call that was stopped goes on where it was.

    fldiag figures ledger compares what lies in the folder of figures with what the papers print.

    Example: fldiag figures fedsol/fig6 --scale smoke
    """
    from . import study

    if ids == ["ledger"]:
        from . import ledger

        say(ledger.write(out or study.OUT), as_json)
        return
    by_name, failures, files = studies(), [], []
    names = _selected(ids or list(PAPERS), list(by_name))
    with progress() as bars:
        bar, base = bars.add_task("training"), study.SCALES[scale]
        size = replace(
            base,
            seeds=seeds or base.seeds,
            over={**base.over, **dict(t.partition("=")[::2] for t in set_ or [])},
            training={"executor": executor, "device": device, "download": download},
            store=runs or study.STORE,
            listen=lambda event: bars.update(bar, completed=event["round"], total=event["rounds"]),
        )
        for name in names:
            bars.update(bar, description=name, completed=0)
            try:
                files += study.make(by_name[name], size, out or study.OUT)
            except fldiag.FldiagError as error:  # does not stop the others
                if len(names) == 1:
                    raise
                failures.append(f"{name}: {error.what}")
    say(files, as_json)
    if failures:
        what = f"{len(failures)} of {len(names)} could not be made: {'; '.join(failures)}"
        raise fldiag.FldiagError(
            what, "the others were written; the same command tries these again"
        )


def _selected(ids: list[str], names: list[str]) -> list[str]:
    """The studies called for, by their names or their papers'."""
    if unknown := {*ids} - {*names, *PAPERS}:
        what = f"unknown figure {min(unknown)!r}"
        raise fldiag.FldiagError(what, "fldiag list figures names them", usage=True)
    return [name for name in names if {name, name.split("/")[0]} & {*ids}]
