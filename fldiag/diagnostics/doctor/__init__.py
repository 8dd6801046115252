"""A lint for federated runs, one's own and other programs'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import pandas as pd
from pydantic import Field, SkipValidation

from fldiag.diagnostics.doctor.facts import (
    SEVERITIES,
    Finding,
    about_run,
    evaluate,
    joined,
    read_facts,
)
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.registry import diagnostic
from fldiag.results.table import Note, Options, Row, Sentence, SmallTable, Summary, table
from fldiag.runs.run import Run
from fldiag.sections import Device, Download, Root


def summary(rows: pd.DataFrame, options: Options) -> Summary:
    """A line of counts for every run, the findings, and what was not checked."""
    for run, part in rows.groupby("run", sort=False):
        count = {s: int((part["severity"] == s).sum()) for s in SEVERITIES}
        text = ", ".join(f"{n} {s}" for s, n in count.items())
        yield Sentence(f"{run}: {text}", {"counts": {"run": run, **count}})
    columns = ["severity", "what", "rounds", "evidence", "remedy"]
    if rows["run"].nunique() > 1:
        columns.insert(0, "run")
    found = rows[rows["severity"].isin(SEVERITIES[:2])].sort_values("severity", kind="stable")
    yield SmallTable.of(found[columns])
    unchecked = rows[rows["severity"] == "not checked"]
    for why, part in unchecked.groupby("evidence", sort=False):
        checks, runs = part["metric"].unique().tolist(), part["run"].unique().tolist()
        about = {"runs": runs, "checks": checks, "why": why}
        yield Note(f"not checked, because {why}: {', '.join(checks)}", {"unchecked": about})


def fails(rows: pd.DataFrame) -> bool:
    """Whether there is a fault."""
    return bool((rows["severity"] == "fault").any())


def alarms(rows: pd.DataFrame) -> list[str]:
    """Faults, then hints."""
    return [str(w) for s in SEVERITIES[:2] for w in rows.loc[rows["severity"] == s, "what"]]


@diagnostic(
    "doctor",
    on="runs",
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
        ),
    ] = None,
    data: Annotated[
        str | None,
        SkipValidation(),
        Field(
            description="Data: NAME, npz:PATH, csv:PATH or pkg.mod:loader.",
        ),
    ] = None,
    root: Root = None,
    download: Download = False,
    device: Device = "auto",
) -> pd.DataFrame:
    """Check a run for faults: eleven checks, each with one statistic and one limit.

    A row a finding: ``metric`` is the check, ``severity`` fault or hint, then ``what``, ``evidence``, ``remedy`` and where
    (``rounds``, ``client``, ``layer``). A check that found nothing has one row: healthy, or not checked and why.

    A fault is arithmetic that anybody can repeat: the aggregate is not the mean that the run states, NaN, uploads that are
    equal to the bit, training on test examples. A hint is statistics, and may have another cause. With --strict a fault ends
    the command with exit code 3; a hint never does.

    ``finite aggregate starts updates buffers sampling`` need the clients' weights alone; ``data own_data test_data reported
    learning`` need the model and the data too.
    """
    options = {"samples": samples, "root": root, "download": download, "device": device}
    tables = [_examine(run, options, model, data) for run in runs]
    return pd.concat(tables, ignore_index=True)


def _examine(run: Run, options: dict[str, Any], model: Any, data: Any) -> pd.DataFrame:
    """The findings on one run."""
    from fldiag.diagnostics.doctor.examples import EXAMPLE_CHECKS
    from fldiag.diagnostics.doctor.weights import WEIGHT_CHECKS

    about = about_run(run)
    facts = list(read_facts(run, about))
    has_clients = any(round.grams for round in facts)
    rows: list[Row] = []
    check: Callable[..., Iterator[Finding]]
    for check in WEIGHT_CHECKS:
        is_possible = has_clients or check.__name__ == "finite"
        rows += _rows(check, facts, about, "" if is_possible else "no client weights are stored")
    models, reason = None, ""
    workspace().show(1, 2, f"{run.name}, its models on the examples")
    try:
        models = evaluate(run, options, model, data)
    except (FldiagError, RuntimeError) as error:  # RuntimeError: a model that does not fit its data
        reason = str(error).split("\n", 1)[0]
    for check in EXAMPLE_CHECKS:
        rows += _rows(check, models, about, reason)
    return table(rows, run=run.name, method=about.method, seed=about.seed)


def _rows(check: Callable[..., Iterator[Finding]], subject: Any, about: Any, why: str) -> list[Row]:
    """The rows of a check; ``why`` it cannot be made, "" where it can."""
    name = check.__name__
    columns = ("what", "remedy", "rounds", "round", "client", "layer", "value")
    common: Row = {"metric": name, "estimator": "exact", **dict.fromkeys(columns)}
    findings: list[Finding] = []
    try:
        findings = [] if why else list(check(subject, about))
    except FldiagError as error:
        why = error.what
    if why or not findings:
        return [
            {**common, "severity": "not checked" if why else "healthy", "evidence": why or None}
        ]
    return [
        {
            **common,
            **vars(f),
            "rounds": joined(f.rounds, 10) or None,
            "round": min(f.rounds, default=None),
        }
        for f in findings
    ]
