"""The sections of diagnostics: each one's pictures, its summary, and its tables to download."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from fldiag.diagnosis.answer import Answer
from fldiag.errors import FldiagError
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
from fldiag.results.select import last_round, only
from fldiag.results.summary import Item, Small, cell


@dataclass
class MemberRows:
    """The rows of a table that are a run's, and the table that they are of."""

    source: Source
    member: Member
    rows: pd.DataFrame


def section(entry: Diagnostic, collection: Collected) -> Section | None:
    """The diagnostic's section; None where no run has a table of it."""
    tables: dict[int, tuple[Source, list[Member]]] = {}
    for m in collection.members:
        for kind, source in m.tables.items():
            if kind.partition(":")[0] == entry.name:
                tables.setdefault(source.place, (source, []))[1].append(m)
    if not tables:
        return None
    section = Section(entry.name, title(entry.name), entry.headline, sources=sorted(tables))
    names = worlds(collection.members)
    has_models = len({m.model for m in collection.members}) > 1
    parts: dict[tuple[Any, ...], list[MemberRows]] = {}
    for source, members in tables.values():
        try:
            for key, part in _parts(entry, source, members):
                parts.setdefault(key, []).append(part)
        except Exception as error:
            section.notes.append(f"{source.name} is not shown: {reason(error)}.")
    for (variant, data, _, slice_, *_), alike in parts.items():
        words = [title(" on ".join(filter(None, (variant, slice_))))]
        words += [names[data]] if len(names) > 1 else []
        model = alike[0].member.setting("model", "name") or "without a name"
        words += [f"model {model}"] if has_models else []
        section.groups.append(_group(entry, ", ".join(filter(None, words)), alike))
    places = {m.place for _, members in tables.values() for m in members}
    lacking = [m for m in collection.members if m.place not in places]
    section.missing = [absent_diagnostic(m, entry) for m in lacking]
    for source, members in tables.values():
        last = last_round(source.frame) if entry.on in ("run", "clients") else None
        for m in members:
            if last is not None and last < m.run.done:
                section.notes.append(
                    f"{m.label}: {source.name} ends with round {last}, the run has {m.run.done}; "
                    f"{command(entry.name, m)} makes it anew."
                )
    options = {str(_options(entry, source)) for source, _ in tables.values()}
    if len(options) > len({source.kind for source, _ in tables.values()}):
        section.notes.append(
            "These tables were computed with different options: see where the numbers come from."
        )
    return section


def title(name: str) -> str:
    text = name.replace("_", " ").replace("-", " ")
    return text[:1].upper() + text[1:]


def _parts(
    entry: Diagnostic, source: Source, members: Sequence[Member]
) -> list[tuple[tuple[Any, ...], MemberRows]]:
    """The rows of a table that can be drawn together with those of others of the same key, with the runs' names in them."""
    rows = rows_of(source, members)
    owner: dict[str, Member] = {}
    names: dict[str, str] = {}
    of_weights = entry.on in ("problem", "checkpoints")
    for m in members:
        for c in source.claims:
            if c.label and c.sha256 in m.round_of:
                owner[c.label], names[c.label] = m, m.label
                if of_weights:
                    client = "" if c.client is None else f", client {c.client}"
                    names[c.label] += f", round {m.round_of[c.sha256]}{client}"
    labels = [str(label) for label in rows["run"].dropna().unique()]
    if not owner and len(labels) == 1 and len(members) == 1 and not of_weights:
        owner, names = {labels[0]: members[0]}, {labels[0]: members[0].label}
    if len(set(names.values())) < len(names):  # two names of one checkpoint
        names = {}
    variant = source.kind.partition(":")[2]
    if entry.on == "checkpoints" or not set(labels) <= set(owner):
        key = (variant, members[0].data, members[0].model, "", source.place)
        return [(key, MemberRows(source, members[0], _renamed(rows, names)))]
    claims = {c.label: (c.slice, c.n) for c in source.claims if of_weights}
    return [
        (
            (variant, m.data, m.model, *claims.get(label, ("", None))),
            MemberRows(source, m, _renamed(only(rows, run=label), names)),
        )
        for label, m in owner.items()
        if label in labels
    ]


def _renamed(rows: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    columns = [c for c in ("run", "run_b") if c in rows.columns]
    return rows.assign(**{c: [names.get(str(v), v) for v in rows[c]] for c in columns})


def _group(entry: Diagnostic, heading: str, parts: Sequence[MemberRows]) -> Group:
    """The summary of all rows, and their pictures: of several runs together where the drawing compares runs."""
    group = Group(heading)
    frames = []
    for part in parts:
        frames.append(part.rows.copy())
        frames[-1].attrs = {"diagnostic": entry.name, "options": _options(entry, part.source)}
    pooled = pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]
    pooled.attrs = frames[0].attrs
    is_pooled = len(frames) == 1 or entry.on == "problem"
    for part, frame in zip(parts, [pooled] if is_pooled else frames, strict=False):
        try:
            items = Answer(entry, frame, frame.attrs["options"]).summary()
            _summarise(group, items, "" if is_pooled else part.member.label, title(entry.name))
        except Exception as error:
            group.notes.append(f"{part.source.name} is not summed up: {reason(error)}.")
    draws = entry.drawings
    for ending in sorted(draws, key=lambda ending: (not ending.startswith("."), ending)):
        if not ending and group.charts:  # the same surface is there to turn
            continue
        together = is_pooled or several_runs(draws[ending])
        for part, frame in zip(parts, [pooled] if together else frames, strict=False):
            caption = " ".join([title(entry.name), *ending.split("-")]).strip()
            if not together or len(frames) == 1:
                caption += f", {part.member.label}"
            try:
                drawing = draws[ending](frame)
                if isinstance(drawing, Interactive):
                    group.charts += drawing.charts
                elif isinstance(drawing, Figure):  # texts are files of their own
                    group.pictures.append(picture(drawing, caption))
            except Exception as error:
                group.notes.append(f"{part.source.name} is not drawn: {reason(error)}.")
    return group


def _summarise(group: Group, items: Sequence[Item], run: str, caption: str) -> None:
    """Add a summary to the group; small tables of several runs with the same columns become one."""
    for item in items:
        if not isinstance(item, Small):
            prefix = f"{run}: " if run and not item.text.startswith(run) else ""
            group.notes.append(prefix + item.text)
            continue
        head = [*(["Run"] if run else []), *item.columns.values()]
        start = [run] if run else []
        rows = [[*start, *(cell(row.get(c)) for c in item.columns)] for row in item.rows]
        same = [table for table in group.tables if run and list(table.head) == head]
        if same:
            same[0].rows = [*same[0].rows, *rows]
        elif rows:
            group.tables.append(Table(group.title or caption, head, rows))


def _options(entry: Diagnostic, source: Source) -> dict[str, Any]:
    """The options that the table was made with, as its summary takes them: whole, with defaults."""
    fields = entry.options.model_fields
    options = {k: v for k, v in source.options.items() if k in fields}
    try:
        return entry.validate(options)
    except FldiagError:  # of another version
        return options
