"""A run examined: every check sees every round, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from fldiag.diagnostics.doctor.case import Case
from fldiag.diagnostics.doctor.checks import CHECKS
from fldiag.diagnostics.doctor.findings import (
    HEALTHY,
    UNCHECKED,
    Check,
    Clear,
    Finding,
    Outcome,
    Skip,
    beyond_chance,
)
from fldiag.diagnostics.doctor.finite import Finite
from fldiag.errors import FldiagError, counted
from fldiag.execution import workspace
from fldiag.results.table import Row, table
from fldiag.runs.round_weights import ranges
from fldiag.runs.run import Run

#: What is said of a check whose findings are left out.
EXPLAINED = Clear("what chance, or weights that are not finite, explain was left out")


def examine(
    runs: Sequence[Run],
    options: Mapping[str, Any],
    checks: Sequence[type[Check]] = CHECKS,
) -> pd.DataFrame:
    """The findings of all runs, each check's below the other."""
    cases = []
    for i, run in enumerate(runs):
        with workspace().part(i, 2 * len(runs), run.name):
            cases.append(_watched(run, options, checks))
    frames = []
    for i, (case, instances) in enumerate(cases):
        outcomes: list[tuple[Check, Outcome]] = []
        for j, check in enumerate(instances):
            number, total = i * len(instances) + j, len(runs) * len(instances)
            workspace().show(total + number, 2 * total, f"{case.run.name}, {check.title}")
            check.peers = [peer_checks[j] for k, (_, peer_checks) in enumerate(cases) if k != i]
            outcomes += [(check, one) for one in _of(check)]
        outcomes = fold(outcomes)
        tests = sum(check.tests for check in instances)
        significant = beyond_chance([one for _, one in outcomes], tests)
        rows = []
        for check in instances:
            remaining = [
                one
                for other, one in outcomes
                if other is check and any(one is each for each in significant)
            ]
            rows += [_row(check, one) for one in remaining or [EXPLAINED]]
        frames.append(table(rows, **case.common, stored=ranges(case.rounds)))
        case.__dict__.pop("history", None)  # model and data of one run at a time
    return pd.concat(frames, ignore_index=True)


def _watched(
    run: Run, options: Mapping[str, Any], checks: Sequence[type[Check]]
) -> tuple[Case, list[Check]]:
    case = Case(run, options)
    instances = [make(case) for make in checks]
    for j, cohort in enumerate(case.each()):
        workspace().show(j, len(run.rounds), f"round {cohort.round}")
        for check in instances:
            check.see(cohort)
    return case, instances


def _of(check: Check) -> list[Outcome]:
    """What a check says: its findings; if it has none, what it could not see, or that there is nothing."""
    outcomes: list[Outcome] = []
    try:
        for one in check.end():
            outcomes.append(one)
    except FldiagError as error:
        outcomes.append(Skip(error.what, error.remedy))
    findings: list[Outcome] = [one for one in outcomes if isinstance(one, Finding)]
    rest: list[Outcome] = [one for one in outcomes if not isinstance(one, Finding)]
    return findings or rest[:1] or [Skip("the run holds nothing that this check can use")]


def fold(outcomes: list[tuple[Check, Outcome]]) -> list[tuple[Check, Outcome]]:
    """The outcomes without those that follow from a global model that is not finite: they stand in the line of the cause."""
    finite = next((check for check, _ in outcomes if isinstance(check, Finite)), None)
    causes = [one for check, one in outcomes if check is finite and isinstance(one, Finding)]
    if finite is None or not finite.server or not causes:
        return outcomes

    def is_consequence(check: Check, one: Outcome) -> bool:
        is_later = isinstance(one, Finding) and min(one.rounds, default=-1) >= finite.server[0]
        return check is not finite and is_later

    consequences = [check for check, one in outcomes if is_consequence(check, one)]
    if not consequences:
        return outcomes
    names = ", ".join(dict.fromkeys(check.title.lower() for check in consequences))
    count = counted(len(consequences), "finding")
    text = f"{causes[0].evidence}; so follow {count} of other checks ({names})"
    return [
        (check, replace(one, evidence=text) if one is causes[0] else one)
        for check, one in outcomes
        if not is_consequence(check, one)
    ]


def _row(check: Check, outcome: Outcome) -> Row:
    about: Row = {
        "metric": check.name,
        "title": check.title,
        "estimator": "test" if check.tests else "exact",
        **dict.fromkeys(("what", "evidence", "consequence", "remedy", "rounds", "p_value", "who")),
    }
    if isinstance(outcome, Clear):
        return {**about, "severity": HEALTHY, "evidence": outcome.evidence}
    if isinstance(outcome, Skip):
        return {
            **about,
            "severity": UNCHECKED,
            "evidence": f"because {outcome.why}",
            "remedy": outcome.remedy or None,
        }
    scope = "global" if outcome.client is None else "client" if outcome.client_b is None else "pair"
    clients = [k for k in (outcome.client, outcome.client_b) if k is not None]
    return {
        **about,
        "severity": outcome.severity,
        "what": outcome.what,
        "evidence": outcome.evidence,
        "consequence": outcome.consequence,
        "remedy": outcome.remedy,
        "scope": scope,
        "client": outcome.client,
        "client_b": outcome.client_b,
        "who": None if outcome.client is None else check.case.client(*clients),
        "layer": outcome.layer,
        "round": min(outcome.rounds, default=None),
        "rounds": ranges(sorted(outcome.rounds)) if outcome.rounds else None,
        "value": outcome.value,
        "p_value": outcome.p,
    }
