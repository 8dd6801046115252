"""Lines over rounds with bands: the shape that pictures of runs share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from fldiag.plotting import style
from fldiag.plotting.tables import floats

Band = tuple[np.ndarray, np.ndarray]


def line(ax: Axes, rows: pd.DataFrame, look: style.Look, band: Band | None) -> None:
    """The values of a table indexed by round, with a band (low, high). A round that is not there is a gap."""
    points = pd.DataFrame({"value": floats(rows["value"])}, index=rows.index.astype(float))
    if band is not None:
        points["low"], points["high"] = band
    rounds = points.index
    if len(rounds) > 1 and np.diff(rounds).min() == 1:
        points = points.reindex(np.arange(rounds.min(), rounds.max() + 1))
    if band is not None:
        low, high = points["low"], points["high"]
        ax.fill_between(points.index, low, high, color=look.color, alpha=0.15, linewidth=0)
    ax.plot(points.index, points["value"], markevery=max(len(points) // 8, 1), **look.line)


def mean_line(ax: Axes, rows: pd.DataFrame, look: style.Look, is_banded: bool = True) -> None:
    """The rows' values over their rounds, with a band of one standard error where it is known."""
    rows = rows.dropna(subset=["round", "value"]).set_index("round").sort_index()
    value, error = floats(rows["value"]), floats(rows["stderr"])
    is_banded &= bool(np.isfinite(error).any())
    line(ax, rows, look, (value - error, value + error) if is_banded else None)


def lines(
    ax: Axes,
    tables: Mapping[str, pd.DataFrame],
    ylabel: str,
    looks: Mapping[str, style.Look] | None = None,
) -> None:
    """A ``mean_line`` for each table over the rounds, with bands where there are at most three; with a legend of its own where
    no ``looks`` are given that several panels share."""
    palette = looks or style.looks(tables)
    for name, rows in tables.items():
        mean_line(ax, rows, palette[name], len(tables) <= 3)
    rounds_axis(ax)
    ax.set_ylabel(ylabel)
    ax.grid(True)
    if looks is None and len(tables) > 1:
        legend_below(ax, palette, 1 if max(map(len, palette)) > 12 else 2)


def dots(ax: Axes, rows: pd.DataFrame, color: str) -> None:
    """A faint dot for every row: the clients of each round, under their mean."""
    rows = rows.dropna(subset=["round", "value"])
    ax.plot(
        floats(rows["round"]), floats(rows["value"]), ".", ms=3, color=color, alpha=0.4, zorder=1
    )


def wide_range(ax: Axes, values: np.ndarray) -> None:
    """A logarithmic axis where positive values spread over more than a factor of 30."""
    if len(values) and values.min() > 0 and values.max() > 30 * values.min():
        ax.set_yscale("log")


def barrier(
    ax: Axes, values: np.ndarray, at: float | None, height: float | None, look: style.Look
) -> None:
    """Dotted at a place of [0, 1] from the straight line between the ends up to the curve, where there is a barrier."""
    if at is None or height is None or not 0 < height < np.inf:
        return
    ends = (1 - at) * values[0] + at * values[-1]
    dots = (0, (1, 1))
    ax.plot([at, at], [ends, ends + height], color=look.color, linewidth=0.8, linestyle=dots)
    ax.plot(at, ends + height, label="barrier", **{**look.point, "markersize": 3.6})


def rounds_axis(ax: Axes) -> None:
    """Whole rounds along the axis; one alone in the middle."""
    rounds = np.concatenate([[], *(v.get_xdata() for v in ax.lines if v.get_marker() != "None")])
    if len(rounds) and np.ptp(rounds) == 0:
        ax.set_xlim(rounds[0] - 1, rounds[0] + 1)
        ax.set_xticks(rounds[:1])
    else:
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    ax.set_xlabel("round")


def legend_below(ax: Axes, looks: Mapping[str, style.Look], ncols: int = 1) -> None:
    """A panel's own legend, below the name of its x-axis."""
    below = ax.transAxes + ScaledTranslation(0, -0.36, ax.figure.dpi_scale_trans)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": below}
    style.legend(ax, _keys(looks), list(looks), handlelength=2.6, ncols=ncols, **place)


def legend_of_runs(fig: Figure, looks: Mapping[str, style.Look]) -> None:
    """The figure's legend: a line a run."""
    style.legend(fig, _keys(looks), list(looks), ncols=3, handlelength=2.6)


def _keys(looks: Mapping[str, style.Look]) -> list[Line2D]:
    return [Line2D([], [], **look.line) for look in looks.values()]
