"""The language of conditions: ``accuracy < baseline - 1pt``.

    condition = NAME OPERATOR value
    OPERATOR  = "<" | "<=" | ">" | ">="
    value     = amount | "baseline" [ ("+" | "-") amount ]
    amount    = NUMBER [ "pt" | "%" ]

``pt`` are percentage points of a share. ``%`` alone is a share (80% = 0.8); behind ``baseline`` it is relative: ``baseline + 5%``
is 1.05 times the baseline.
"""

from __future__ import annotations

import math
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
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_λ][\w₁]*)"
    r"|(?P<sign><=|>=|[<>+\-%]))"
)
BASELINE = "baseline"
#: Characters of a condition.
LONGEST = 200
_ALIASES = {"λ1": "lambda_1", "λ₁": "lambda_1", "lambda1": "lambda_1"}


@dataclass(frozen=True)
class Condition:
    """``number`` ``sign`` scale * baseline + offset; without a baseline ``scale`` is 0."""

    text: str
    number: Number
    sign: str
    scale: float
    offset: float

    @property
    def relative(self) -> bool:
        """Whether it names the baseline."""
        return self.scale != 0

    def holds(self, difference: float) -> bool:
        """Whether it holds where the number is by so much above the limit."""
        return OPERATORS[self.sign](difference, 0.0)


class _Reader:
    """The tokens of a condition, one after the other, with their places."""

    def __init__(self, text: str):
        self.text, self.tokens, at = text, [], 0
        if len(text) > LONGEST:
            self.text = f"{text[:20]}…"
            raise self.error(
                LONGEST,
                f"it has {len(text):,} characters",
                "write one comparison per condition; give several conditions",
            )
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                place = len(text) - len(text[at:].lstrip())
                raise self.error(
                    place,
                    f"{text[place]!r} has no meaning here",
                    "write for example accuracy < baseline - 1pt",
                )
            self.tokens.append(
                (
                    match.lastgroup or "",
                    match[match.lastgroup or 0],
                    match.start(match.lastgroup or 0),
                )
            )
            at = match.end()
        self.tokens.append(("end", "the end", len(text)))

    def error(self, at: int, message: str, remedy: str) -> FldiagError:
        return FldiagError(
            f"condition {self.text!r}, position {at + 1}: {message}", remedy, usage=True
        )

    @property
    def next(self) -> tuple[str, str, int]:
        return self.tokens[0]

    def take(self, kind: str, description: str, remedy: str) -> str:
        """The next token, which must be of this kind."""
        next_kind, word, at = self.next
        if next_kind != kind:
            raise self.error(
                at,
                f"{word if next_kind == 'end' else repr(word)} where {description} is expected",
                remedy,
            )
        self.tokens.pop(0)
        return word


def parse(text: str) -> Condition:
    """A condition of its text.

    Raises FldiagError that names the position and what may stand there.

    >>> found = parse("accuracy < baseline - 1pt")
    >>> found.number.name, found.sign, found.scale, found.offset
    ('accuracy', '<', 1.0, -0.01)
    >>> parse("loss > baseline + 5%").scale
    1.05
    """
    reader = _Reader(text)
    at = reader.next[2]
    catalogue = numbers()
    name = reader.take("name", "the name of a number", f"known: {', '.join(catalogue)}")
    number = catalogue.get(_ALIASES.get(name, name))
    if number is None:
        raise reader.error(at, f"unknown number {name!r}", nearest(name, catalogue))
    at = reader.next[2]
    sign = reader.take("sign", "a comparison", f"write one of {' '.join(OPERATORS)}")
    if sign not in OPERATORS:
        raise reader.error(
            at, f"{sign!r} where a comparison is expected", f"write one of {' '.join(OPERATORS)}"
        )
    scale, offset = _value(reader, number)
    kind, word, at = reader.next
    if kind != "end":
        raise reader.error(
            at,
            f"{word!r} after the end of the condition",
            "write one comparison per condition; give several conditions",
        )
    return Condition(" ".join(text.split()), number, sign, scale, offset)


def _value(reader: _Reader, number: Number) -> tuple[float, float]:
    """Scale of the baseline, and what is added."""
    kind, word, at = reader.next
    if kind != "name":
        sign = -1.0 if kind == "sign" and word == "-" else 1.0
        if sign < 0:
            reader.tokens.pop(0)
        value, unit = _amount(reader, number, relative=False)
        return 0.0, sign * value / (100 if unit else 1)
    if word != BASELINE:
        raise reader.error(
            at, f"{word!r} where a number or {BASELINE!r} is expected", nearest(word, [BASELINE])
        )
    reader.tokens.pop(0)
    kind, word, at = reader.next
    if kind == "end":
        return 1.0, 0.0
    if kind != "sign" or word not in "+-":
        raise reader.error(
            at, f"{word!r} where + or - is expected", f"write for example {BASELINE} - 1pt"
        )
    reader.tokens.pop(0)
    value, unit = _amount(reader, number, relative=True)
    value = value if word == "+" else -value
    return (1 + value / 100, 0.0) if unit == "%" else (1.0, value / 100 if unit else value)


def _amount(reader: _Reader, number: Number, *, relative: bool) -> tuple[float, str]:
    """A number and its unit; ``relative``: to the baseline, where a percentage always has a meaning."""
    at = reader.next[2]
    value = float(reader.take("number", "a number", "write for example 0.8, 80% or 1pt"))
    if math.isinf(value):
        raise reader.error(at, "this number is too large", "write for example 0.8, 80% or 1pt")
    kind, word, at = reader.next
    unit = "%" if (kind, word) == ("sign", "%") else word if kind == "name" else ""
    if not unit:
        return value, ""
    if unit not in ("pt", "%"):
        raise reader.error(
            at,
            f"unknown unit {unit!r}",
            "write pt (percentage points), % or nothing, and several conditions one by one",
        )
    if not number.share and not (unit == "%" and relative):
        raise reader.error(
            at,
            f"{number.name} is not a fraction, so {unit!r} has no meaning",
            f"leave it out, or write {BASELINE} + 5%",
        )
    reader.tokens.pop(0)
    return value, unit
