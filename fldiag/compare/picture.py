"""What a person sees of a comparison: its rows with their units, and the picture of ``diff``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fldiag.plotting import style
from fldiag.plotting.style import floats, names_down
from fldiag.results.numbers import numbers
from fldiag.results.table import Row, format_number, is_missing

if TYPE_CHECKING:  # half a second, which the rows do not need
    from matplotlib.figure import Figure

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
#: Half intervals that the axis reaches at most: what lies farther out stands at its end.
REACH = 6.0
#: Who is better -> colour and marker.
LOOKS = {
    "A": ("#0072B2", "o"),
    "B": ("#D55E00", "s"),
    "undecided": ("#777777", "x"),
    "same": ("#777777", "D"),
}


def draw(table: pd.DataFrame) -> Figure:
    """A row a number, in units of half its interval: right of 0 A is better, whether more of the number is better or less.

    Args:
        table: What ``diff`` returns.

    Returns:
        The figure. Colours say what is decided, by Holm's p over all numbers.

    Raises:
        FldiagError: Another table.
    """
    low, middle, high = (floats(table[c]) for c in ("low", "difference", "high"))
    sign = [1 if numbers()[name].better == "higher" else -1 for name in table["metric"]]
    with style.paper(), np.errstate(invalid="ignore", divide="ignore"):
        fig = style.figure(style.wide(), 0.9 + 0.24 * len(table), layout="constrained")
        ax = fig.subplots()
        x = np.clip(sign * middle * 2 / (high - low), -REACH, REACH)
        handles: dict[str, Any] = {}
        for better, (color, marker) in LOOKS.items():
            y = np.flatnonzero(table["better"] == better)
            if len(y):
                handles[better] = ax.errorbar(x[y], y, xerr=1, fmt=marker, color=color)
        ax.axvline(0, color="black", linewidth=0.7, zorder=1)
        ax.set_xlim(-REACH - 1, REACH + 1)
        ax.set_xlabel("difference in half intervals\n← B is better      A is better →")
        texts = table["metric"].str.replace("lambda_1", "λ₁").str.replace("_", " ")
        names_down(ax, list(texts), 60)
        ax.grid(True, axis="x")
        names = (style.plain(style.shorten(table[c].iloc[0], 40)) for c in ("run", "baseline_run"))
        fig.suptitle("A: {}\nB: {}".format(*names), fontsize=7.5)
        style.legend(fig, list(handles.values()), handles, title="better")
    return fig


def rows(frame: pd.DataFrame) -> list[Row]:
    """The rows of a comparison as a person reads them."""
    texts = []
    for row in frame.to_dict("records"):
        cells = {**row, "difference": difference(row), "p_holm": format_number(row["p_holm"], 2)}
        cells |= {key: amount(row, key) for key in ("value", "baseline")}
        texts.append({text: cells[key] for key, text in COLUMNS.items() if key in cells})
    return texts


def amount(row: Mapping[str, Any], column: str, unit: str = " %") -> str:
    """A number of the row, a share in percent."""
    factor, unit = (100, unit) if numbers()[row["metric"]].share else (1, "")
    return "–" if is_missing(row[column]) else format_number(factor * row[column], 4) + unit


def difference(row: Mapping[str, Any]) -> str:
    """The difference with its interval, of shares in percentage points."""
    value, low, high = (amount(row, c, " pt") for c in ("difference", "low", "high"))
    return value if is_missing(row["low"]) else f"{value} ({low} to {high})"
