"""A run examined: every check sees every round, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    Said,
    Skip,
    beyond_chance,
)
from fldiag.errors import FldiagError
from fldiag.registry import Progress
from fldiag.results.table import Row, table
from fldiag.runs.round_weights import ranges
from fldiag.runs.run import Run


def examine(
    runs: Sequence[Run],
    options: Mapping[str, Any],
    progress: Progress | None,
    checks: Sequence[type[Check]] = CHECKS,
) -> pd.DataFrame:
    """The findings of all runs, each check's below the other."""
    seen = [_watched(run, options, checks, i, len(runs), progress) for i, run in enumerate(runs)]
    frames = []
    for i, (case, made) in enumerate(seen):
        said: list[tuple[Check, Said]] = []
        for j, check in enumerate(made):
            if progress:
                progress(j, len(made), f"{case.run.name}: {check.title}")
            check.peers = [others[j] for k, (_, others) in enumerate(seen) if k != i]
            said += [(check, one) for one in _of(check)]
        kept = beyond_chance([one for _, one in said], sum(check.tests for check in made))
        rows = [_row(check, one) for check, one in said if any(one is other for other in kept)]
        clear = [check for check in made if check.name not in {row["metric"] for row in rows}]
        rows += [_row(check, Clear("what chance explains was left out")) for check in clear]
        place = {check.name: j for j, check in enumerate(made)}
        stored = {"stored": ranges(case.rounds)}
        frames.append(
            table(sorted(rows, key=lambda row: place[row["metric"]]), **case.common, **stored)
        )
        case.__dict__.pop("history", None)  # model and data of one run at a time
    return pd.concat(frames, ignore_index=True)


def _watched(
    run: Run,
    options: Mapping[str, Any],
    checks: Sequence[type[Check]],
    i: int,
    n: int,
    progress: Progress | None,
) -> tuple[Case, list[Check]]:
    case = Case(run, options)
    made = [make(case) for make in checks]
    for j, seen in enumerate(case.each()):
        if progress:
            progress(
                j,
                len(run.rounds),
                f"{run.name}{f' ({i + 1} of {n})' if n > 1 else ''}: round {seen.round}",
            )
        for check in made:
            check.see(seen)
    return case, made


def _of(check: Check) -> list[Said]:
    """What a check says: its findings; if it has none, what it could not see, or that there is nothing."""
    said: list[Said] = []
    try:
        for one in check.end():
            said.append(one)
    except FldiagError as error:
        said.append(Skip(error.what))
    found: list[Said] = [one for one in said if isinstance(one, Finding)]
    rest: list[Said] = [one for one in said if not isinstance(one, Finding)]
    return found or rest[:1] or [Skip("the run holds nothing that this check can use")]


def _row(check: Check, said: Said) -> Row:
    about: Row = {
        "metric": check.name,
        "title": check.title,
        "estimator": "test" if check.tests else "exact",
        **dict.fromkeys(("what", "evidence", "consequence", "remedy", "rounds", "p_value")),
    }
    if isinstance(said, Clear):
        return {**about, "severity": HEALTHY, "evidence": said.evidence}
    if isinstance(said, Skip):
        return {**about, "severity": UNCHECKED, "evidence": f"because {said.why}"}
    scope = "global" if said.client is None else "client" if said.client_b is None else "pair"
    return {
        **about,
        "severity": said.severity,
        "what": said.what,
        "evidence": said.evidence,
        "consequence": said.consequence,
        "remedy": said.remedy,
        "scope": scope,
        "client": said.client,
        "client_b": said.client_b,
        "layer": said.layer,
        "round": min(said.rounds, default=None),
        "rounds": ranges(sorted(said.rounds)) if said.rounds else None,
        "value": said.value,
        "p_value": said.p,
    }
