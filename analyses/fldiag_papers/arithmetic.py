"""Numbers of the papers that follow from others that they print, worked out again: ``arithmetic.csv`` says which."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from fldiag.errors import FldiagError, unknown
from fldiag_papers import reported
from fldiag_papers.paper_tables import label
from fldiag_papers.reported import FEDERATION, Reported


@dataclass(frozen=True)
class Rule:
    """Numbers of a table (``method``: of this one alone), how each follows from others, and of which table and metric these are.
    ``of``: the method that all are compared with, where the setting's mark ``over`` does not name it."""

    paper: str
    id: str
    metric: str
    method: str
    how: str
    table: str
    operand: str
    of: str


@dataclass(frozen=True)
class Worked:
    """What a number comes to, between which ends where the numbers that it is made of are rounded, and from what."""

    value: float
    low: float
    high: float
    text: str

    def agrees(self, row: Reported) -> bool:
        """Whether the number printed may be this one, rounded."""
        assert row.value is not None
        return (
            self.low - row.rounding <= row.value + 1e-9
            and row.value - 1e-9 <= self.high + row.rounding
        )


#: How numbers follow from others, and how that is written.
WAYS: dict[str, tuple[Callable[..., float], str]] = {
    "difference": (lambda a, b: a - b, "{} - {}"),
    "ratio": (lambda a, b: a / b, "{} / {}"),
    "saving": (lambda a, b: 100 * (1 - a / b), "1 - {} / {}"),
    "largest": (lambda *values: max(values), "largest of {}"),
}


@cache
def rules() -> tuple[Rule, ...]:
    with open(reported.FOLDER / "arithmetic.csv", newline="", encoding="utf-8") as file:
        return tuple(Rule(**row) for row in csv.DictReader(file))


def worked(row: Reported) -> Worked | None:
    """The number of a row worked out from others; None where no rule says how, or where one of these is lost.

    Raises FldiagError for a rule that is not valid, or that does not say which numbers it means."""
    mine = [
        r
        for r in rules()
        if (r.paper, r.id, r.metric) == (row.paper, row.id, row.metric)
        and r.method in ("", row.method)
    ]
    if (
        not mine
        or row.value is None
        or mine[0].of == row.method
        or (row.plain != row.setting and "over" not in row.settings)
    ):
        return None
    rule = mine[0]
    if rule.how not in WAYS:
        raise unknown("way to work a number out", rule.how, WAYS)
    if rule.how == "largest":
        return _result(
            rule, [r for r in _rows(rule, row, row.method) if _federation(r) == _federation(row)]
        )
    parts = [
        _one(rule, row, name) for name in (row.method, rule.of or row.settings.get("over", ""))
    ]
    return _result(rule, [p for p in parts if p is not None]) if None not in parts else None


def _result(rule: Rule, parts: Sequence[Reported]) -> Worked | None:
    if not parts:
        return None
    way, text = WAYS[rule.how]
    values = [float(p.value) for p in parts if p.value is not None]
    ends = [
        way(*corner)
        for corner in product(
            *([v - p.rounding, v + p.rounding] for v, p in zip(values, parts, strict=True))
        )
    ]
    operands = [f"{v:g}" for v in values]
    words = text.format(", ".join(operands)) if rule.how == "largest" else text.format(*operands)
    return Worked(way(*values), min(ends), max(ends), f"{parts[0].source}: {words}")


def _rows(rule: Rule, row: Reported, method: str) -> list[Reported]:
    """The numbers of a method (``gradaug (n=2)``: with these options) in the rule's table."""
    return [
        r
        for r in reported.rows(rule.paper)
        if (r.id, r.metric, r.data) == (rule.table, rule.operand, row.data)
        and r.value is not None
        and r.plain == r.setting
        and method in (r.method, label(r.method, r.settings))
    ]


def _one(rule: Rule, row: Reported, method: str) -> Reported | None:
    """A method's number in the same setting, or else in the same federation. Raises FldiagError where there are several."""
    candidates = _rows(rule, row, method)
    alike = (
        [r for r in candidates if r.plain == row.plain]
        or [r for r in candidates if _federation(r) == _federation(row)]
        or candidates
    )
    if len(alike) > 1:
        raise FldiagError(
            f"{rule.paper}/{rule.id}: {method} has {len(alike)} numbers {rule.operand} in {rule.table}",
            "say which in arithmetic.csv, or by the mark over in reported.csv",
        )
    return alike[0] if alike else None


def _federation(row: Reported) -> dict[str, str]:
    return {key: value for key, value in row.settings.items() if key in FEDERATION}
