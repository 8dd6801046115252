"""The sections of diagnostics: the one that a diagnostic declares, or one of its summaries and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import numpy as np
import pandas as pd

from fldiag import known
from fldiag.diagnosis.answer import Answer
from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.collected import Collected, Member, Source, absent, own
from fldiag.plotting.sections import Group, Picture, Section, Table
from fldiag.registry import Diagnostic
from fldiag.report.guard import guarded
from fldiag.results.summary import Small

#: Pixels of the page for an inch of a picture, which has about twice as many of its own: for dense screens.
PIXELS = 160


def sections(entry: Diagnostic, found: Collected) -> list[Section]:
    """The diagnostic's section; without a declared one, none where no run has a table of it."""
    try:
        if entry.section is not None:
            return [guarded(entry.section, found)]
    except Exception as error:  # somebody's section must not take the others with it
        return [
            Section(
                entry.name,
                _title(entry),
                entry.headline,
                notes=[f"This section could not be made: {_what(error)}."],
            )
        ]
    tables: dict[int, tuple[Source, list[Member]]] = {}
    for m in found.members:
        for kind, source in m.tables.items():
            if kind.partition(":")[0] == entry.name:
                tables.setdefault(source.place, (source, []))[1].append(m)
    if not tables:
        return []
    made = Section(entry.name, _title(entry), entry.headline, sources=sorted(tables))
    for source, members in tables.values():
        _show(made, entry, source, members)
    there = {m.place for _, members in tables.values() for m in members}
    made.missing = [
        absent(m, known.command(entry.name), clients=entry.needs == "clients")
        for m in found.members
        if m.place not in there
    ]
    return [made]


def _title(entry: Diagnostic) -> str:
    return entry.name.replace("_", " ").replace("-", " ").capitalize()


def _what(error: Exception) -> str:
    return (
        error.what if isinstance(error, FldiagError) else f"{type(error).__name__} {error}".strip()
    )


def _show(made: Section, entry: Diagnostic, source: Source, members: Sequence[Member]) -> None:
    """One table: its summary's small tables, what the summary says, and its pictures."""
    variant = source.kind.partition(":")[2]
    group = Group(title=", ".join(m.label for m in members) + (f", {variant}" if variant else ""))
    frame = (own(source, members) if entry.on == "problem" else source.frame).copy()
    options = _options(entry, source)
    frame.attrs = {"diagnostic": entry.name, "options": options}
    try:
        for item in Answer(entry, frame, options).summary():
            if not isinstance(item, Small):
                group.notes.append(item.text)
            elif item.rows:
                made.tables.append(
                    Table(
                        group.title,
                        list(item.columns.values()),
                        [[_text(row.get(column)) for column in item.columns] for row in item.rows],
                    )
                )
    except Exception as error:
        group.notes.append(f"{source.name} is not summed up: {_what(error)}.")
    for ending, draw in {"": entry.draw, **entry.more}.items():
        try:
            picture = draw(frame) if draw else None
            if isinstance(picture, matplotlib.figure.Figure):  # others are pages of their own
                caption = " ".join([f"{group.title}:", entry.name, *ending.split("-")]).strip()
                group.pictures.append(
                    Picture(
                        caption,
                        style.png(picture),
                        round(PIXELS * picture.get_figwidth()),
                        members[0].place if len(members) == 1 else None,
                    )
                )
        except Exception as error:
            group.notes.append(f"{source.name} is not drawn: {_what(error)}.")
    if group.notes or group.pictures:
        made.groups.append(group)


def _options(entry: Diagnostic, source: Source) -> dict[str, Any]:
    """The options that the table was made with, as its summary takes them: whole, with defaults, and the flags."""
    fields = entry.options.model_fields
    known = {k: v for k, v in source.options.items() if k in fields}
    flags = {k: v for k, v in source.options.items() if k in entry.also}
    try:
        return {**entry.validate(known), **flags}
    except FldiagError:  # of another version
        return {**known, **flags}


def _text(value: Any) -> str:
    if value is None or value is pd.NA or value != value:
        return "–"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    return style.number(float(value)) if isinstance(value, (float, np.floating)) else str(value)
