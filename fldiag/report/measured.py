"""The sections of diagnostics: each one's pictures, its summary, and its tables to download."""

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
from fldiag.plotting.pages import Group, Interactive, Section, Table, picture
from fldiag.plotting.tables import several_runs
from fldiag.registry import Diagnostic
from fldiag.report.members import (
    Collected,
    Member,
    Source,
    absent_diagnostic,
    command,
    reason,
    rows_of,
    worlds,
)
from fldiag.results.select import last_round
from fldiag.results.summary import Small


def sections(entry: Diagnostic, collection: Collected) -> list[Section]:
    """The diagnostic's section; none where no run has a table of it."""
    tables: dict[int, tuple[Source, list[Member]]] = {}
    for m in collection.members:
        for kind, source in m.tables.items():
            if kind.partition(":")[0] == entry.name:
                tables.setdefault(source.place, (source, []))[1].append(m)
    if not tables:
        return []
    section = Section(entry.name, title(entry.name), entry.headline, sources=sorted(tables))
    names = worlds(collection.members)
    parts: dict[tuple[Any, ...], list[tuple[Source, Member, pd.DataFrame]]] = {}
    for source, members in tables.values():
        try:
            for key, m, rows in _parts(entry, source, members):
                parts.setdefault(key, []).append((source, m, rows))
        except Exception as error:
            section.notes.append(f"{source.name} is not shown: {reason(error)}.")
    for (variant, data, _, slice_, *_), of_kind in parts.items():
        label = f"{variant} on {slice_}" if variant and slice_ else variant or slice_
        words = [title(label)] if label else []
        words += [names[data]] if len(names) > 1 else []
        words += [f"model {of_kind[0][1].setting('model', 'name') or 'without a name'}"] * (
            len({m.model for m in collection.members}) > 1
        )
        section.groups.append(_group(entry, ", ".join(words), of_kind))
    with_table = {m.place for _, members in tables.values() for m in members}
    section.missing = [
        absent_diagnostic(m, entry) for m in collection.members if m.place not in with_table
    ]
    for source, members in tables.values():
        for m in members if entry.on == "run" else ():
            last = last_round(source.frame)
            if last is not None and last < m.run.done:
                section.notes.append(
                    f"{m.label}: {source.name} ends with round {last}, the run has {m.run.done}; "
                    f"{command(known.command(entry.name), m)} makes it anew."
                )
    if len({str(_options(entry, source)) for source, _ in tables.values()}) > len(
        {source.kind for source, _ in tables.values()}
    ):
        section.notes.append(
            "These tables were computed with different options: see where the numbers come from."
        )
    return [section]


def title(name: str) -> str:
    text = name.replace("_", " ").replace("-", " ")
    return text[:1].upper() + text[1:]


def _parts(
    entry: Diagnostic, source: Source, members: Sequence[Member]
) -> list[tuple[tuple[Any, ...], Member, pd.DataFrame]]:
    """The rows of a table that can be drawn together with those of others of the same key, with the runs' names in them."""
    rows = rows_of(source, members)
    owner: dict[str, Member] = {}
    names: dict[str, str] = {}
    of_weights = entry.on in ("problem", "checkpoints")
    for m in members:
        for c in source.claims:
            if c.label and c.sha256 in m.round_of:
                client = "" if c.client is None else f", client {c.client}"
                owner[c.label] = m
                names[c.label] = m.label + (
                    f", round {m.round_of[c.sha256]}{client}" if of_weights else ""
                )
    labels = [str(label) for label in rows["run"].dropna().unique()]
    if not owner and len(labels) == 1 and len(members) == 1 and not of_weights:
        owner, names = {labels[0]: members[0]}, {labels[0]: members[0].label}
    if len(set(names.values())) < len(names):  # two names of one checkpoint
        names = {}
    variant = source.kind.partition(":")[2]
    if entry.on == "checkpoints" or not set(labels) <= set(owner):
        key = (variant, members[0].data, members[0].model, "", source.place)
        return [(key, members[0], _renamed(rows, names))]
    slices = {c.label: c.slice for c in source.claims} if of_weights else {}
    numbers = {c.label: c.n for c in source.claims} if of_weights else {}
    return [
        (
            (variant, m.data, m.model, slices.get(label, ""), numbers.get(label)),
            m,
            _renamed(rows[(rows["run"] == label).fillna(False).astype(bool)], names),
        )
        for label, m in owner.items()
        if label in labels
    ]


