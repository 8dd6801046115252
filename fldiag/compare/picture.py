"""The picture of ``diff``: every difference with its interval, a row a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fldiag.compare import wording
from fldiag.plotting import style
from fldiag.plotting.tables import floats, need
from fldiag.results.numbers import numbers

PICTURE = "picture of diff"
#: Half intervals that the axis reaches at most; what lies farther out is an arrow at its end.
REACH = 6.0
#: Who is better -> colour, marker, filling, and what the legend says.
_LOOKS = {
    "A": ("#0072B2", "o", "#0072B2", "A is better"),
    "B": ("#D55E00", "s", "#D55E00", "B is better"),
    "undecided": ("#777777", "o", "white", "undecided, all numbers counted"),
    "same": ("#777777", "D", "#777777", "the same"),
}
_NAMES = {"lambda_1": "λ₁", "accuracy_gini": "accuracy, Gini", "ece": "ECE"}


def draw(table: pd.DataFrame) -> Figure:
    """A row a number, in units of half its interval, so that all share an axis: right of 0 A is better, whether more of the
    number is better or less. Colours say what is decided (by Holm's p, which counts all numbers). Beside it, where
    there is room, the difference itself. ``table``: what ``diff`` returns. Raises FldiagError for another table."""
    need(
        table,
        ("metric", "run", "baseline_run", "difference", "low", "high", "better", "note"),
        PICTURE,
    )
    rows = table.to_dict("records")
    intervals = np.stack([floats(table[c]) for c in ("low", "difference", "high")], 1)
    with style.paper():
        fig = style.figure(style.wide(), 0.85 + 0.24 * len(rows), layout="constrained")
        ax = fig.subplots()
        far = [
            _row(ax, row, ends, -place)
            for place, (row, ends) in enumerate(zip(rows, intervals, strict=True))
        ]
        reach = min(max([1.5, *far]), REACH + 1) * 1.05
        ax.axvline(0, color="black", linewidth=0.7, zorder=1)
        ax.set(
            xlim=(-reach, reach),
            ylim=(0.6 - len(rows), 0.6),
            xlabel="difference in half intervals\n← B is better      A is better →",
        )
        ax.set_yticks(
            [-place for place in range(len(rows))],
            [_NAMES.get(row["metric"], row["metric"].replace("_", " ")) for row in rows],
        )
        ax.tick_params(axis="y", length=0)
        ax.grid(True, axis="x")
        names = (
            style.plain(style.wrap(table[c].iloc[0], style.wide() / 2 - 0.4)[0])
            for c in ("run", "baseline_run")
        )
        fig.suptitle("A: {}    B: {}".format(*names), fontsize=7.5)
        looks = [look for who, look in _LOOKS.items() if who in {row["better"] for row in rows}]
        handles = [
            Line2D([], [], color=c, marker=m, markerfacecolor=f, markersize=4.5)
            for c, m, f, _ in looks
        ]
        style.legend(fig, handles, [text for *_, text in looks], handlelength=1.6)
    return fig


def _row(ax: Axes, row: Mapping[str, Any], interval: np.ndarray, y: float) -> float:
    """One number, ``interval``: low, difference and high; how far out it reaches, in half intervals."""
    room = style.wide() - style.TWO_COLUMNS / 2
    if room > 2:
        ax.text(
            1.02,
            y,
            wording.difference(row).replace("-", "−"),
            transform=ax.get_yaxis_transform(),
            va="center",
            fontsize=6.5,
        )
    if not np.isfinite(interval).all():
        why = style.wrap(row["note"] or "no interval", max(room, 1.7), size=6)[0]
        ax.text(
            0.5,
            y,
            why,
            transform=ax.get_yaxis_transform(),
            va="center",
            ha="center",
            fontsize=6,
            color="#555555",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
        return 0.0
    half = (interval[2] - interval[0]) / 2
    sign = 1.0 if numbers()[row["metric"]].better == "higher" else -1.0
    x = sign * interval / half if half > 0 else np.zeros(3)
    color, marker, fill, _ = _LOOKS[row["better"]]
    middle = float(x[1])
    if abs(middle) > REACH:
        ax.plot(np.sign(middle) * REACH, y, ">" if middle > 0 else "<", color=color, markersize=5.5)
        return REACH
    ax.plot(x[[0, 2]], [y, y], color=color, linewidth=1.2, zorder=2)
    ax.plot(middle, y, marker, color=color, markerfacecolor=fill, markersize=4.5, zorder=3)
    return float(np.abs(x).max())
