"""The verbs of run folders and files: list and thin runs, bring results in from other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fldiag.cli.app import Console, verb
from fldiag.errors import FldiagError


@verb("Files")
def runs(
    console: Console,
    folder: Annotated[Path, typer.Argument(help="Folder that holds the runs.")] = Path(
        "checkpoints"
    ),
) -> None:
    """List the runs in a folder: method, seed, rounds done, status and size.

    Example: fldiag runs checkpoints
    """
    from fldiag.runs.run import Run

    rows = []
    for file in sorted(folder.rglob("run.json")):
        path = file.parent
        size = sum(part.lstat().st_size for part in path.rglob("*.*"))
        row = {"run": str(path.relative_to(folder)), "MB": size / 1e6}
        try:
            run = Run.open(path)
            rows.append({**run.common, **row, "rounds": run.done, "status": run.status})
        except FldiagError as error:
            rows.append({**row, "status": f"damaged: {error.what}"})
    if not rows:
        raise FldiagError(f"there is no run under {folder}", usage=True)
    console.table(rows)
    console.done(folder)


@verb("Files")
def prune(
    console: Console,
    run: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    keep: Annotated[
        str | None,
        typer.Option(
            help="Also delete the checkpoints of all rounds except these: last or 5,20-30."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
) -> None:
    """Delete files that finished runs no longer need: client states and, with --keep, checkpoints. Asks first.

    Example: fldiag prune checkpoints/digits-scaffold-s0-0a1b2c3d --keep last
    """
    from fldiag.diagnosis.diagnose import read_rounds
    from fldiag.runs.run import Run

    names = {one: one.unneeded(read_rounds(keep, one.rounds)) for one in map(Run.open, run)}
    rows = [{"unneeded file": str(one.path / file)} for one in names for file in names[one]]
    console.table(rows)
    if rows and not yes:
        typer.confirm("Delete them? No more rounds can be trained.", abort=True, err=True)
    for one in names if rows else ():
        one.remove(names[one])
    console.done(*run)


@verb("Files", "pattern", "global_pattern", "data", "partition", "method", "key")
def convert(
    console: Console,
    source: Annotated[
        Path,
        typer.Argument(metavar="IN", help="A folder of the clients' files, or of global models."),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The run folder to make.")],
    model: Annotated[str, typer.Option(help="Model of the files: NAME or pkg.mod:factory.")],
    seed: Annotated[int, typer.Option(help="Seed that the training used.")] = 0,
    **options: Any,
) -> None:
    """Turn a folder of client checkpoints, or of global models, into a run.

    Example: fldiag convert received/ checkpoints/theirs --pattern 'round_{round}/client_{client}.pt' --model small_cnn
    --data digits --partition partition.json
    """
    from fldiag.execution import Workspace
    from fldiag.integrations import importer

    with console.progress(target.name) as progress, Workspace(show=progress):
        run = importer.convert(source, target, model=model, seed=seed, **options)
    for text in run.origin["notes"]:
        console.note(text)
    console.done(run.path)
