"""The report's first section: what is wrong, what is better, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from fldiag import registry
from fldiag.plotting.pages import Group, Section, Table, tables_of
from fldiag.plotting.style import number
from fldiag.registry import Diagnostic
from fldiag.report.members import Collected, Member, absent_diagnostic
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
    if tables := _methods(collection.members):
        section.groups.append(Group(tables=tables))
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
        section.missing += [absent_diagnostic(m, entry) for m in unseen]


def _methods(members: Sequence[Member]) -> list[Table]:
    """The first method against each of the others, over the seeds that both have, on the last round's test accuracy."""
    groups: dict[str, list[Member]] = {}
    for group in replicates(members):  # not those that were trained again with the same seeds
        groups.setdefault(recipe(group[0]), group)
    accuracies = []
    for group in groups.values():
        values = {m.seed: accuracy(m) for m in group if m.seed is not None}
        numbers = {seed: value.value for seed, value in values.items() if value is not None}
        if len(numbers) >= SEEDS:
            accuracies.append((group[0], numbers))
    if not accuracies:
        return []
    (first, base), *later_methods = accuracies
    pairs = [
        (m, v, sorted(base.keys() & v.keys())) for m, v in later_methods if m.data == first.data
    ]
    pairs = [(m, v, seeds) for m, v, seeds in pairs if len(seeds) >= SEEDS]
    tests = [paired_t(np.array([v[s] - base[s] for s in seeds])) for _, v, seeds in pairs]
    name, adjusted = method(first), holm([t.p for t in tests]) if tests else []
    rows = [
        {
            "Method": method(m),
            "Test accuracy": percent(np.mean([values[s] for s in seeds])),
            "Seeds": ", ".join(map(str, seeds)),
            f"Difference, {LEVEL:.0%} interval": _difference(test),
            f"Against {name}": _verdict(test, p),
        }
        for (m, values, seeds), test, p in zip(pairs, tests, adjusted, strict=True)
    ]
    mean, listing = percent(np.mean(list(base.values()))), ", ".join(map(str, sorted(base)))
    baseline = f"{name} ({mean} over seeds {listing})"
    return tables_of(f"Test accuracy against that of {baseline}, over common seeds", rows)


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
