"""What a person reads of a comparison: numbers with their units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from fldiag.results.numbers import numbers
from fldiag.results.summary import is_missing, number
from fldiag.results.table import Row

COLUMNS = {
    "condition": "fails if",
    "verdict": "verdict",
    "metric": "number",
    "value": "A",
    "baseline": "B",
    "difference": "difference (interval)",
    "better": "better",
    "p_holm": "p (Holm)",
    "estimator": "how",
    "n": "n",
    "note": "note",
}


def rows(frame: pd.DataFrame) -> list[Row]:
    """The rows of a comparison as a person reads them."""
    texts = []
    for row in frame.to_dict("records"):
        cells = {key: amount(row, key) for key in ("value", "baseline")}
        cells |= {"difference": difference(row), "p_holm": number(row["p_holm"], 2)}
        cells = {**row, **cells}
        texts.append({text: cells[key] for key, text in COLUMNS.items() if key in cells})
    return texts


def amount(row: Mapping[str, Any], column: str, unit: str = " %") -> str:
    """A number of the row, a share in percent."""
    factor, unit = (100, unit) if numbers()[row["metric"]].share else (1, "")
    return "–" if is_missing(row[column]) else number(factor * row[column], 4) + unit


def difference(row: Mapping[str, Any]) -> str:
    """The difference with its interval, of shares in percentage points."""
    value, low, high = (amount(row, c, " pt") for c in ("difference", "low", "high"))
    return value if is_missing(row["low"]) else f"{value} ({low} to {high})"
