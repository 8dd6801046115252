"""What a person reads of a comparison: numbers with their units, and sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from fldiag.results.numbers import numbers
from fldiag.results.summary import is_missing, number
from fldiag.results.table import Row

COLUMNS = {
    "metric": "number",
    "a": "A",
    "b": "B",
    "difference": "A − B (95 % interval)",
    "better": "better",
    "p": "p",
    "p_holm": "p (Holm)",
    "estimator": "how",
    "n": "n",
    "note": "note",
}
CHECKED = {
    "condition": "fails if",
    "verdict": "verdict",
    "a": "A",
    "limit": "limit",
    "difference": "A − limit (95 % interval)",
    "p_holm": "p (Holm)",
    "estimator": "how",
    "n": "n",
    "note": "note",
}


def rows(frame: pd.DataFrame) -> list[Row]:
    """The rows of a comparison as a person reads them."""
    return [
        {
            **{c: row.get(c) or "" for c in ("condition", "verdict", "metric", "better", "note")},
            "estimator": "–" if row["estimator"] == "none" else row["estimator"],
            "n": row["n"] or "–",
            **{
                key: amount(row, column)
                for key, column in (("a", "value"), ("b", "baseline"), ("limit", "limit"))
            },
            "difference": difference(row),
            **{p: "–" if is_missing(row[p]) else f"{row[p]:.2g}" for p in ("p", "p_holm")},
        }
        for row in frame.to_dict("records")
    ]


def headings(columns: Mapping[str, str], level: float) -> dict[str, str]:
    """The headings, with the level of the intervals."""
    return {key: text.replace("95 %", f"{100 * level:g} %") for key, text in columns.items()}


def amount(row: Mapping[str, Any], column: str) -> str:
    """A number of the row, shares in percent."""
    if is_missing(row[column]):
        return "–"
    share = numbers()[row["metric"]].share
    return f"{number(100 * row[column], 3)} %" if share else number(row[column], 4)


def difference(row: Mapping[str, Any]) -> str:
    """The difference with its interval, shares in percentage points."""
    share = numbers()[row["metric"]].share
    factor, unit = (100, " pt") if share else (1, "")
    if is_missing(row["difference"]):
        return "–"
    ends = (
        ""
        if is_missing(row["low"])
        else f" ({_signed(factor * row['low'])} to {_signed(factor * row['high'])})"
    )
    return f"{_signed(factor * row['difference'])}{unit}{ends}"


def sentence(row: Mapping[str, Any]) -> str:
    """A row of a check in one sentence."""
    text = f"{row['verdict']}: {row['metric']} {amount(row, 'value')}, limit {amount(row, 'limit')}, difference {difference(row)}"
    how = "" if row["estimator"] == "none" else f"; {row['estimator']}, n = {row['n']}"
    return text + how + (f"; {row['note']}" if row["note"] else "")


def _signed(value: float) -> str:
    text = number(value, 3)
    return text if value < 0 or text == "0" else f"+{text}"
