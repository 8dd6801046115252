"""What is written when a diagnostic is asked: table, provenance, pictures; and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from fldiag.diagnosis import subjects
from fldiag.diagnosis.measure import measure, origin, plain
from fldiag.diagnosis.question import Question, diagnostic, question
from fldiag.diagnosis.subjects import Target
from fldiag.execution.choice import chosen
from fldiag.execution.start import started
from fldiag.plotting import style
from fldiag.registry import Diagnostic, Progress
from fldiag.results import files
from fldiag.results.summary import Item, Small

#: What shows progress: a title -> a context that gives the callback.
Bar = Callable[[str], AbstractContextManager[Progress]]


@dataclass
class Answer:
    """A diagnostic's table and the files it was written to; the picture, if there is one, is the last."""

    entry: Diagnostic
    table: pd.DataFrame
    options: dict[str, Any]
    files: list[Path] = field(default_factory=list)

    def summary(self) -> list[Item]:
        """What a person reads first."""
        if self.entry.summary is None:
            return [plainly(self.table)]
        return list(self.entry.summary(self.table, self.options))


def plainly(table: pd.DataFrame, most: int = 40) -> Small:
    """The first rows of a table, without the columns in which nothing stands."""
    shown = table.head(most).dropna(axis=1, how="all")
    return Small(shown.astype(object).where(shown.notna(), None).to_dict("records"), {c: c for c in shown.columns})


def tables(asked: Question, *, bar: Bar, tell: Callable[[str], None], cache: Path | None = None,
           ) -> dict[Diagnostic, pd.DataFrame]:
    """The table of the diagnostic, and those of the further ones that flags ask for."""
    for note in asked.notes:
        tell(note)
    found: dict[Diagnostic, list[pd.DataFrame]] = {}
    units = [(entry.name, title, subject, dict(given)) for title, subject, options in asked.asked
             for entry, given in [(asked.entry, options), *asked.more.items()]]
    several = len(asked.asked) > 1 and chosen(asked.executor).kind != "serial"
    if several:  # each subject elsewhere, rather than parts of one after the other
        with bar(asked.entry.name) as progress, started(asked.executor, _measured, cache, name=_title, most=len(units)) as pool:
            for done, ((name, title, *_), (table, said)) in enumerate(zip(units, pool.map(units), strict=True), start=1):
                for text in said:
                    tell(text)
                progress(done, len(units), title)
                found.setdefault(diagnostic(name), []).append(table)
        return {entry: joined(made) for entry, made in found.items()}
    for name, title, subject, given in units:
        entry = diagnostic(name)
        with bar(f"{title} {entry.name}") as progress:
            found.setdefault(entry, []).append(measure(entry, subject, given, cache=cache, progress=progress, tell=tell))
    return {entry: joined(made) for entry, made in found.items()}


Unit = tuple[str, str, Any, dict[str, Any]]


def _measured(cache: Path | None, unit: Unit) -> tuple[pd.DataFrame, list[str]]:
    """A table, and what was said of it."""
    name, _, subject, options = unit
    said: list[str] = []
    return measure(diagnostic(name), subject, options, cache=cache, tell=said.append), said


def _title(unit: Unit) -> str:
    return f"{unit[0]} of {unit[1]}"


def joined(made: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Tables one below the other; ``attrs`` are the first one's."""
    table = pd.concat([t.assign() for t in made], ignore_index=True) if len(made) > 1 else made[0]
    table.attrs = dict(made[0].attrs)
    return table


def answer(name: str, targets: Sequence[Target], options: Mapping[str, Any], *, out: Path | None = None, stem: str = "",
           bar: Bar, tell: Callable[[str], None]) -> list[Answer]:
    """Ask, measure, write and draw: the diagnostic's own answer first, then those of its flags.

    Args:
        name: the diagnostic's.
        targets: what it is asked of.
        options: as for ``question``.
        out: the folder to write to; by default that of the run (``fldiag.diagnosis.subjects.folder``).
        stem: how the files' names begin; by default with what tells the question from others.
        bar: shows progress.
        tell: is told remarks: what was damaged, what takes long, what counts.

    Raises:
        FldiagError: the question is wrong, something cannot be computed, or the folder cannot be written.
    """
    folder = out or subjects.folder([t for t in targets if not isinstance(t, subjects.OPEN)])
    asked = question(name, targets, options)
    asked.stem = stem or asked.stem
    folder = subjects.prepare(folder)
    flags = {flag: True for flag, also in asked.entry.also.items() if also.name in {e.name for e in asked.more}}
    answers = []
    for entry, table in tables(asked, bar=bar, tell=tell, cache=folder / "cache").items():
        own = {**asked.asked[0][2], **flags} if entry is asked.entry else asked.more[entry]
        stem = asked.stem if entry is asked.entry else entry.name + asked.stem.removeprefix(asked.entry.name)
        about = {**origin(asked.asked[0][1], own), "diagnostic": entry.name,
                 **{k: v for k, v in asked.about.items() if k != "where"},
                 "options": {**asked.about.get("where", {}), **plain(own)}}
        path = folder / stem
        answers.append(Answer(entry, table, own, [*files.write_table(table, path, about), *pictures(entry, table, path)]))
    return answers


def pictures(entry: Diagnostic, table: pd.DataFrame, path: Path) -> list[Path]:
    """All pictures of a table, the main one's png last: that is what people look at first."""
    found: list[Path] = []
    for ending, draw in entry.more.items():
        made = draw(table)
        if isinstance(made, str):
            found.append(files.write_text(path.with_name(path.name + ending), made))
        elif made is not None:
            found += style.save(made, path.with_name(path.name + ending), ("pdf", "png"))
    drawn = entry.draw(table) if entry.draw is not None else None
    return found + (style.save(drawn, path, ("pdf", "png")) if isinstance(drawn, Figure) else [])
