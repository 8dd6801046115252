"""What a diagnostic is asked of: from paths, runs, checkpoints and modules to Problems and Histories."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fldiag import registry
from fldiag.checkpoint import schema
from fldiag.checkpoint.run import Run, verify
from fldiag.checkpoint.schema import Checkpoint
from fldiag.diagnosis import options as shared
from fldiag.errors import FldiagError
from fldiag.problem import from_checkpoint
from fldiag.problem.problem import Problem
from fldiag.registry import Also, Diagnostic
from fldiag.rounds.history import OPTIONS as HISTORY
from fldiag.rounds.history import History

#: Where results go that belong to no single run, or to one that cannot be written to.
FALLBACK = Path("fldiag-out")
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
#: What a question can be about.
Target = Run | Checkpoint | Problem | History
#: Targets that lie in no folder.
OPEN = (Problem, History)


def load(path: str | Path, *, model: Any = None, data: Any = None) -> Run | Checkpoint:
    """A run folder as Run; a ``.pt`` or ``.safetensors`` file as Checkpoint.

    Args:
        path: a run folder, its run.json, or a checkpoint file.
        model: for a plain state_dict: a module, a registered name or ``pkg.mod:factory``; overrides what a checkpoint says.
        data: (x, y) tensors, a slice, a data set's name, ``npz:PATH`` or ``pkg.mod:loader``.

    Raises:
        FldiagError: the file is damaged, foreign or unsafe.
    """
    path = Path(path)
    if os.path.isdir(path) or path.name == "run.json":
        if model is not None or data is not None:
            raise FldiagError(f"{path} is a run, which knows its model and data", "give model and data with one of its "
                              "checkpoints: rounds/NNNN.pt", usage=True)
        return Run.open(path)
    verify(path)
    return replace(schema.read(path), model=model, data=data)


def checkpoint(target: Run | Checkpoint, model: Any = None, data: Any = None, round: int | None = None) -> Checkpoint:
    """The checkpoint itself, or a run's (default: its last)."""
    found = target.checkpoint(round) if isinstance(target, Run) else target
    return found if model is None and data is None else replace(found, model=model or found.model, data=data or found.data)


def labels(found: Sequence[Checkpoint]) -> list[str]:
    """A short label for each checkpoint, all different."""
    names = [c.label for c in found]
    if not names:
        return []
    if max(Counter(names).values()) > 1:
        names = [f"{n} ({c.path.parent.parent.name if c.path.parent.name == 'rounds' else c.path.stem})"
                 for n, c in zip(names, found, strict=True)]
    if max(Counter(names).values()) > 1:
        names = [f"{n} #{i}" for i, n in enumerate(names, start=1)]
    return names


def problems(found: Sequence[Checkpoint | Problem], where: Mapping[str, Any]) -> list[Problem]:
    """The loss around each of the checkpoints; ``where``: options of ``fldiag.problem.from_checkpoint.problem``."""
    client = where.get("client")
    suffix = "" if client is None else f" client {client}"
    names = iter(labels([c for c in found if isinstance(c, Checkpoint)]))
    with user_code():
        return [c if isinstance(c, Problem) else from_checkpoint.problem(c, **{"name": next(names) + suffix, **where})
                for c in found]


def history(run: Run, where: Mapping[str, Any]) -> History:
    """The stored rounds of a run; ``where``: options of ``History.of``."""
    with user_code():
        return History.of(run, **where)


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


@dataclass
class Divided:
    """Options given together, taken apart. ``where``: of the subject; ``own``: of the diagnostic, checked, with its defaults;
    ``more``: those of every further diagnostic that a flag asks for, by its name. ``flags``: those given."""

    where: dict[str, Any]
    own: dict[str, Any]
    more: dict[str, dict[str, Any]]
    flags: list[str]


def divide(entry: Diagnostic, options: Mapping[str, Any]) -> Divided:
    """Whose each option is. Raises FldiagError for unknown options and values out of range."""
    own = set(entry.options.model_fields)
    asked = [also for flag, also in entry.also.items() if options.get(flag)]
    theirs = {name for also in entry.also.values() for name in also.options} - own
    where: dict[str, Any] = {}
    mine = {k: v for also in asked for k, v in also.sets.items()}
    for name, value in options.items():
        if name in own:
            mine[name] = value
        elif name == "precision" and entry.on != "runs":
            where["dtype"], bf16 = _precision(value, "bf16" in own)
            mine |= {"bf16": True} if bf16 else {}
        elif name in TAKES[entry.on]:
            where[name] = value
        elif name not in entry.also and name not in theirs:
            mine[name] = value  # refused below, with the nearest known name
    if isinstance(where.get("memory"), str):
        where["memory"] = shared.size(where["memory"])
    more = {also.name: _theirs(also, own, options) for also in asked}
    return Divided(where, entry.validate(mine), more, [flag for flag in entry.also if options.get(flag)])


def _theirs(also: Also, own: set[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a further diagnostic: those that it alone has, and those that it shares with the flag's owner."""
    there = set(registry.diagnostic.get(also.name).options.model_fields)
    return {k: v for k, v in options.items() if k in there and (k in own or k in also.options)}


#: What the subject of each kind takes, besides ``precision``.
TAKES: dict[str, tuple[str, ...]] = {
    "problem": (*from_checkpoint.OPTIONS, "model", "data"), "checkpoints": (*from_checkpoint.OPTIONS, "model", "data"),
    "run": (*HISTORY, "memory"), "runs": ()}


def _precision(precision: str, bf16: bool) -> tuple[torch.dtype, bool]:
    """The subject's dtype, and whether layers compute in bf16: a way to evaluate that few diagnostics have."""
    allowed = [*DTYPES, *(["bf16"] if bf16 else [])]
    if precision not in allowed:
        raise FldiagError(f"precision {precision!r} is not one of {', '.join(allowed)}", "choose one of them", usage=True)
    return DTYPES.get(precision, torch.float32), precision == "bf16"


def folder(found: Sequence[Run | Checkpoint]) -> Path:
    """The ``diagnostics`` folder of the one run that is asked about, or ``fldiag-out`` here."""
    runs = {t.path if isinstance(t, Run) else t.path.parent.parent for t in found
            if isinstance(t, Run) or (t.path.parent.name == "rounds" and (t.path.parent.parent / "run.json").is_file())}
    inside = len(runs) == 1 and all(isinstance(t, Run) or t.path.parent.name == "rounds" for t in found)
    run = next(iter(runs), FALLBACK)
    return run / "diagnostics" if inside and os.access(run, os.W_OK) else FALLBACK


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

