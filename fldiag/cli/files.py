"""The verbs of run folders and files: list and thin runs, bring results in from other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fldiag.cli.app import verb
from fldiag.cli.console import Console
from fldiag.cli.options import Data, Json
from fldiag.errors import FldiagError


@verb("Files")
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds the runs.")] = Path(
        "checkpoints"
    ),
    json: Json = False,
) -> None:
    """List the runs in a folder: method, seed, rounds done, status and size.

    Example: fldiag runs checkpoints
    """
    from fldiag.runs.run import Run, folder_size

    console, rows = Console(json), []
    for file in sorted(folder.rglob("run.json")):
        row: dict[str, Any] = {"run": str(file.parent.relative_to(folder))}
        try:
            run = Run.open(file.parent)
            config = run.about["config"]
            row |= {"method": config.get("method", {}).get("name"), "seed": config.get("seed")}
            row |= {"rounds": run.done, "of": config.get("rounds"), "status": run.status}
        except FldiagError as error:
            row["status"] = f"damaged: {error.what}"
        rows.append(row | {"MB": folder_size(file.parent) / 1e6})
    if not rows:
        raise FldiagError(f"there is no run under {folder}", usage=True)
    names = ("run", "method", "seed", "rounds", "of", "MB", "status")
    console.table(rows, {name: name for name in names})
    console.done(folder)


@verb("Files")
def prune(
    run: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    keep: Annotated[
        str | None,
        typer.Option(
            help="Also delete the checkpoints of all rounds except these: last, every:10 or 5,20-30."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be deleted.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    json: Json = False,
) -> None:
    """Delete files that finished runs no longer need: client states and, with --keep, checkpoints. Asks first.

    Example: fldiag prune checkpoints/digits-scaffold-s0-0a1b2c3d --keep last --dry-run
    """
    from fldiag.runs.run import Run, select_rounds

    console = Console(json)
    finished = [Run.open(path) for path in run]
    rounds = [keep and select_rounds(keep, one.rounds) for one in finished]
    rows = [
        {"run": str(one.path), "file": name}
        for one, kept in zip(finished, rounds, strict=True)
        for name in one.unneeded(kept or None)
    ]
    console.table(rows, {"run": "run", "file": "file that is not needed"})
    if rows and not dry_run:
        if not yes:
            typer.confirm("Delete them? No more rounds can be trained.", abort=True, err=True)
        for one, kept in zip(finished, rounds, strict=True):
            one.prune(kept or None)
    console.done(*run)


@verb("Files")
def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="IN", help="A folder of the clients' files, or of global models."),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The run folder to make.")],
    model: Annotated[str, typer.Option(help="Model of the files: NAME or pkg.mod:factory.")],
    pattern: Annotated[
        str | None,
        typer.Option(
            help="The clients' files, such as 'round_{round}/client_{client}.pt' (* stands for any text)."
        ),
    ] = None,
    global_pattern: Annotated[
        str | None,
        typer.Option(help="The global models after each round, such as 'round_{round}/global.pt'."),
    ] = None,
    partition: Annotated[
        Path | None,
        typer.Option(help="Which examples belong to which client: npz or JSON, client -> indices."),
    ] = None,
    data: Data = None,
    method: Annotated[str, typer.Option(help="Name of the method in tables.")] = "foreign",
    seed: Annotated[int, typer.Option(help="Seed that the training used.")] = 0,
    key: Annotated[
        str | None,
        typer.Option(help="Set of weights of files that hold several, such as model_ema."),
    ] = None,
    json: Json = False,
) -> None:
    """Turn a folder of client checkpoints, or of global models, into a run.

    Example: fldiag convert received/ checkpoints/theirs --pattern 'round_{round}/client_{client}.pt' --model small_cnn
    --data digits --partition partition.json
    """
    from fldiag.execution import Workspace
    from fldiag.integrations import importer

    console = Console(json)
    with console.progress(target.name) as progress, Workspace(progress=progress):
        run = importer.convert(
            source,
            target,
            pattern=pattern,
            model=model,
            global_pattern=global_pattern,
            data=data,
            partition=partition,
            method=method,
            seed=seed,
            key=key,
        )
    for text in run.origin["notes"]:
        console.note(text)
    console.done(run.path)
