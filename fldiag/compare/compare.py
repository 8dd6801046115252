"""The two questions put to both sides: ``check`` with conditions and a verdict, ``diff`` without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import pandas as pd

from fldiag.compare import evidence
from fldiag.compare.conditions import Condition, parse
from fldiag.compare.evidence import Evidence
from fldiag.compare.reading import Reader
from fldiag.compare.sides import Sides
from fldiag.errors import FldiagError, nearest
from fldiag.results.numbers import TRAINING, Number
from fldiag.results.numbers import numbers as known
from fldiag.results.table import Row, table
from fldiag.results.uncertainty import Interval, holm

#: ``error``: the number could not be computed, so nothing was tested. The worst of several comes first.
Verdict = Literal["fail", "error", "undecided", "pass"]


@dataclass(frozen=True)
class Checked:
    """The answer of a check.

    ``verdict``: pass, fail, undecided, or error (a number could not be computed), of all conditions together. ``table``: a row a
    condition: ``value`` and ``baseline`` of the two sides, ``limit``, the ``difference`` of value and limit with its interval
    (``low``, ``high``), ``p`` and Holm's ``p_holm``, ``verdict`` and, in ``note``, what stands against one, with the ``remedy``
    of an error. ``question``: which question was asked and what the answer carries. ``notes``: what else
    a reader must know. ``labels``: names of the two sides.
    """

    verdict: Verdict
    table: pd.DataFrame
    question: str
    labels: tuple[str, str]
    notes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        counted = self.table["verdict"].value_counts()
        parts = ", ".join(f"{counted[v]} {v}" for v in get_args(Verdict) if v in counted)
        return f"Checked({self.verdict}: {parts}; {' against '.join(filter(None, self.labels))})"


def check(sides: Sides, fail_if: Sequence[str], reader: Reader, level: float) -> Checked:
    """Decide every condition. A condition that clearly holds fails the check, one that clearly does not hold passes it.
    One whose number cannot be computed is an error: nothing was tested."""
    _check_level(level)
    conditions = [parse(text) for text in fail_if]
    if not conditions:
        conditions = [parse(_usual(sides, reader))]
    if not sides.b and (lost := next((c for c in conditions if c.relative), None)):
        raise FldiagError(
            f"condition {lost.text!r} refers to a baseline, and none is given",
            "give --baseline RUN",
            usage=True,
        )
    numbers = {
        c.number.name: c.number for c in conditions
    }  # each is looked at once, however many conditions there are
    evidence_of = {
        name: evidence.of(number, sides, reader, level) for name, number in numbers.items()
    }
    evidences = [evidence_of[c.number.name] for c in conditions]
    comparisons = [(e, c.scale, c.offset) for e, c in zip(evidences, conditions, strict=True)]
    rows = _rows(comparisons, level)
    for row, one, condition in zip(rows, evidences, conditions, strict=True):
        verdict = _verdict(condition, one, row, level)
        row |= {
            "metric": condition.number.name,
            "condition": condition.text,
            "verdict": verdict,
            "remedy": (one.remedy or "leave out this condition") if verdict == "error" else None,
        }
    worst: Verdict = min((row["verdict"] for row in rows), key=get_args(Verdict).index)
    return Checked(
        worst, _table(rows, sides), sides.question, sides.labels, _notes(sides, rows, level)
    )


def diff(sides: Sides, numbers: Sequence[str] | None, reader: Reader, level: float) -> pd.DataFrame:
    """Every number of both sides with its difference; ``better``: the side that clearly is.
    ``attrs`` hold the question and the notes."""
    _check_level(level)
    catalogue = known()
    unknown = next((n for n in numbers or () if n not in catalogue), None)
    if unknown is not None:
        raise FldiagError(f"unknown number {unknown!r}", nearest(unknown, catalogue), usage=True)
    entries: list[Number] = [catalogue[n] for n in numbers or catalogue]
    evidences = [evidence.of(n, sides, reader, level) for n in entries]
    rows = _rows([(e, 1.0, 0.0) for e in evidences], level)
    for row, number, one in zip(rows, entries, evidences, strict=True):
        row |= {
            "metric": number.name,
            "better": _better(number, row) if _decided(one, row, level) else "undecided",
        }
    frame = _table(rows, sides)
    frame.attrs = {
        "diagnostic": "diff",
        "question": sides.question,
        "notes": _notes(sides, rows, level),
        "labels": list(sides.labels),
    }
    return frame


def _check_level(level: float) -> None:
    """Raises FldiagError for what is not a confidence level."""
    if not 0 < level < 1:
        raise FldiagError(
            f"level = {level!r} is not a confidence level",
            "use a number between 0 and 1, such as 0.95",
            usage=True,
        )


def _usual(sides: Sides, reader: Reader) -> str:
    """What is asked where no condition is given: is A worse? By accuracy, or by loss where there are no classes."""
    if not sides.b:
        raise FldiagError(
            "neither a baseline nor a condition is given",
            "give two sides, or --fail-if 'accuracy < 80%'",
            usage=True,
        )
    try:
        reader.value(sides.a[0], TRAINING[0])
    except FldiagError:
        return "loss > baseline"
    return "accuracy < baseline"


def _rows(comparisons: Sequence[tuple[Evidence, float, float]], level: float) -> list[Row]:
    rows = []
    for e, scale, offset in comparisons:
        limit = None if e.b is None and scale else scale * (e.b or 0.0) + offset
        value = None if e.a is None or limit is None else e.a - limit
        interval = e.between(scale, offset) if e.between is not None else None
        interval = interval or Interval(value if value is not None else float("nan"))
        row: Row = {
            "value": e.a,
            "baseline": e.b,
            "limit": limit,
            "difference": value,
            "low": interval.low,
            "high": interval.high,
            "p": interval.p,
            "n": e.n,
            "certain": interval.certain,
            "estimator": ", ".join(filter(None, (e.estimator, interval.test))) or "none",
            "note": _note(e, interval),
            "masked": e.a is None,
        }
        rows.append(row)
    for row, adjusted in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = adjusted
    return rows


def _note(e: Evidence, interval: Interval) -> str:
    if e.why:
        return e.why
    if interval.p is None and not interval.certain:
        return (
            "no interval: every resample gives the same value"
            if e.estimator == evidence.EXAMPLES
            else "no interval: all differences are equal, so there is no spread to judge by"
        )
    return ""


def _verdict(condition: Condition, e: Evidence, row: Row, level: float) -> Verdict:
    """By Holm's p, so that all verdicts of a check together are wrong with at most the probability allowed."""
    if e.broken:
        return "fail"
    if e.a is None:
        return "error"
    if not _decided(e, row, level):
        return "undecided"
    return "fail" if condition.holds(row["difference"]) else "pass"


