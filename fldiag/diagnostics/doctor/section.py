"""What the doctor says in a report: the findings of every run, and what was not checked."""

from __future__ import annotations

from fldiag.diagnostics.doctor.findings import FAULT, INFORMATION, SEVERITIES, UNCHECKED, WARNING
from fldiag.diagnostics.doctor.summary import where
from fldiag.plotting.collected import Collected, absent
from fldiag.plotting.sections import Section, Table


def section(found: Collected) -> Section:
    made = Section(
        "doctor",
        "Is the run sound?",
        "Checks of how the run was aggregated, sampled, evaluated and seeded. Faults "
        "and "
        "warnings need a look before any number below is believed; information is no fault.",
    )
    rows, bare = [], []
    for m, source in found.having("doctor"):
        frame = source.frame.sort_values(
            "severity", key=lambda s: s.map(SEVERITIES.index), kind="stable"
        )
        there = frame[frame["severity"].isin([FAULT, WARNING, INFORMATION])]
        rows += [
            [
                m.label,
                str(row["severity"]),
                str(row["what"]),
                where(row),
                str(row["evidence"]),
                str(row["remedy"]),
            ]
            for _, row in there.iterrows()
        ]
        if there.empty:
            made.notes.append(f"{m.label}: nothing was found.")
        bare += [
            [m.label, str(row["title"]), str(row["evidence"])]
            for _, row in frame[frame["severity"] == UNCHECKED].iterrows()
        ]
    if rows:
        made.tables.append(
            Table("Findings", ("Run", "Severity", "What", "Where", "Evidence", "Remedy"), rows)
        )
    if bare:
        made.tables.append(Table("Not checked", ("Run", "Check", "Why"), bare))
    made.missing = [absent(m, "doctor") for m in found.members if "doctor" not in m.tables]
    made.sources = [s.place for _, s in found.having("doctor")]
    return made
