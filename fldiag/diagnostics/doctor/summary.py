"""What a person reads first: the findings, worst first, then what could not be checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.diagnostics.doctor.findings import (
    FAULT,
    HEALTHY,
    INFORMATION,
    SEVERITIES,
    UNCHECKED,
    WARNING,
)
from fldiag.results.summary import Item, Note, Say, Small


def summary(table: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """Of every run, a line of counts; the findings; what was not checked, and why."""
    several = table["run"].nunique() > 1
    rows = []
    for run, part in table.groupby("run", sort=False):
        count = part["severity"].value_counts()
        checks = part["metric"].nunique()
        counts = {"run": run, "checks": checks, **{s: int(count.get(s, 0)) for s in SEVERITIES}}
        faults, warnings = (
            f"{count.get(s, 0)} {s}{'' if count.get(s, 0) == 1 else 's'}" for s in (FAULT, WARNING)
        )
        yield Say(
            f"{run}: {faults}, {warnings}, {count.get(INFORMATION, 0)} for "
            f"information; {count.get(HEALTHY, 0)} of {checks} checks found nothing, {count.get(UNCHECKED, 0)} could not "
            "be run",
            {"counts": counts},
        )
    findings = table[table["severity"].isin([FAULT, WARNING, INFORMATION])]
    for _, row in findings.sort_values(
        "severity", key=lambda s: s.map(SEVERITIES.index), kind="stable"
    ).iterrows():
        rows.append(
            {
                **({"run": row["run"]} if several else {}),
                "severity": row["severity"],
                "what": row["what"],
                "where": describe_place(row),
                "evidence": row["evidence"],
                "remedy": row["remedy"],
            }
        )
    columns = {
        "run": "run",
        "severity": "severity",
        "what": "what",
        "where": "where",
        "evidence": "evidence",
        "remedy": "remedy",
    }
    yield Small(rows, {k: v for k, v in columns.items() if several or k != "run"})
    skipped = table[table["severity"] == UNCHECKED]
    for why, part in skipped.groupby("evidence", sort=False):
        titles, runs = part["title"].unique().tolist(), part["run"].unique().tolist()
        names = f" ({', '.join(runs)})" if len(runs) < table["run"].nunique() else ""
        remedy = next(iter(part["remedy"].dropna()), None)
        yield Note(
            f"not checked, {why}{names}: {', '.join(titles)}" + (f"; {remedy}" if remedy else ""),
            {
                "unchecked": {
                    "runs": runs,
                    "checks": part["metric"].unique().tolist(),
                    "why": str(why).removeprefix("because "),
                    "remedy": remedy,
                }
            },
        )


def describe_place(row: Mapping[str, Any]) -> str:
    """Rounds, clients and layer of a finding, in words."""
    texts = []
    if isinstance(row["rounds"], str):
        texts.append(f"round{'s' * (not row['rounds'].isdigit())} {row['rounds']}")
    if not pd.isna(row["client"]):
        texts.append(str(row["who"]))
    if not pd.isna(row["layer"]):
        texts.append(str(row["layer"]))
    return ", ".join(texts) or "the run"