def _better(number: Number, row: Row) -> str:
    if row["difference"] == 0:
        return "same"
    return "A" if (row["difference"] > 0) == (number.better == "higher") else "B"


def _decided(e: Evidence, row: Row, level: float) -> bool:
    """Whether the difference is beyond the noise, or both sides are the same."""
    if row["low"] is None or e.why:
        return False
    if row["certain"]:
        return bool(row["low"] > 0 or row["high"] < 0)
    return bool(row["low"] == row["high"] == 0.0 or row["p_holm"] <= 1 - level)


def _table(rows: Sequence[Row], sides: Sides) -> pd.DataFrame:
    return table(
        rows,
        run=sides.labels[0],
        baseline_run=sides.labels[1] or None,
        question="methods" if sides.methods else "models",
    )


def _notes(sides: Sides, rows: Sequence[Row], level: float) -> list[str]:
    notes = list(sides.notes)
    count = sum(row["p"] is not None for row in rows)
    if count > 1:
        notes.append(
            f"{count} numbers are compared: each {100 * level:g} % interval holds for its number alone; verdicts use p "
            "(Holm), which accounts for all comparisons"
        )
    done = [[_done(m) for m in side] for side in (sides.a, sides.b)]
    if sides.b and done[0] != done[1] and None not in [*done[0], *done[1]]:
        notes.append(
            f"trained for different numbers of rounds: {_counts(done[0])} and {_counts(done[1])}"
        )
    return notes


def _done(member: Any) -> int | None:
    return member.done if hasattr(member, "done") else member.round


def _counts(rounds: Sequence[int | None]) -> str:
    return ", ".join(str(r) for r in dict.fromkeys(rounds))
