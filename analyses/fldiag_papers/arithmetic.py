"""Numbers of the papers that follow from others that they print, worked out again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from fldiag.errors import FldiagError
from fldiag_papers import reported
from fldiag_papers.paper_tables import label
from fldiag_papers.reported import FEDERATION, Reported


@dataclass(frozen=True)
class Rule:
    """How a number follows from others, and of which table and metric these are. ``of``: the method that all are compared with,
    where the setting's mark ``over`` does not name it; ``method``: the only one of which the rule holds."""

    how: str
    table: str
    operand: str
    of: str = ""
    method: str = ""


#: Paper, id and metric -> how the number follows from others.
RULES = {
    ("fedsol", "table1", "accuracy_change"): Rule("difference", "table1", "accuracy"),
    ("fedtoga", "table3", "cost_80"): Rule("ratio", "table3", "rounds_to_80", of="fedtoga"),
    ("fedtoga", "table3", "cost_82"): Rule("ratio", "table3", "rounds_to_82", of="fedtoga"),
    ("fedproj", "table1", "accuracy"): Rule("largest", "table3", "accuracy", method="fedproj"),
    ("fedalign", "table5_counts", "MFLOPs_saved"): Rule("saving", "table5_counts", "MFLOPs"),
    ("fedalign", "table5_counts", "params_M_saved"): Rule("saving", "table5_counts", "params_M"),
}
#: How numbers follow from others, and how that is written.
WAYS: dict[str, tuple[Callable[..., float], str]] = {
    "difference": (lambda a, b: a - b, "{} - {}"),
    "ratio": (lambda a, b: a / b, "{} / {}"),
    "saving": (lambda a, b: 100 * (1 - a / b), "1 - {} / {}"),
    "largest": (lambda *values: max(values), "largest of {}"),
}


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
        room = row.rounding + 1e-9
        return self.low - room <= row.value <= self.high + room


def work_out(row: Reported) -> Worked | None:
    """The number of a row from others; None where no rule says how, or where one of these is lost.

    Raises FldiagError where several numbers may be meant."""
    rule = RULES.get((row.paper, row.id, row.metric))
    if rule is None or row.value is None or rule.method not in ("", row.method):
        return None
    if rule.of == row.method or (row.plain != row.setting and "over" not in row.settings):
        return None
    if rule.how == "largest":
        parts = [r for r in _rows(rule, row, row.method) if _federation(r) == _federation(row)]
    else:
        other = rule.of or row.settings.get("over", "")
        pairs = [_one(rule, row, method) for method in (row.method, other)]
        parts = [p for p in pairs if p is not None] if None not in pairs else []
    if not parts:
        return None
    way, text = WAYS[rule.how]
    values = [float(p.value) for p in parts if p.value is not None]
    roundings = [(v - p.rounding, v + p.rounding) for v, p in zip(values, parts, strict=True)]
    ends = [way(*corner) for corner in product(*roundings)]
    operands = [f"{v:g}" for v in values]
    operands = [", ".join(operands)] if rule.how == "largest" else operands
    text = f"{parts[0].source}: {text.format(*operands)}"
    return Worked(way(*values), min(ends), max(ends), text)


def _rows(rule: Rule, row: Reported, method: str) -> list[Reported]:
    """The numbers of a method (``gradaug (n=2)``: with these options) in the rule's table."""
    return [
        r
        for r in reported.rows(row.paper)
        if (r.id, r.metric, r.data) == (rule.table, rule.operand, row.data)
        and r.value is not None
        and r.plain == r.setting
        and method in (r.method, label(r.method, r.settings))
    ]


def _one(rule: Rule, row: Reported, method: str) -> Reported | None:
    """A method's number in the same setting, or else in the same federation. Raises FldiagError where there are several."""
    candidates = _rows(rule, row, method)
    same_setting = [r for r in candidates if r.plain == row.plain]
    same_federation = [r for r in candidates if _federation(r) == _federation(row)]
    alike = same_setting or same_federation or candidates
    if len(alike) > 1:
        raise FldiagError(
            f"{row.paper}/{row.id}: {method} has {len(alike)} numbers {rule.operand} in {rule.table}",
            "say which in arithmetic.py, or by the mark over in reported.csv",
        )
    return alike[0] if alike else None


def _federation(row: Reported) -> dict[str, str]:
    return {key: value for key, value in row.settings.items() if key in FEDERATION}
