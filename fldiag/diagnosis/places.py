"""Where answers are written."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from fldiag.errors import FldiagError
from fldiag.results.files import refuse_links_above

#: Where results go that belong to no single run, or to one that cannot be written to.
FALLBACK = Path("fldiag-out")


def folder(paths: Collection[Path]) -> Path:
    """The ``diagnostics`` folder of the one run that these run folders and checkpoint files belong to, or ``fldiag-out`` in the
    working directory."""
    runs = {path.parent.parent if path.parent.name == "rounds" else path for path in paths}
    run = runs.pop() if len(runs) == 1 else FALLBACK
    is_run = (run / "run.json").is_file()
    return run / "diagnostics" if is_run and os.access(run, os.W_OK) else FALLBACK


def distinct(runs: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parents as make them all different. Raises FldiagError for a run given twice."""
    paths = [p.resolve() for p in runs]
    if twice := [str(p) for p, n in Counter(paths).items() if n > 1]:
        raise FldiagError(f"run {twice[0]} was given twice", "give it once", usage=True)
    depths = range(1, max((len(p.parts) for p in paths), default=1) + 1)
    candidates = (["/".join(p.parts[-depth:]) for p in paths] for depth in depths)
    return next(names for names in candidates if len(set(names)) == len(names))


def cache(path: Path) -> Path | None:
    """Where tables are kept of what is answered elsewhere; None where that cannot be written."""
    try:
        return prepare(path) / "cache"
    except FldiagError:
        return None


def prepare(path: Path) -> Path:
    """The folder, made. Raises FldiagError before any work is done if it cannot be written."""
    refuse_links_above(path / "cache")  # whose parent is the folder
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise FldiagError(
            f"cannot write to {path}: {error.strerror}", "choose another folder with --out"
        ) from None
    return path


def remove_empty(path: Path) -> None:
    """Remove a folder of results in which nothing was written."""
    with contextlib.suppress(OSError):
        (path / "cache").rmdir()
    with contextlib.suppress(OSError):
        path.rmdir()
