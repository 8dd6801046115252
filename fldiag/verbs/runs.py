"""``fldiag runs`` and ``fldiag prune``: what is on disk, and what of it can go."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

from fldiag.console import Console
from fldiag.diagnosis.options import rounds as choice
from fldiag.errors import FldiagError, counted, short_path
from fldiag.runs import owner, prune
from fldiag.runs.index import unverified
from fldiag.runs.run import Run

COLUMNS = {name: name for name in ("run", "method", "seed", "rounds", "status", "MB", "changed")}


def runs(console: Console, folder: Path) -> None:
    """A row a run under the folder."""
    if not os.path.isdir(folder):
        raise FldiagError(
            f"{short_path(folder)} is not a folder",
            "give the folder that holds runs (default: checkpoints)",
            usage=True,
        )
    rows, damaged, readable = [], [], []
    for file in sorted(folder.rglob("run.json")):
        try:
            rows.append(_row(Run.open(file.parent), file.parent.relative_to(folder)))
            readable.append(file.parent)
        except FldiagError as error:
            damaged.append(f"{file.parent}: {error.what}")
    if not rows and not damaged:
        raise FldiagError(
            f"there is no run under {folder}", "train one: fldiag train digits", usage=True
        )
    console.table(rows, COLUMNS)
    for text in [*damaged, *unverified(readable)]:
        console.note(text)
    console.done(folder)


def _row(run: Run, name: Path) -> dict[str, Any]:
    config = run.index["config"]
    changed = max(
        f.stat().st_mtime for f in (run.path / "run.json", run.path / "journal.jsonl") if f.exists()
    )
    status = (
        "training"
        if run.status == "running" and os.path.exists(run.path / owner.NAME)
        else run.status
    )
    return {
        "run": str(name),
        "method": str(config.get("method", {}).get("name", "–")),
        "seed": config.get("seed"),
        "rounds": f"{run.done} of {config.get('rounds', '?')}",
        "status": "stopped" if status == "running" else status,
        "MB": round(prune.size(run.path) / 1e6, 1),
        "changed": f"{datetime.fromtimestamp(changed):%Y-%m-%d %H:%M}",
    }


def thin(console: Console, paths: list[Path], keep: str | None, dry_run: bool, yes: bool) -> None:
    """Remove what finished runs no longer need, after asking."""
    selection = []
    for path in paths:
        run = Run.open(path)
        if run.status not in ("finished", "diverged"):
            raise FldiagError(
                f"{path} is {run.status}: continuing it needs all of its files",
                "finish it first, or leave it out",
                usage=True,
            )
        owner.refuse_links(path)
        rounds = None if keep is None else choice(keep, run.rounds) or run.rounds
        names = prune.unneeded(run, rounds)
        size = sum((run.path / n).stat().st_size for n in names if (run.path / n).is_file())
        selection.append((run, rounds))
        console.say(f"{run.path}: {counted(len(names), 'file')}, {size / 1e6:,.1f} MB")
        console.result.setdefault("rows", []).append(
            {"run": str(run.path), "files": names, "bytes": size}
        )
    if dry_run:
        console.say("nothing was removed (--dry-run)")
    elif not any(row["files"] for row in console.result["rows"]):
        console.say("there is nothing to remove")
    elif yes or console.confirm(
        "Remove them? Runs without their clients' states cannot be given more rounds.",
        "say yes on the command line: --yes",
    ):
        for run, rounds in selection:
            prune.thin(run, rounds)
    else:
        console.say("nothing was removed")
    console.done(*paths)
