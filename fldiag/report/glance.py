"""The report's first section: what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from fldiag import registry
from fldiag.plotting.pages import Section
from fldiag.registry import Diagnostic
from fldiag.report.members import Collected, absent_diagnostic
from fldiag.results.select import only, split_of

#: How much of what is wrong is named here.
NAMED = 3


def glance(collection: Collected) -> Section:
    section = Section(
        "glance",
        "At a glance",
        "What is wrong. Each has a section below.",
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
