"""Where answers are written."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fldiag.errors import FldiagError
from fldiag.results.files import refuse_links_above
from fldiag.runs.run import Run
from fldiag.runs.schema import Checkpoint

#: Where results go that belong to no single run, or to one that cannot be written to.
FALLBACK = Path("fldiag-out")


def folder(targets: Sequence[Run | Checkpoint]) -> Path:
    """The ``diagnostics`` folder of the one run that is diagnosed, or ``fldiag-out`` in the working directory."""
    runs = {
        t.path if isinstance(t, Run) else t.path.parent.parent
        for t in targets
        if isinstance(t, Run)
        or (t.path.parent.name == "rounds" and (t.path.parent.parent / "run.json").is_file())
    }
    inside = len(runs) == 1 and all(
        isinstance(t, Run) or t.path.parent.name == "rounds" for t in targets
    )
    run = next(iter(runs), FALLBACK)
    return run / "diagnostics" if inside and os.access(run, os.W_OK) else FALLBACK


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
