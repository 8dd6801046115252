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
    "a": "A",
    "b": "B",
    "limit": "limit",
    "difference": "difference (interval)",
    "better": "better",
    "p": "p (Holm)",
    "estimator": "how",
    "n": "n",
    "note": "note",
}


def rows(frame: pd.DataFrame) -> list[Row]:
    """The rows of a comparison as a person reads them."""
    return [
        {
            **{key: row.get(key, "") for key in COLUMNS},
            "a": amount(row, "value"),
            "b": amount(row, "baseline"),
            "limit": amount(row, "limit") if "condition" in row else "",
            "difference": difference(row),
            "p": "–" if is_missing(row["p_holm"]) else f"{row['p_holm']:.2g}",
        }
        for row in frame.to_dict("records")
    ]


def amount(row: Mapping[str, Any], column: str, unit: str = " %") -> str:
    """A number of the row, a share in percent."""
    factor, unit = (100, unit) if numbers()[row["metric"]].share else (1, "")
    return "–" if is_missing(row[column]) else number(factor * row[column], 4) + unit


def difference(row: Mapping[str, Any]) -> str:
    """The difference with its interval, of shares in percentage points."""
    value, low, high = (amount(row, c, " pt") for c in ("difference", "low", "high"))
    return value if is_missing(row["low"]) else f"{value} ({low} to {high})"
