"""What a run that ended needs no more, and its removal: run.json first, then the files."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from fldiag.errors import FldiagError
from fldiag.runs import owner
from fldiag.runs.run import Run


def unneeded(run: Run, rounds: Collection[int] | None = None, *, state: bool = True) -> list[str]:
    """Names of the files that can go: with ``state`` what the clients carry from round to round (without it the run cannot be
    given more rounds), and the checkpoints of all rounds but ``rounds`` (None: none) and the last."""
    names = (
        [] if rounds is None else [run.round_file(r) for r in run.rounds[:-1] if r not in rounds]
    )
    return names + (
        [name for key, name in run.index["state"].items() if key != "server"] if state else []
    )


def thin(run: Run, rounds: Collection[int] | None = None, *, state: bool = True) -> list[str]:
    """Remove what is ``unneeded``, and return its names. Raises FldiagError for a run that is not finished, or holds symbolic
    links."""
    if run.status not in ("finished", "diverged"):
        raise FldiagError(
            f"{run.path} is {run.status}",
            "finish it first: the same command with --resume",
            usage=True,
        )
    with owner.hold(run.path):
        run = Run.open(run.path)
        names = unneeded(run, rounds, state=state)
        for name in names:
            run.index["files"].pop(name, None)
        if state:
            run.index["state"] = (
                {"server": run.index["state"]["server"]} if "server" in run.index["state"] else {}
            )
        run.index["thinned"] = {"rounds": run.rounds, "state": state}
        run.commit()
        for name in names:
            (run.path / name).unlink(missing_ok=True)
    return names


def remove(path: Path) -> None:
    """Remove a run and its answers, but nothing in its folder that is not fldiag's. Raises FldiagError when another process
    trains it, or it holds symbolic links."""
    Run.open(path)
    with owner.hold(path):
        for name in owner.FILES:  # run.json first: what is left when this is cut off is no run
            (path / name).unlink(missing_ok=True)
        for name in owner.FOLDERS:
            if (path / name).is_dir():
                shutil.rmtree(path / name)


def size(path: Path) -> int:
    """Bytes of the files in a folder; links are not followed."""
    return sum(
        file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink()
    )
