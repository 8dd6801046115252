"""The report's first section: what is wrong, what is better, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from fldiag import known, registry
from fldiag.plotting.pages import Group, Section, Table
from fldiag.plotting.style import number
from fldiag.registry import Diagnostic
from fldiag.report.members import Collected, Member, absent
from fldiag.report.summary import accuracy, method, recipe, replicates
from fldiag.results.select import only, split_of
from fldiag.results.summary import percent
from fldiag.results.uncertainty import LEVEL, SEEDS, Interval, holm, paired_t

#: How much of what is wrong is named here.
NAMED = 3


def glance(collection: Collected) -> Section:
    section = Section(
        "glance",
        "At a glance",
        "What is wrong, what is better, and how sure that is. Each has a section below.",
    )
    section.notes = list(collection.choices)
    untested = [
        m.label
        for m in collection.members
        if "metrics" in m.tables and _untested(m.tables["metrics"].frame)
    ]
    if untested:
        section.notes.append(
            f"{', '.join(untested)}: there are no test examples. Accuracy and loss of the global model are "
            "those of the training examples (fldiag.Recorder takes test examples as test=)."
        )
    for entry in registry.diagnostics():
        if entry.alarms is not None:
            _findings(section, collection, entry, entry.alarms)
    if table := _methods(collection.members):
        section.groups.append(Group(tables=[table]))
    elif len(collection.members) > 1:
        section.notes.append(
            "These runs cannot show which method is better: that needs runs of two methods on the same data "
            f"with at least {SEEDS} common seeds. To compare two given models over test examples: fldiag check A B."
        )
    return section


def _untested(metrics: pd.DataFrame) -> bool:
    """Whether a run's global model was judged by training examples."""
    return (
        split_of(metrics) == "train"
        and len(only(metrics, moment="aggregated", scope="global", slice="train")) > 0
    )


def _findings(
    section: Section,
    collection: Collected,
    entry: Diagnostic,
    alarms: Callable[[pd.DataFrame], Sequence[str]],
) -> None:
    """What the tables of a diagnostic say is wrong, and which runs it has not looked at."""
    for m, source in collection.having(entry.name):
        whats = alarms(source.frame)
        tail = f", and {len(whats) - NAMED} more" if len(whats) > NAMED else ""
        section.notes.append(
            f"{m.label}: {'; '.join(whats[:NAMED])}{tail}."
            if whats
            else f"{m.label}: no fault was found."
        )
        section.sources.append(source.place)
    unseen = [m for m in collection.members if entry.name not in m.tables]
    if unseen:
        section.notes.append(f"Not yet checked for faults: {', '.join(m.label for m in unseen)}.")
        section.missing += [
            absent(m, known.command(entry.name), clients=entry.needs == "clients") for m in unseen
        ]


def _methods(members: Sequence[Member]) -> Table | None:
    """The first method against each of the others, over the seeds that both have, on the last round's test accuracy."""
    groups: dict[str, list[Member]] = {}
    for group in replicates(members):  # not those that were trained again with the same seeds
        groups.setdefault(recipe(group[0]), group)
    values = [
        (g, {m.seed: v.value for m in g if m.seed is not None and (v := accuracy(m)) is not None})
        for g in groups.values()
    ]
    values = [(g, v) for g, v in values if len(v) >= SEEDS]
    if not values:
        return None
    (first, base), *rest = values
    pairs = [(g, v, sorted(base.keys() & v.keys())) for g, v in rest if g[0].data == first[0].data]
    pairs = [(g, v, seeds) for g, v, seeds in pairs if len(seeds) >= SEEDS]
    if not pairs:
        return None
    tests = [paired_t(np.array([v[s] - base[s] for s in seeds])) for _, v, seeds in pairs]
    adjusted = holm([t.p for t in tests])
    rows = [
        [
            method(g[0]),
            percent(np.mean([v[s] for s in seeds])),
            ", ".join(map(str, seeds)),
            _difference(t),
            _verdict(t, p),
        ]
        for (g, v, seeds), t, p in zip(pairs, tests, adjusted, strict=True)
    ]
    name = method(first[0])
    baseline = (
        f"{percent(np.mean(list(base.values())))} over seeds {', '.join(map(str, sorted(base)))}"
    )
    return Table(
        f"Test accuracy against that of {name} ({baseline}), over common seeds",
        (
            "Method",
            "Test accuracy",
            "Seeds",
            f"Difference, {LEVEL:.0%} interval",
            f"Against {name}",
        ),
        rows,
    )


def _difference(t: Interval) -> str:
    if t.low is None or t.high is None:
        return f"{100 * t.value:+.2g} points, no interval"
    return f"{100 * t.value:+.2g} points ({100 * t.low:+.2g} to {100 * t.high:+.2g})"


def _verdict(t: Interval, p: float | None) -> str:
    """By Holm's p over all methods of the table."""
    if p is None:
        return "undecided"
    word = "better" if t.value > 0 else "worse"
    return f"{word if p <= 1 - LEVEL else 'undecided'} (p = {number(p, 2)})"
