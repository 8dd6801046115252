"""``check`` decides conditions on two sides, and ``diff`` compares all numbers of both.

Methods are compared by a paired t over seeds. Two given models are compared by a paired bootstrap over test examples (McNemar's
exact test where equal accuracies are asked about). Other numbers of given models are shown without a verdict.

Conditions: ``accuracy < baseline - 1pt``.

    NAME OPERATOR value      OPERATOR: < <= > >=      value: AMOUNT, or baseline [+|- AMOUNT]      AMOUNT: NUMBER [pt|%]

``pt`` are percentage points of a share. ``%`` alone is a share (80% = 0.8); behind ``baseline`` it is relative: ``baseline + 5%``
is 1.05 times the baseline.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from fldiag.compare.sides import Member, Reader, Sides, about_of
from fldiag.errors import FldiagError, unknown
from fldiag.results import statistics
from fldiag.results.numbers import Number, numbers
from fldiag.results.statistics import SEEDS, Interval
from fldiag.results.table import Row, table
from fldiag.runs.run import Run

#: ``error``: the number could not be computed, so nothing was tested. The worst of several comes first.
Verdict = Literal["fail", "error", "undecided", "pass"]
SEEDWISE = "paired t over seeds"
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
CONDITION = re.compile(
    r"\s*(?P<name>\w+)\s*(?P<comparison>[<>]=?)\s*(?=\S)(?P<baseline>baseline(?=\s*(?:[+-]|$)))?\s*"
    r"(?:(?P<amount>[+-]?\s*(?:\d{1,20}\.?\d{0,20}|\.\d{1,20})(?:[eE][+-]?\d{1,2})?)\s*(?P<unit>pt|%)?)?\s*"
)


@dataclass(frozen=True)
class Checked:
    """The answer of a check.

    ``verdict``: pass, fail, undecided, or error (a number could not be computed), of all conditions together. ``table``: a row a
    condition: ``value`` and ``baseline`` of the two sides, ``limit``, the ``difference`` of value and limit with its interval
    (``low``, ``high``), ``p`` and Holm's ``p_holm``, ``verdict`` and, in ``note``, what stands against one, with the ``remedy``
    of an error. ``question``: which question was asked and what the answer carries. ``notes``: what else a reader must know.
    ``labels``: names of the two sides.
    """

    verdict: Verdict
    labels: tuple[str, str]
    table: pd.DataFrame = field(repr=False)
    question: str = field(repr=False)
    notes: list[str] = field(repr=False)


@dataclass(frozen=True)
class Samples:
    """A number on both sides, pair by pair: of seeds or examples [n]; of examples bool where it says what is right.

    ``why``: what stands against a decision; ``is_broken``: the candidate's weights give no numbers.
    """

    a: np.ndarray
    b: np.ndarray
    estimator: str = ""
    why: str = ""
    remedy: str = ""
    is_broken: bool = False

    def difference(self, scale: float, offset: float, level: float) -> Interval:
        """Of the means of a and scale * b + offset."""
        each = self.a - (scale * self.b + offset)
        if not self.estimator:
            return Interval(float(each.mean()))
        if self.estimator == SEEDWISE:
            return statistics.paired_t(each, level)
        if not each.any():
            return Interval(0.0, 0.0, 0.0, 1.0)
        draws = statistics.means(each[:, None])[:, 0]
        interval = statistics.basic(float(each.mean()), draws, level)
        if self.a.dtype == bool and (scale, offset) == (1.0, 0.0):
            p = statistics.mcnemar(self.a, self.b)
            return replace(interval, p=p, test="McNemar's exact test")
        return interval


def check(sides: Sides, reader: Reader, fail_if: Sequence[str], level: float) -> Checked:
    """Decide every condition: one that clearly holds fails the check, one that clearly does not hold passes it.

    Args:
        sides: One, or two.
        reader: Of the numbers.
        fail_if: The conditions; by default ``accuracy < baseline``.
        level: Of the intervals. Verdicts use Holm's p: all of them are right together with this probability.

    Raises:
        FldiagError: A condition that cannot be read, or that needs a baseline where there is none.
    """
    check_level(level)
    conditions = [parse(text) for text in fail_if or ["accuracy < baseline"]]
    if not sides.b and any(condition.scale for condition in conditions):
        raise FldiagError(
            "a condition needs a baseline", "give two sides: fldiag check RUN BASELINE", usage=True
        )
    limits = [(samples_of(c.number, sides, reader), c.scale, c.offset) for c in conditions]
    rows = rows_of(limits, level)
    for row, (sample, *_), condition in zip(rows, limits, conditions, strict=True):
        verdict = verdict_of(condition, sample, row, level)
        row |= {"metric": condition.number.name, "condition": condition.text, "verdict": verdict}
        row["remedy"] = sample.remedy or "leave it out" if verdict == "error" else None
    worst: Verdict = min((row["verdict"] for row in rows), key=get_args(Verdict).index)
    return Checked(worst, sides.labels, table_of(rows, sides), sides.question, sides.notes)


def diff(sides: Sides, reader: Reader, names: Sequence[str] | None, level: float) -> pd.DataFrame:
    """Every number of both sides with its difference; ``better``: the side that clearly is.

    Args:
        sides: Two.
        reader: Of the numbers.
        names: Of the numbers; by default all.
        level: Of the intervals.

    Returns:
        A row a number; ``attrs`` hold question, notes and labels.

    Raises:
        FldiagError: An unknown number.
    """
    check_level(level)
    entries = [number_of(name) for name in names or numbers()]
    rows = rows_of([(samples_of(number, sides, reader), 1.0, 0.0) for number in entries], level)
    for row, number in zip(rows, entries, strict=True):
        better = "A" if (row["difference"] > 0) == (number.better == "higher") else "B"
        better = "same" if row["difference"] == 0 else better
        row |= {"metric": number.name, "better": better if is_decided(row, level) else "undecided"}
    return table_of(rows, sides)


# Conditions


@dataclass(frozen=True)
class Condition:
    """``number`` ``comparison`` scale * baseline + offset; without a baseline ``scale`` is 0."""

    text: str
    number: Number
    comparison: str
    scale: float
    offset: float


def parse(text: str) -> Condition:
    """A condition of its text.

    Args:
        text: Such as ``accuracy < baseline - 1pt``.

    Raises:
        FldiagError: It is none, its number is not known, or its unit has no meaning for the number.

    >>> condition = parse("accuracy < baseline - 1pt")
    >>> condition.number.name, condition.comparison, condition.scale, condition.offset
    ('accuracy', '<', 1.0, -0.01)
    >>> parse("loss > baseline + 5%").scale
    1.05
    """
    match = CONDITION.fullmatch(text)
    if not match:
        raise FldiagError(
            f"{text[:80]!r} is not a condition",
            "write one comparison such as accuracy < baseline - 1pt, or loss > baseline + 5%",
            usage=True,
        )
    number, unit, is_relative = number_of(match["name"]), match["unit"], bool(match["baseline"])
    is_factor = is_relative and unit == "%"
    if unit and not number.share and not is_factor:
        raise FldiagError(
            f"{number.name} is not a share of 1, so {unit!r} has no meaning",
            "leave it out, or write baseline + 5%",
            usage=True,
        )
    amount = float(re.sub(r"\s", "", match["amount"] or "0")) / (100 if unit else 1)
    scale, offset = (1 + amount, 0.0) if is_factor else (float(is_relative), amount)
    return Condition(" ".join(text.split()), number, match["comparison"], scale, offset)


def number_of(name: str) -> Number:
    """The number of this name. Raises FldiagError for an unknown one."""
    catalogue = numbers()
    if name not in catalogue:
        raise unknown("number", name, catalogue)
    return catalogue[name]


# How sure a difference is


def samples_of(number: Number, sides: Sides, reader: Reader) -> Samples:
    """The number on both sides; without values where they cannot be compared by it."""
    nothing = Samples(*np.full((2, 1), np.nan))
    for run in sides.a:
        if isinstance(run, Run) and run.status == "diverged":
            why = f"{run.path.name} diverged: its weights give no numbers"
            return replace(nothing, why=why, is_broken=True)
    is_of_examples = number.source == "metrics" and not sides.has_methods
    try:
        for pair in zip(sides.a, sides.b, strict=bool(sides.b)):
            check_alike(number, *pair)
        first, second = (
            pd.concat([reader.samples(member, number, is_of_examples) for member in side])
            for side in (sides.a, sides.b or sides.a)
        )
        if is_of_examples and not first.index.equals(second.index):
            raise FldiagError("the test examples of the two differ", "compare on the same data")
    except FldiagError as error:
        return replace(nothing, why=error.what, remedy=error.remedy)
    a, b = first.to_numpy(), second.to_numpy() if sides.b else np.zeros(len(first))
    if is_of_examples:
        return Samples(a, b, "bootstrap over examples")
    if not sides.has_methods:
        return Samples(a, b, why="one number of a model: shown without a verdict")
    return Samples(
        a, b, SEEDWISE, "" if len(a) >= SEEDS else f"{SEEDS} seeds are needed for a decision"
    )


def check_level(level: float) -> None:
    """Raises FldiagError for what is no confidence level."""
    if not 0 < level < 1:
        what = f"level = {level!r} is not between 0 and 1"
        raise FldiagError(what, "use a confidence level such as 0.95", usage=True)


def check_alike(number: Number, a: Member, b: Member) -> None:
    """Raises FldiagError where the number of one is not that of the other."""
    if "model" in number.needs:
        states = [(m.checkpoint() if isinstance(m, Run) else m).state for m in (a, b)]
        shapes = [{name: t.shape for name, t in state.items()} for state in states]
        if shapes[0] != shapes[1]:
            raise FldiagError("the models are different", "compare runs of the same model")
    parts = [about_of(member).get("files", {}).get("partition.npz") for member in (a, b)]
    if "partition" in number.needs and (None in parts or parts[0] != parts[1]):
        what = "the data are divided differently among the clients, or a side does not say how"
        raise FldiagError(what, "compare runs of the same partition")


def rows_of(samples: Sequence[tuple[Samples, float, float]], level: float) -> list[Row]:
    """A row for each comparison of a with scale * b + offset; ``p_holm`` accounts for all of them."""
    rows: list[Row] = []
    for sample, scale, offset in samples:
        interval = sample.difference(scale, offset, level)
        a, b = float(sample.a.mean()), float(sample.b.mean())
        is_alike = sample.estimator and interval.p is None
        rows.append(
            {
                "value": a,
                "baseline": b if scale else None,
                "limit": scale * b + offset,
                "difference": interval.value,
                "low": interval.low,
                "high": interval.high,
                "p": interval.p,
                "n": len(sample.a),
                "estimator": ", ".join(filter(None, (sample.estimator, interval.test))) or "none",
                "note": sample.why or ("all differences are equal" if is_alike else ""),
                "masked": bool(np.isnan(a)),
            }
        )
    for row, adjusted in zip(rows, statistics.holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = adjusted
    return rows


def is_decided(row: Row, level: float) -> bool:
    """Whether the difference is beyond the noise, or both sides are the same."""
    if row["low"] is None or row["note"]:
        return False
    return bool(row["low"] == row["high"] == 0.0 or row["p_holm"] <= 1 - level)


def verdict_of(condition: Condition, sample: Samples, row: Row, level: float) -> Verdict:
    """By Holm's p: all verdicts of a check together are wrong with at most the probability allowed."""
    if sample.is_broken:
        return "fail"
    if row["masked"]:
        return "error"
    if not is_decided(row, level):
        return "undecided"
    return "fail" if OPERATORS[condition.comparison](row["difference"], 0.0) else "pass"


def table_of(rows: Sequence[Row], sides: Sides) -> pd.DataFrame:
    """The comparison as a result table."""
    frame = table(rows, run=sides.labels[0], baseline_run=sides.labels[1] or None)
    frame.attrs = {"diagnostic": "diff", "question": sides.question}
    frame.attrs |= {"notes": sides.notes, "labels": [*sides.labels]}
    return frame
