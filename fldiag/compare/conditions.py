"""The language of conditions: ``accuracy < baseline - 1pt``.

    NAME OPERATOR value      OPERATOR: < <= > >=      value: AMOUNT, or baseline [+|- AMOUNT]      AMOUNT: NUMBER [pt|%]

``pt`` are percentage points of a share. ``%`` alone is a share (80% = 0.8); behind ``baseline`` it is relative: ``baseline + 5%``
is 1.05 times the baseline.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fldiag.errors import FldiagError, nearest
from fldiag.results.numbers import Number, numbers

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
class Condition:
    """``number`` ``comparison`` scale * baseline + offset; without a baseline ``scale`` is 0."""

    text: str
    number: Number
    comparison: str
    scale: float
    offset: float

    def holds(self, difference: float) -> bool:
        """Whether it holds where the number is by so much above the limit."""
        return OPERATORS[self.comparison](difference, 0.0)


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
        raise FldiagError(f"unknown number {name!r}", nearest(name, catalogue), usage=True)
    return catalogue[name]
