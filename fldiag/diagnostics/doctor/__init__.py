"""A lint for federated runs, one's own and other programs'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from inspect import getdoc
from typing import Annotated, Any

import pandas as pd
from pydantic import Field, SkipValidation

from fldiag.choices import Device, Download, Root
from fldiag.diagnostics.doctor.checks import described
from fldiag.diagnostics.doctor.findings import (
    FAULT,
    HEALTHY,
    INFORMATION,
    SEVERITIES,
    UNCHECKED,
    WARNING,
)
from fldiag.registry import diagnostic
from fldiag.results.summary import Item, Note, Say, Small
from fldiag.runs.run import Run

#: Severities of what was found, from the worst on.
FINDINGS = (FAULT, WARNING, INFORMATION)


def summary(table: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """Of every run, a line of counts; the findings; what was not checked, and why."""
    for run, part in table.groupby("run", sort=False):
        count = part["severity"].value_counts()
        checks = part["metric"].nunique()
        counts = {
            "run": run,
            "checks": checks,
            "checked": checks - int(count.get(UNCHECKED, 0)),
            "findings": int(sum(count.get(s, 0) for s in FINDINGS)),
            **{s: int(count.get(s, 0)) for s in SEVERITIES},
        }
        faults, warnings = (
            f"{count.get(s, 0)} {s}{'' if count.get(s, 0) == 1 else 's'}" for s in (FAULT, WARNING)
        )
        yield Say(
            f"{run}: {faults}, {warnings}, {count.get(INFORMATION, 0)} for "
            f"information; {count.get(HEALTHY, 0)} of {checks} checks found nothing, {count.get(UNCHECKED, 0)} could not "
            "be run",
            {"counts": counts},
        )
    findings = table[table["severity"].isin(FINDINGS)].sort_values(
        "severity", key=lambda s: s.map(SEVERITIES.index), kind="stable"
    )
    findings = findings.assign(where=[describe_place(row) for _, row in findings.iterrows()])
    columns = ["severity", "what", "where", "evidence", "remedy"]
    if table["run"].nunique() > 1:
        columns.insert(0, "run")
    yield Small(findings[columns].to_dict("records"), {name: name for name in columns})
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


def fails(table: pd.DataFrame) -> bool:
    """Whether there is a fault or a warning."""
    return bool(table["severity"].isin([FAULT, WARNING]).any())


def alarms(table: pd.DataFrame) -> list[str]:
    """Faults, then warnings."""
    return [
        str(text)
        for kind in (FAULT, WARNING)
        for text in table.loc[table["severity"] == kind, "what"]
    ]


@diagnostic(
    "doctor",
    on="runs",
    draw="fldiag.diagnostics.doctor.picture:draw",
    summary=summary,
    fails=fails,
    alarms=alarms,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d --strict",
)
def doctor(
    runs: Sequence[Run],
    *,
    samples: Annotated[
        int,
        Field(
            ge=1,
            description="Maximum number of test examples, and of all clients' examples, on "
            "which models are evaluated.",
        ),
    ] = 1000,
    model: Annotated[
        str | None,
        SkipValidation(),
        Field(
            description="Model of a plain state_dict: NAME or pkg.mod:factory.",
            json_schema_extra={"source": True},
        ),
    ] = None,
    data: Annotated[
        str | None,
        SkipValidation(),
        Field(
            description="Data: NAME, npz:PATH, csv:PATH or pkg.mod:loader.",
            json_schema_extra={"source": True},
        ),
    ] = None,
    root: Root = None,
    download: Download = False,
    device: Device = "auto",
) -> pd.DataFrame:
    """Check a run for faults: runs of fldiag, recorded loops, Flower runs and converted folders.

    A row a finding: ``metric`` is the check, ``severity`` fault, warning or information, then ``what``, where (``rounds``,
    ``client``, ``layer``), ``evidence``, ``consequence``, ``remedy``. A check that found nothing has one row: healthy, with what
    it looked at, or not checked, because something was missing. With --strict the command ends with exit code 3 where there is
    a fault or a warning; information never counts.

    The statistical checks (those with a ``p_value``) share one error rate: Holm's procedure over all their tests, clients and
    tails of a run keeps the chance of any false alarm at 1 %. The others compare bits, or numbers with a fixed limit.

    """
    targets = [run if model is None and data is None else _with(run, model, data) for run in runs]
    from fldiag.diagnostics.doctor.examine import examine

    return examine(
        targets,
        {"samples": samples, "root": root, "download": download, "device": device},
    )


def _with(run: Run, model: Any, data: Any) -> Run:
    target = copy(run)
    target.model, target.data = (
        model if model is not None else run.model,
        data if data is not None else run.data,
    )
    return target


doctor.__doc__ = f"{getdoc(doctor)}\n\n{described()}"
