"""A diagnostic's tables: checked, and kept under a digest of all that decides them."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pandas as pd
import pydantic
import torch

from fldiag import registry
from fldiag.device import full_precision
from fldiag.diagnosis.options import plain
from fldiag.diagnosis.question import Question, find_diagnostic
from fldiag.diagnosis.subjects import Subject, remarks
from fldiag.errors import FldiagError
from fldiag.execution import Workspace, open_pool
from fldiag.problem.problem import Problem, code_of
from fldiag.registry import Diagnostic, Progress
from fldiag.results.cache import Cache
from fldiag.results.files import sha256
from fldiag.results.provenance import digest, provenance
from fldiag.results.table import check
from fldiag.runs.history import History
from fldiag.runs.run import Run

#: What shows progress: a title -> a context that gives the callback.
Bar = Callable[[str], AbstractContextManager[Progress]]


def measure_all(
    question: Question,
    subjects: Sequence[Subject],
    *,
    bar: Bar,
    tell: Callable[[str], None],
    cache: Path | None = None,
) -> dict[Diagnostic, pd.DataFrame]:
    """The table of the diagnostic; those of several subjects one below the other.

    With an executor each subject is measured elsewhere where there are several, else parts of the one.
    """
    if len(subjects) > 1 and question.entry.has_vectors(dict(question.options)):
        raise FldiagError(
            f"vectors are saved of one checkpoint at a time, and there are {len(subjects)}",
            "name one checkpoint",
            usage=True,
        )
    for text in dict.fromkeys(text for subject in subjects for text in remarks(subject)):
        tell(text)
    executor = question.subject_options.executor
    requests = {question.entry: question.options}
    units = [(e.name, s, dict(options)) for s in subjects for e, options in requests.items()]
    tables: dict[str, list[pd.DataFrame]] = {entry.name: [] for entry in requests}
    if len(subjects) > 1 and executor != "serial":
        with (
            bar(question.entry.name) as progress,
            open_pool(executor, _measure_unit, cache, name=_unit_title) as pool,
        ):
            progress(0, len(units), _title(subjects[0]))
            for done, (unit, (table, texts)) in enumerate(
                zip(units, pool.map(units), strict=True), start=1
            ):
                for text in texts:
                    tell(text)
                progress(done, len(units), _title(unit[1]))
                tables[unit[0]].append(table)
    else:
        for subject in subjects:
            for entry, options in requests.items():
                with bar(f"{_title(subject)} {entry.name}") as progress:
                    table = measure(
                        entry,
                        subject,
                        options,
                        cache=cache,
                        executor=executor,
                        progress=progress,
                        tell=tell,
                    )
                tables[entry.name].append(table)
    return {entry: joined(tables[entry.name]) for entry in requests}


#: Name of a diagnostic, a subject, options.
Unit = tuple[str, Any, dict[str, Any]]


def _measure_unit(cache: Path | None, unit: Unit) -> tuple[pd.DataFrame, list[str]]:
    """A table, and the remarks on it."""
    name, subject, values = unit
    entry, texts = find_diagnostic(name), list[str]()
    options = entry.options.model_construct(**values)
    return measure(entry, subject, options, cache=cache, tell=texts.append), texts


def _unit_title(unit: Unit) -> str:
    return f"{unit[0]} of {_title(unit[1])}"


def _title(subject: Subject) -> str:
    """What progress calls a subject."""
    return ", ".join(
        s.name for s in ([subject] if isinstance(subject, (Problem, History)) else subject)
    )


def joined(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Tables one below the other; ``attrs`` are the first one's, with the key of all."""
    if len(parts) == 1:
        return parts[0]
    table = pd.concat([t.assign() for t in parts], ignore_index=True)
    table.attrs = dict(parts[0].attrs)
    if "key" in table.attrs:
        table.attrs["key"] = digest(*(t.attrs["key"] for t in parts))
    return table


