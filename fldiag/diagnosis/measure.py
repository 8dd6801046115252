"""A diagnostic's table: checked, and kept under a digest of all it depends on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fldiag import registry
from fldiag.diagnosis.options import plain
from fldiag.errors import FldiagError
from fldiag.problem.ingredients import code_of
from fldiag.problem.problem import Problem
from fldiag.registry import Diagnostic, Progress
from fldiag.results.cache import Cache
from fldiag.results.kept_units import SpareStore
from fldiag.results.provenance import digest, provenance
from fldiag.results.table import check
from fldiag.runs.history import History
from fldiag.runs.run import Run
from fldiag.user_code import importable

Subject = Problem | History | Sequence[Run] | Sequence[Problem]


def measure(
    entry: Diagnostic,
    subject: Subject,
    options: Mapping[str, Any],
    *,
    cache: str | Path | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """The table of a diagnostic; ``options`` are checked and complete (``split_options``).

    With ``cache`` (a folder) the table is kept: asked again, it is read back and verified; a long one that was interrupted
    goes on. ``tell``: is told of a damaged entry.

    The table says in ``attrs`` which diagnostic it is of and with which options, for ``fldiag.draw``.
    """
    options = dict(options)
    tell = tell or (lambda text: None)
    if cache is None:
        return _marked(entry, options, _build(entry, subject, options, progress))
    deciding = {k: v for k, v in options.items() if k not in ("store", "executor", *entry.pictured)}
    key = digest(entry.name, identity(subject), deciding, origin(subject, options), *foreign(entry))
    entries = Cache(cache)
    table = entries.get(entry.name, key, on_damage=tell)
    if table is not None:
        try:
            return _marked(entry, options, check(table))
        except FldiagError:
            tell(f"the cached table of {entry.name} has another schema, so it is computed again")

    def open_store() -> SpareStore | None:
        """Where finished parts are kept until the table is; None where the cache cannot be written."""
        try:
            return SpareStore(entries.partial(entry.name, key, on_damage=tell), tell)
        except FldiagError as error:
            tell(f"finished parts are not kept: {error.what}")
            return None

    has_store = options.get("store", ...) is not None
    with_store = options if has_store else {**options, "store": open_store()}
    with _round_store(subject, options, lambda: (open_store(), key)):
        table = _build(entry, subject, with_store, progress)
    about = {
        "diagnostic": entry.name,
        "subject": digest(identity(subject)),
        "options": plain(options),
    }
    try:
        entries.put(entry.name, key, table, {**origin(subject, options), **about})
    except FldiagError as error:  # the answer is there, and may have room elsewhere
        tell(f"the table of {entry.name} is not kept for later: {error.what}")
    return _marked(entry, options, table)


@contextmanager
def _round_store(
    subject: Subject,
    options: Mapping[str, Any],
    open_store: Callable[[], tuple[SpareStore | None, str]],
) -> Iterator[None]:
    """Finished rounds of a run are kept, so that what is interrupted goes on; options with a ``store`` of their own see to it."""
    if not isinstance(subject, History) or "store" in options:
        yield
        return
    subject.store = open_store()
    try:
        yield
    finally:
        subject.store = None


def _build(
    entry: Diagnostic,
    subject: Subject,
    options: Mapping[str, Any],
    progress: Progress | None,
) -> pd.DataFrame:
    if entry.check is not None:
        entry.check(subject, options)
    first = subject if isinstance(subject, Problem | History) else next(iter(subject), None)
    device = first.device.type if isinstance(first, Problem | History) else "cpu"
    with importable(), torch.autocast(device, enabled=False):
        return check(entry.build(subject, progress, **options))


def _marked(entry: Diagnostic, options: Mapping[str, Any], table: pd.DataFrame) -> pd.DataFrame:
    table.attrs = {"diagnostic": entry.name, "options": plain(options)}
    return table


def identity(subject: Subject) -> Any:
    """What tells subjects apart: their weights, model, data and labels."""
    if isinstance(subject, (Problem, History)):
        return [subject.digest(), subject.common]
    return [identity(s) if isinstance(s, Problem) else [s.name, s.index] for s in subject]


def foreign(entry: Diagnostic) -> list[Any]:
    """What tells versions of another package's diagnostic apart: its distribution and the source of its module."""
    module = entry.build.__module__
    if module.split(".")[0] == "fldiag":
        return []
    packages = [
        f"{p.dist.name} {p.dist.version}"
        for p in registry.diagnostic.plugins()
        if p.name == entry.name and p.dist
    ]
    source = getattr(sys.modules.get(module), "__file__", None)
    return [module, packages, Path(source).read_bytes() if source else code_of(entry.build)]


def origin(subject: Subject, options: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance of what is computed from this subject."""
    first = subject if isinstance(subject, (Problem, History)) else next(iter(subject), None)
    if isinstance(first, (Problem, History)):
        return provenance(dtype=first.dtype, device=first.device, seed=options.get("seed"))
    return provenance(device=options.get("device"), seed=options.get("seed"))
