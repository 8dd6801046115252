"""What a person reads first of a result table: small tables, sentences and remarks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fldiag.results import select
from fldiag.results.table import Row


@dataclass(frozen=True)
class Small:
    """A small table. ``columns``: key of the rows -> heading. Nothing is shown of one without rows."""

    rows: Sequence[Row]
    columns: Mapping[str, str]


@dataclass(frozen=True)
class Say:
    """A sentence that belongs to the answer. ``about``: as of ``Note``, beside the rows."""

    text: str
    about: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Note:
    """A remark beside the answer: what was left out, or how far a number can be trusted.

    ``about``: rows that a machine reads under this key instead (the remark may shorten them)."""

    text: str
    about: Mapping[str, Any] | None = None


Item = Small | Say | Note


def number(value: float | None, digits: int = 4) -> str:
    """A number for reading: ``digits`` significant digits, ``1.2×10⁵`` rather than ``1.2e+05``, – for none."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text.replace("-", "−")
    mantissa, exponent = text.split("e")
    small = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa.replace('-', '−')}×10{small}"


def is_missing(value: Any) -> bool:
    """None, NaN, or the missing entry of a table (pandas' NA, which is neither equal nor unequal to itself)."""
    return value is None or value is pd.NA or bool(value != value)


def cell(value: Any) -> str:
    """An entry of a table for reading: – where it is missing, yes or no, a number, or the text."""
    if is_missing(value):
        return "–"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    return number(float(value)) if isinstance(value, (float, np.floating)) else str(value)


def of_rounds(frame: pd.DataFrame, columns: Mapping[str, Mapping[str, Any]]) -> Small:
    """The numbers of some rounds, a column by what its rows have in common; columns without a number are left out."""
    small = pd.DataFrame({"round": select.spread(select.rounds(frame), 12)})
    for name, where in columns.items():
        where = {**select.WHOLE, **where}
        small[name] = [select.number(frame, **where, round=r) for r in small["round"]]
    small = small.dropna(axis="columns", how="all")
    values = small.astype(object).where(small.notna(), None)
    return Small(values.to_dict("records"), {name: name for name in small})


def missing_notes(table: pd.DataFrame, most: int = 8) -> list[Note]:
    """A remark for each row ``missing`` of a table, and one that counts those beyond ``most``."""
    rows = select.only(table, metric="missing")
    texts = [
        f"{'' if pd.isna(r) else f'round {r}: '}{note}"
        for r, note in zip(rows["round"], rows.get("note", []), strict=False)
    ]
    notes = [Note(text) for text in texts[:most]]
    if len(texts) > most:
        notes.append(Note(f"and {len(texts) - most} more (rows metric = missing of the table)"))
    return notes


def percent(value: float | None, digits: int = 3) -> str:
    """A share in percent, – for none."""
    return "–" if is_missing(value) else f"{number(100 * float(value or 0), digits)} %"


def plus_minus(value: Any, error: Any, share: bool = False) -> str:
    """``12.3 ± 0.4``, in percent with ``share``; no more digits than the error leaves certain."""
    if is_missing(value):
        return "–"
    scale, end = (100, " %") if share else (1, "")
    amount, error = scale * float(value), math.nan if is_missing(error) else scale * float(error)
    tail = "" if math.isnan(error) else f" ± {number(error, 2)}"
    if 0 < error < math.inf and math.isfinite(amount):
        amount = round(amount, 1 - math.floor(math.log10(error)))
    return f"{number(amount, 4)}{tail}{end}"
