"""A diagnostic's table: checked, forecast, and kept under a digest of all it depends on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fldiag import registry
from fldiag.checkpoint.run import Run
from fldiag.clock import duration
from fldiag.diagnosis.options import plain
from fldiag.errors import FldiagError
from fldiag.execution.choice import chosen, cores
from fldiag.execution.forecast import faster, total, workers
from fldiag.execution.threads import threads
from fldiag.problem.ingredients import code_of
from fldiag.problem.problem import Problem
from fldiag.problem.trees import count
from fldiag.registry import Diagnostic, Progress
from fldiag.results.cache import Cache
from fldiag.results.kept_units import SpareStore
from fldiag.results.provenance import digest, provenance
from fldiag.results.table import check
from fldiag.rounds.history import History
from fldiag.user_code import importable

Subject = Problem | History | Sequence[Run] | Sequence[Problem]
#: Seconds of a forecast from which on it is told.
LONG = 60.0
#: Seconds that nobody waits: ten years. A number with some zeros too many is refused before memory is filled with it.
NEVER = 10 * 365 * 86400.0


def measure(
    entry: Diagnostic,
    subject: Subject,
    options: Mapping[str, Any],
    *,
    cache: str | Path | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
    whole: bool = True,
) -> pd.DataFrame:
    """The table of a diagnostic; ``options`` are checked and complete (``divide``). ``whole``: it is all that is asked, so
    that its parts can be done elsewhere.

    With ``cache`` (a folder) the table is kept: asked again, it is read back and verified; a long one that was interrupted
    goes on. ``tell``: is told of a damaged entry, and how long it will take where that is more than a minute.

    The table says in ``attrs`` which diagnostic it is of and with which options, for ``fldiag.draw``.
    """
    options = dict(options)
    said = tell or (lambda text: None)
    if cache is None:
        return _marked(entry, options, _build(entry, subject, options, progress, said, whole))
    deciding = {k: v for k, v in options.items() if k not in ("store", "executor", *entry.pictured)}
    key = digest(entry.name, identity(subject), deciding, origin(subject, options), *foreign(entry))
    entries = Cache(cache)
    found = entries.get(entry.name, key, on_damage=said)
    if found is not None:
        try:
            return _marked(entry, options, check(found))
        except FldiagError:
            said(f"the cached table of {entry.name} has another schema, so it is computed again")

    def spare() -> SpareStore | None:
        """Where finished parts are kept until the table is; None where the cache cannot be written."""
        try:
            return SpareStore(entries.partial(entry.name, key, on_damage=said), said)
        except FldiagError as error:
            said(f"finished parts are not kept: {error.what}")
            return None

    given = options if options.get("store", ...) is not None else {**options, "store": spare()}
    with _keeping(subject, options, lambda: (spare(), key)):
        frame = _build(entry, subject, given, progress, said, whole)
    about = {
        "diagnostic": entry.name,
        "subject": digest(identity(subject)),
        "options": plain(options),
    }
    try:
        entries.put(entry.name, key, frame, {**origin(subject, options), **about})
    except FldiagError as error:  # the answer is there, and may have room elsewhere
        said(f"the table of {entry.name} is not kept for later: {error.what}")
    return _marked(entry, options, frame)


@contextmanager
def _keeping(
    subject: Subject, options: Mapping[str, Any], where: Callable[[], tuple[SpareStore | None, str]]
) -> Iterator[None]:
    """Finished rounds of a run are kept, so that what is interrupted goes on; options with a ``store`` of their own see to it."""
    if not isinstance(subject, History) or "store" in options:
        yield
        return
    subject.store = where()
    try:
        yield
    finally:
        subject.store = None


def _build(
    entry: Diagnostic,
    subject: Subject,
    options: Mapping[str, Any],
    progress: Progress | None,
    tell: Callable[[str], None],
    whole: bool,
) -> pd.DataFrame:
    if entry.check is not None:
        entry.check(subject, options)
    if (seconds := forecast(entry, subject, options)) > LONG:
        if seconds > NEVER:
            raise FldiagError(
                f"{entry.name} would take about {seconds / (365 * 86400):,.0f} years on this machine",
                f"reduce the work, for example with fewer points or draws (fldiag explain {entry.name})",
                usage=True,
            )
        for text in _announced(entry, subject, options, seconds, whole):
            tell(text)
    first = subject if isinstance(subject, Problem | History) else next(iter(subject), None)
    device = first.device.type if isinstance(first, Problem | History) else "cpu"
    with importable(), torch.autocast(device, enabled=False):
        return check(entry.build(subject, progress, **options))


def _announced(
    entry: Diagnostic, subject: Subject, options: Mapping[str, Any], seconds: float, whole: bool
) -> Iterator[str]:
    """How long it takes where its parts are done, and where that would be clearly less: as if it had nothing but equal parts."""
    first = subject if isinstance(subject, (Problem, History)) else next(iter(subject))
    choice = chosen(getattr(first, "executor", "serial") if entry.parts else "serial")
    at_a_time = workers(choice)

    def parts(of: float, count: int) -> list[list[float]]:
        return [[of / count] * count]

    now = total(parts(seconds, at_a_time or 1), at_a_time)
    where = (
        f"of work for {choice}, by the speed of this machine"
        if at_a_time is None
        else "on this machine"
    )
    yield f"about {duration(now)} {where}; Ctrl-C keeps finished parts in the cache"
    if entry.parts and whole and at_a_time == 1:
        better = faster(parts(seconds, cores()), now)
        if better is None and cores() < cores(1):
            with threads(1):
                better = faster(parts(forecast(entry, subject, options), cores()), now)
        if better is not None:
            yield better.said(now)


def _marked(entry: Diagnostic, options: Mapping[str, Any], frame: pd.DataFrame) -> pd.DataFrame:
    frame.attrs = {"diagnostic": entry.name, "options": plain(options)}
    return frame


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


def forecast(entry: Diagnostic, subject: Subject, options: Mapping[str, Any]) -> float:
    """Seconds that the diagnostic takes here: its ``cost`` in gradients of the slice, times one that is timed.

    0 where the diagnostic has no cost, or its subject has nothing that could be timed.
    """
    if entry.cost is None:
        return 0.0
    problem = _problem(subject)
    count = 0.0 if problem is None else entry.cost(subject, options)
    if problem is None or not count:
        return 0.0
    try:
        return float(
            count
            * problem.recall(
                ("seconds of a gradient", torch.get_num_threads()), lambda: _timed(problem)
            )
        )
    except (FldiagError, RuntimeError):  # what is wrong will be said by the diagnostic itself
        return 0.0


def _problem(subject: Subject) -> Problem | None:
    """One whose gradient is like those that the diagnostic takes: of a run, the last round's on all clients' data; of several,
    the first."""
    if not isinstance(subject, History):
        first = subject if isinstance(subject, Problem) else next(iter(subject), None)
        return first if isinstance(first, Problem) else None
    try:
        stored = subject.last()
        return subject.problem((stored.aggregated, stored.buffers), subject.pool.clients, "train")
    except FldiagError:
        return None


def _timed(problem: Problem) -> float:
    """Seconds of a gradient of the whole slice, from that of its first batch."""
    problem.probe()
    x, y = problem.batch(0)
    for _ in range(2):  # the first one also allocates
        began = time.perf_counter()
        with problem.guarded(), torch.enable_grad():
            w = problem.w.clone().requires_grad_()
            torch.autograd.grad(problem.criterion(problem.call(w, x), y).sum(), w)
    return (time.perf_counter() - began) * problem.n / count(y)
