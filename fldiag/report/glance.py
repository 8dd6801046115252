"""The report's first section: what is wrong, what is better, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fldiag.plotting.collected import Collected, Member
from fldiag.plotting.sections import Section, Table, percent
from fldiag.plotting.style import number
from fldiag.report.summary import accuracy, method, recipe
from fldiag.results.uncertainty import LEVEL, SEEDS, Interval, holm, paired_t

#: Severities that need a look, in the doctor's words, and how many of them are named here.
GRAVE, NAMED = ("fault", "warning"), 3


def glance(found: Collected) -> Section:
    section = Section("glance", "At a glance", "What is wrong, what is better, and how sure that is. Each has a section below.")
    section.notes = [*found.chosen, *_findings(found)]
    unseen = [m.label for m in found.members if "doctor" not in m.tables]
    if unseen:
        section.notes.append(f"Not yet checked for faults: {', '.join(unseen)} (see \"Is the run sound?\").")
    section.tables = [t for t in (_methods(found.members),) if t]
    if not section.tables and len(found.members) > 1:
        section.notes.append("Which is better is not decided here: that takes runs of two methods on the same data with at least "
                             f"{SEEDS} seeds in common. `fldiag check A B` compares two given models over test examples.")
    section.sources = [s.place for _, s in found.having("doctor")]
    return section


def _findings(found: Collected) -> list[str]:
    said = []
    for m, source in found.having("doctor"):
        grave = source.frame[source.frame["severity"].isin(GRAVE)]
        whats = [str(what) for what in grave["what"]]
        more = f", and {len(whats) - NAMED} more" if len(whats) > NAMED else ""
        said.append(f"{m.label}: {'; '.join(whats[:NAMED])}{more}." if whats else f"{m.label}: no fault was found.")
    return said


def _methods(members: Sequence[Member]) -> Table | None:
    """The first method against each of the others, over the seeds that both have, on the last round's test accuracy."""
    groups: dict[tuple[str, str], list[Member]] = {}
    for m in members:
        groups.setdefault((m.data, recipe(m)), []).append(m)
    values = [(g, {m.seed: v.value for m in g if m.seed is not None and (v := accuracy(m)) is not None}) for g in groups.values()]
    values = [(g, v) for g, v in values if len(v) >= SEEDS]
    if not values:
        return None
    (first, base), *others = values
    pairs = [(g, v, sorted(base.keys() & v.keys())) for g, v in others if g[0].data == first[0].data]
    pairs = [(g, v, seeds) for g, v, seeds in pairs if len(seeds) >= SEEDS]
    if not pairs:
        return None
    tests = [paired_t(np.array([v[s] - base[s] for s in seeds])) for _, v, seeds in pairs]
    adjusted = holm([t.p for t in tests])
    rows = [[method(g[0]), percent(np.mean([v[s] for s in seeds])), ", ".join(map(str, seeds)), _difference(t), _verdict(t, p)]
            for (g, v, seeds), t, p in zip(pairs, tests, adjusted, strict=True)]
    name = method(first[0])
    own = f"{percent(np.mean(list(base.values())))} over seeds {', '.join(map(str, sorted(base)))}"
    return Table(f"Test accuracy against that of {name} ({own}), over common seeds",
                 ("Method", "Test accuracy", "Seeds", f"Difference, {LEVEL:.0%} interval", f"Against {name}"), rows)


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
