"""The verbs of run folders and files: list and thin runs, bring results in from other programs."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fldiag.cli.app import app
from fldiag.cli.console import Console, errors
from fldiag.cli.options import Data, Debug, Json, TrustFile
from fldiag.errors import FldiagError, counted

if TYPE_CHECKING:
    from fldiag.runs.run import Run


@app.command(rich_help_panel="Files")
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
        from fldiag.runs.run import Run

        console = Console(json)
        if not os.path.isdir(folder):
            raise FldiagError(
                f"{folder} is not a folder",
                "give the folder that holds runs (default: checkpoints)",
                usage=True,
            )
        rows, damaged = [], []
        for file in sorted(folder.rglob("run.json")):
            try:
                rows.append(_row(Run.open(file.parent), file.parent.relative_to(folder)))
            except FldiagError as error:
                damaged.append(f"{file.parent}: {error.what}")
        if not rows and not damaged:
            raise FldiagError(
                f"there is no run under {folder}", "train one: fldiag train digits", usage=True
            )
        names = ("run", "method", "seed", "rounds", "status", "MB", "changed")
        console.table(rows, {name: name for name in names})
        for text in damaged:
            console.note(text)
        console.done(folder)


def _row(run: Run, name: Path) -> dict[str, Any]:
    from fldiag.runs.run import ABOUT, LINES, folder_size, is_locked

    config = run.about["config"]
    changed = max((run.path / name).stat().st_mtime for name in (ABOUT, LINES))
    status = run.status
    if status == "unfinished":
        status = "training" if is_locked(run.path) else "stopped"
    return {
        "run": str(name),
        "method": str(config.get("method", {}).get("name", "–")),
        "seed": config.get("seed"),
        "rounds": f"{run.done} of {config.get('rounds', '?')}",
        "status": status,
        "MB": round(folder_size(run.path) / 1e6, 1),
        "changed": f"{datetime.fromtimestamp(changed):%Y-%m-%d %H:%M}",
    }


@app.command(rich_help_panel="Files")
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
        from fldiag.runs.run import Run, select_rounds

        console = Console(json)
        selection: list[tuple[Run, list[int] | None]] = []
        rows: list[dict[str, Any]] = []
        for path in run:
            finished = Run.open(path)
            if finished.status == "unfinished":
                raise FldiagError(
                    f"{path} is not finished: continuing it needs all of its files",
                    "finish it first, or leave it out",
                    usage=True,
                )
            rounds = None
            if keep is not None:
                rounds = select_rounds(keep, finished.rounds) or finished.rounds
            selection.append((finished, rounds))
            names = finished.unneeded(rounds)
            files = [finished.path / name for name in names]
            size = sum(file.stat().st_size for file in files if file.is_file())
            console.say(f"{finished.path}: {counted(len(names), 'file')}, {size / 1e6:,.1f} MB")
            rows.append({"run": str(finished.path), "files": names, "bytes": size})
        console.result["rows"] = rows
        if dry_run:
            console.say("nothing was removed (--dry-run)")
        elif not any(row["files"] for row in rows):
            console.say("there is nothing to remove")
        elif yes or console.confirm(
            "Remove them? Runs without their clients' states cannot be given more rounds.",
            "say yes on the command line: --yes",
        ):
            for finished, rounds in selection:
                finished.prune(rounds)
        else:
            console.say("nothing was removed")
        console.done(*run)


@app.command(rich_help_panel="Files")
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="A folder of per-client files, or of global models.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The run folder to make."),
    ],
    model: Annotated[str, typer.Option(help="Model of the files: NAME or pkg.mod:factory.")],
    pattern: Annotated[
        str | None,
        typer.Option(
            help="Paths of the clients' files, such as "
            "'round_{round}/client_{client}.pt' (* stands for any text)."
        ),
    ] = None,
    global_pattern: Annotated[
        str | None,
        typer.Option(
            help="Paths of the global models after each round, such as 'round_{round}/global.pt'."
        ),
    ] = None,
    partition: Annotated[
        Path | None,
        typer.Option(help="Which examples belong to which client: npz or JSON, client -> indices."),
    ] = None,
    data: Data = None,
    method: Annotated[str, typer.Option(help="Name of the method in tables.")] = "foreign",
    seed: Annotated[
        int, typer.Option(help="Seed that the training used; only shown in tables.")
    ] = 0,
    key: Annotated[
        str | None,
        typer.Option(
            help="Set of weights to read of files that hold several, such as model_ema "
            "(default: the plain one)."
        ),
    ] = None,
    trust_file: TrustFile = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Turn a folder of client checkpoints, or of global models, into a run.

    Example: fldiag convert received/ checkpoints/theirs --pattern 'round_{round}/client_{client}.pt' --model small_cnn
    --data digits --partition partition.json
    """
    with errors(debug):
        from fldiag.integrations.importer import convert as convert_files

        console = Console(json)
        with console.progress(target.name) as progress:
            converted = convert_files(
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
                on_event=lambda e: progress(e["round"], e["rounds"], f"round {e['round']}"),
            )
        for text in converted.origin["notes"]:
            console.note(text)
        row = {"rounds": converted.done, "clients": converted.about["config"]["clients"]["total"]}
        console.table([row], {name: name for name in row})
        console.done(converted.path / "run.json", converted.path)