def _renamed(rows: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    columns = [c for c in ("run", "run_b") if c in rows.columns]
    return rows.assign(**{c: [names.get(str(v), v) for v in rows[c]] for c in columns})


def _group(
    entry: Diagnostic, heading: str, parts: Sequence[tuple[Source, Member, pd.DataFrame]]
) -> Group:
    """The summary of all rows, and their pictures: of several runs together where the drawing compares runs."""
    group = Group(heading)
    frames = [_frame(entry, source, rows) for source, _, rows in parts]
    pooled = pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]
    pooled.attrs = frames[0].attrs
    for i, frame in enumerate([pooled] if entry.on == "problem" else frames):
        prefix = f"{parts[i][1].label}: " if len(frames) > 1 and entry.on != "problem" else ""
        try:
            for item in Answer(entry, frame, frame.attrs["options"]).summary():
                if not isinstance(item, Small):
                    is_labelled = item.text.startswith(parts[i][1].label)
                    group.notes.append(item.text if is_labelled else prefix + item.text)
                elif item.rows:
                    _append(
                        group,
                        item,
                        parts[i][1].label if prefix else "",
                        heading or title(entry.name),
                    )
        except Exception as error:
            group.notes.append(f"{prefix}{parts[i][0].name} is not summed up: {reason(error)}.")
    draws = entry.drawings
    for ending in sorted(draws, key=lambda ending: (not ending.startswith("."), ending)):
        draw = draws[ending]
        if not ending and group.charts:  # the same surface is there to turn
            continue
        together = len(frames) == 1 or entry.on == "problem" or several_runs(draw)
        for i, frame in enumerate([pooled] if together else frames):
            caption = " ".join([title(entry.name), *ending.split("-")]).strip()
            caption += "" if together and len(frames) > 1 else f", {parts[i][1].label}"
            try:
                _add(group, draw(frame), caption)
            except Exception as error:
                group.notes.append(f"{parts[i][0].name} is not drawn: {reason(error)}.")
    return group


def _add(group: Group, drawing: Any, caption: str) -> None:
    """Add what a drawing function returns; texts are files of their own."""
    if isinstance(drawing, Interactive):
        group.charts += drawing.charts
    elif isinstance(drawing, matplotlib.figure.Figure):
        group.pictures.append(picture(drawing, caption))


def _frame(entry: Diagnostic, source: Source, rows: pd.DataFrame) -> pd.DataFrame:
    frame = rows.copy()
    frame.attrs = {"diagnostic": entry.name, "options": _options(entry, source)}
    return frame


def _options(entry: Diagnostic, source: Source) -> dict[str, Any]:
    """The options that the table was made with, as its summary takes them: whole, with defaults, and the flags."""
    fields = entry.options.model_fields
    options = {k: v for k, v in source.options.items() if k in fields}
    flags = {k: v for k, v in source.options.items() if k in entry.flags}
    try:
        return {**entry.validate(options), **flags}
    except FldiagError:  # of another version
        return {**options, **flags}


def _append(group: Group, small: Small, run: str, caption: str) -> None:
    """Add a small table of the summary; those of several runs with the same columns become one."""
    head = (["Run"] if run else []) + list(small.columns.values())
    rows = [
        ([run] if run else []) + [_text(row.get(column)) for column in small.columns]
        for row in small.rows
    ]
    for table in group.tables if run else ():
        if list(table.head) == head:
            table.rows = [*table.rows, *rows]
            return
    group.tables.append(Table(caption, head, rows))


def _text(value: Any) -> str:
    if value is None or value is pd.NA or value != value:
        return "–"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    return style.number(float(value)) if isinstance(value, (float, np.floating)) else str(value)
