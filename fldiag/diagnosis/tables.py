"""The tables of a question: measured one after the other, or each wherever the executor says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.diagnosis.measure import measure
from fldiag.diagnosis.question import Question, find_diagnostic
from fldiag.execution.executor import parse_executor
from fldiag.execution.pools import open_pool
from fldiag.registry import Diagnostic, Progress
from fldiag.results.provenance import digest

#: What shows progress: a title -> a context that gives the callback.
Bar = Callable[[str], AbstractContextManager[Progress]]


def tables(
    question: Question,
    *,
    bar: Bar,
    tell: Callable[[str], None],
    cache: Path | None = None,
) -> dict[Diagnostic, pd.DataFrame]:
    """The table of the diagnostic, and those of the diagnostics that flags add."""
    for note in question.notes:
        tell(note)
    parts: dict[Diagnostic, list[pd.DataFrame]] = {}
    units = [
        (entry.name, title, subject, dict(options))
        for title, subject, item_options in question.items
        for entry, options in [
            (question.entry, item_options),
            *question.flag_diagnostics.items(),
        ]
    ]
    if len(question.items) > 1 and parse_executor(question.executor).kind != "serial":
        # each subject elsewhere, rather than parts of one after the other
        with (
            bar(question.entry.name) as progress,
            open_pool(
                question.executor, _measure_unit, cache, name=_unit_title, most=len(units)
            ) as pool,
        ):
            progress(0, len(units), units[0][1])
            for done, ((name, title, *_), (table, remarks)) in enumerate(
                zip(units, pool.map(units), strict=True), start=1
            ):
                for text in remarks:
                    tell(text)
                progress(done, len(units), title)
                parts.setdefault(find_diagnostic(name), []).append(table)
        return {entry: joined(entry_tables) for entry, entry_tables in parts.items()}
    for name, title, subject, options in units:
        entry = find_diagnostic(name)
        with bar(f"{title} {entry.name}") as progress:
            parts.setdefault(entry, []).append(
                measure(
                    entry,
                    subject,
                    options,
                    cache=cache,
                    executor=question.executor,
                    progress=progress,
                    tell=tell,
                )
            )
    return {entry: joined(entry_tables) for entry, entry_tables in parts.items()}


Unit = tuple[str, str, Any, dict[str, Any]]


def _measure_unit(cache: Path | None, unit: Unit) -> tuple[pd.DataFrame, list[str]]:
    """A table, and the remarks on it."""
    name, _, subject, options = unit
    entry, remarks = find_diagnostic(name), list[str]()
    return measure(entry, subject, options, cache=cache, tell=remarks.append), remarks


def _unit_title(unit: Unit) -> str:
    return f"{unit[0]} of {unit[1]}"


def joined(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Tables one below the other; ``attrs`` are the first one's, with the key of all."""
    if len(parts) == 1:
        return parts[0]
    table = pd.concat([t.assign() for t in parts], ignore_index=True)
    table.attrs = dict(parts[0].attrs)
    if "key" in table.attrs:
        table.attrs["key"] = digest(*(t.attrs["key"] for t in parts))
    return table
