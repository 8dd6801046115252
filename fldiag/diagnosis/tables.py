"""The tables of a question: measured one after the other, or each wherever the executor says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag import registry
from fldiag.diagnosis.measure import measure
from fldiag.diagnosis.question import Question
from fldiag.execution.executor import parse_executor
from fldiag.execution.pools import open_pool
from fldiag.registry import Diagnostic, Progress

#: What shows progress: a title -> a context that gives the callback.
Bar = Callable[[str], AbstractContextManager[Progress]]


def tables(
    asked: Question,
    *,
    bar: Bar,
    tell: Callable[[str], None],
    cache: Path | None = None,
) -> dict[Diagnostic, pd.DataFrame]:
    """The table of the diagnostic, and those of the further ones that flags ask for."""
    for note in asked.notes:
        tell(note)
    found: dict[Diagnostic, list[pd.DataFrame]] = {}
    units = [
        (entry.name, title, subject, dict(given))
        for title, subject, options in asked.asked
        for entry, given in [(asked.entry, options), *asked.more.items()]
    ]
    several = len(asked.asked) > 1 and parse_executor(asked.executor).kind != "serial"
    if several:  # each subject elsewhere, rather than parts of one after the other
        with (
            bar(asked.entry.name) as progress,
            open_pool(asked.executor, _measured, cache, name=_title, most=len(units)) as pool,
        ):
            progress(0, len(units), units[0][1])
            for done, ((name, title, *_), (table, said)) in enumerate(
                zip(units, pool.map(units), strict=True), start=1
            ):
                for text in said:
                    tell(text)
                progress(done, len(units), title)
                found.setdefault(registry.diagnostic.get(name), []).append(table)
        return {entry: joined(made) for entry, made in found.items()}
    for name, title, subject, given in units:
        entry = registry.diagnostic.get(name)
        with bar(f"{title} {entry.name}") as progress:
            found.setdefault(entry, []).append(
                measure(entry, subject, given, cache=cache, progress=progress, tell=tell)
            )
    return {entry: joined(made) for entry, made in found.items()}


Unit = tuple[str, str, Any, dict[str, Any]]


def _measured(cache: Path | None, unit: Unit) -> tuple[pd.DataFrame, list[str]]:
    """A table, and what was said of it."""
    name, _, subject, options = unit
    said: list[str] = []
    return measure(
        registry.diagnostic.get(name), subject, options, cache=cache, tell=said.append
    ), said


def _title(unit: Unit) -> str:
    return f"{unit[0]} of {unit[1]}"


def joined(made: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Tables one below the other; ``attrs`` are the first one's."""
    table = pd.concat([t.assign() for t in made], ignore_index=True) if len(made) > 1 else made[0]
    table.attrs = dict(made[0].attrs)
    return table
