"""Where a verb writes and how it reads checkpoints: shared by the diagnosing verbs."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fldiag import api
from fldiag.checkpoint.run import Run
from fldiag.checkpoint.schema import Checkpoint
from fldiag.console import Console
from fldiag.errors import FldiagError
from fldiag.problem import from_checkpoint as target
from fldiag.problem.problem import Problem
from fldiag.results import files
from fldiag.results.provenance import digest

FALLBACK = Path("fldiag-out")
beside = files.beside


def checkpoints(paths: list[Path], model: str | None, data: str | None) -> list[Checkpoint]:
    """Every path as a checkpoint (a run folder: its last)."""
    found = []
    for path in paths:
        if path.is_dir():
            found.append(replace(Run.open(path).checkpoint(), model=model, data=data))
        else:
            loaded = api.load(path, model=model, data=data)
            found.append(loaded.checkpoint() if isinstance(loaded, Run) else loaded)
    return found


def labels(found: list[Checkpoint]) -> list[str]:
    """A short label for each checkpoint, all different."""
    names = [c.label for c in found]
    if max(Counter(names).values()) > 1:
        names = [f"{n} ({c.path.parent.parent.name if c.path.parent.name == 'rounds' else c.path.stem})"
                 for n, c in zip(names, found, strict=True)]
    if max(Counter(names).values()) > 1:
        names = [f"{n} #{i}" for i, n in enumerate(names, start=1)]
    return names


def problems(found: list[Checkpoint], where: dict[str, Any]) -> list[Problem]:
    client = where.get("client")
    suffix = "" if client is None else f" client {client}"
    with user_code():
        return [target.problem(c, name=label + suffix, **where) for c, label in zip(found, labels(found), strict=True)]


@contextmanager
def user_code() -> Iterator[None]:
    """The current folder is importable while a user's ``pkg.mod:name`` is looked up, as with ``python -m``."""
    here = os.getcwd()
    sys.path.append(here)  # last, so that nothing installed is shadowed
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def folder(found: list[Checkpoint], out: Path | None) -> Path:
    """``out``, or the run's ``diagnostics`` folder when one run is asked about, or ``fldiag-out`` here."""
    if out is not None:
        return out
    runs = {c.path.parent.parent for c in found if (c.path.parent.parent / "run.json").is_file()}
    inside = len(runs) == 1 and all(c.path.parent.name == "rounds" for c in found)
    run = next(iter(runs), FALLBACK)
    return run / "diagnostics" if inside and os.access(run, os.W_OK) else FALLBACK


def stem(verb: str, found: list[Checkpoint], *options: Any) -> str:
    """A file name that says what it is and differs whenever the question does."""
    what = found[0].path.stem if len(found) == 1 else f"{len(found)}-checkpoints"
    safe = "".join(ch if ch.isalnum() or ch in "._-" else "-" for ch in what)[:60]
    return f"{verb}-{safe}-{digest([c.sha256 for c in found], [repr(o) for o in options])[:8]}"


def write_table(frame: pd.DataFrame, path: Path, problems: list[Problem], found: list[Checkpoint], **options: Any) -> list[Path]:
    """The plotted numbers as CSV and their provenance as JSON beside it."""
    from fldiag.results.provenance import provenance

    about = provenance(dtype=problems[0].dtype, device=problems[0].device, seed=options.get("seed"),
                       checkpoints={p.name: {"file": c.path.name, "sha256": c.sha256, "run": c.manifest.get("run"),
                                             "slice": p.slice_name, "n": p.n} for p, c in zip(problems, found, strict=True)},
                       options={k: v for k, v in options.items() if isinstance(v, (str, int, float, bool, type(None)))})
    return files.write_table(frame, path, about)


def frozen(console: Console, problems: list[Problem]) -> None:
    """Says where frozen parameters are counted as weights."""
    for problem in problems:
        held = [p.numel() for p in problem.module.parameters() if not p.requires_grad]
        if held:
            console.note(f"{problem.name}: {sum(held):,} of {problem.layout.size:,} parameters are frozen (requires_grad = "
                         "False); they count as weights like the others")


def prepare(path: Path) -> Path:
    """The folder, made. Raises FldiagError before any work is done if it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise FldiagError(f"cannot write to {path}: {error.strerror}", "choose another folder with --out") from None
    return path


def dtype(precision: str) -> torch.dtype:
    if precision not in ("fp32", "fp64"):
        raise FldiagError(f"precision {precision!r} is not one of fp32, fp64", "choose one of them", usage=True)
    return torch.float32 if precision == "fp32" else torch.float64