def measure(
    entry: Diagnostic,
    subject: Subject,
    options: pydantic.BaseModel,
    *,
    cache: str | Path | None = None,
    executor: Any = "serial",
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """The table of a diagnostic, with options that its schema parsed.

    With ``cache`` (a folder) the table is kept: asked again, it is read back and verified. ``tell``: is told of a damaged entry.

    The table says in ``attrs`` which diagnostic it is of and with which options, for ``fldiag.draw``, and with ``cache`` its
    key, the digest of all that decides it.
    """
    values = dict(options)
    tell = tell or (lambda text: None)
    if cache is None:
        return _marked(entry, values, _build(entry, subject, values, executor, progress, tell))
    deciding = {k: v for k, v in values.items() if k not in entry.drawing_options}
    key = digest(entry.name, identity(subject), deciding, origin(subject, values), *foreign(entry))
    entries = Cache(cache)
    # a table in the cache has no vectors: they are in the file beside it
    is_complete = not entry.has_vectors(values)
    table = entries.get(entry.name, key, on_damage=tell) if is_complete else None
    if table is not None:
        try:
            return _marked(entry, values, check(table), key)
        except FldiagError:
            tell(f"the cached table of {entry.name} has another schema, so it is computed again")
    table = _build(entry, subject, values, executor, progress, tell)
    about = {
        "diagnostic": entry.name,
        "subject": digest(identity(subject)),
        "options": plain(values),
    }
    try:
        copy_without_vectors = table.copy(deep=False)
        copy_without_vectors.attrs = {}
        entries.put(entry.name, key, copy_without_vectors, {**origin(subject, values), **about})
    except FldiagError as error:  # the answer is there, and may have room elsewhere
        tell(f"the table of {entry.name} is not kept for later: {error.what}")
    return _marked(entry, values, table, key)


@full_precision()
def _build(
    entry: Diagnostic,
    subject: Subject,
    options: Mapping[str, Any],
    executor: Any,
    progress: Progress | None,
    tell: Callable[[str], None],
) -> pd.DataFrame:
    first = subject if isinstance(subject, Problem | History) else next(iter(subject), None)
    device = first.device.type if isinstance(first, Problem | History) else "cpu"
    with (
        torch.autocast(device, enabled=False),
        Workspace(executor, progress) as workspace,
    ):
        table = check(entry.build(subject, **options))
        if executor != "serial" and not workspace.is_used:
            tell(f"{entry.name} cannot be split for {executor}: it was computed in this process")
        return table


def _marked(
    entry: Diagnostic, options: Mapping[str, Any], table: pd.DataFrame, key: str | None = None
) -> pd.DataFrame:
    vectors = {k: v for k, v in table.attrs.items() if k == "vectors"}
    table.attrs = {"diagnostic": entry.name, "options": plain(options), **vectors}
    table.attrs |= {} if key is None else {"key": key}
    return table


def identity(subject: Subject) -> Any:
    """What tells subjects apart: their weights, model, data, labels and names."""
    if isinstance(subject, (Problem, History)):
        return [subject.digest(), subject.common]
    return [
        [*identity(s), *_further_weights(s)] if isinstance(s, Problem) else _identity_of_run(s)
        for s in subject
    ]


def _further_weights(problem: Problem) -> list[Any]:
    """What tells the clients of a problem's checkpoint and the rounds of its run apart: a joint diagnostic may take them."""
    checkpoint = [] if problem.checkpoint is None else [problem.checkpoint.sha256]
    return checkpoint if problem.run is None else [*checkpoint, problem.run.files]


def _identity_of_run(run: Run) -> list[Any]:
    """Also what its files hold now: one that is damaged, or repaired, gives another answer."""
    paths = {name: run.path / name for name in run.files}
    contents = {name: sha256(path) for name, path in paths.items() if path.is_file()}
    overrides = [_identity_of_override(v) for v in (run.model, run.data) if v is not None]
    return [run.name, run.about, run.metrics_digest, contents, *overrides]


def _identity_of_override(thing: Any) -> str:
    try:
        return digest(thing)
    except FldiagError:  # a module, say: what is computed with it is not read again
        return uuid.uuid4().hex


def foreign(entry: Diagnostic) -> list[Any]:
    """What tells versions of another package's diagnostic apart: its distribution and the source of its module."""
    module = entry.build.__module__
    if module.split(".")[0] == "fldiag":
        return []
    packages = [
        f"{p.dist.name} {p.dist.version}"
        for p in registry.diagnostic.plugins().values()
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
