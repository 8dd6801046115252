"""Radii of basins: a dot a direction, their median and quartiles, and the way uphill, one row a model."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.tables import floats, names, need
from fldiag.results.select import number, only

PICTURE = "picture of basins"
TITLES = {"accuracy": "left by accuracy", "loss": "left by loss"}


def draw(table: pd.DataFrame) -> Figure:
    """A panel a criterion, on one logarithmic axis of radii.

    ``table``: rows ``radius``, ``most_case`` and ``worst_case`` with ``run, criterion, direction``. Raises FldiagError for a
    table without a radius.
    """
    need(table, ("metric", "run", "criterion", "direction", "value"), PICTURE)
    table = table.assign(run=names(table["run"]))
    radii = only(table, metric="radius").dropna(subset=["value"])
    if radii.empty:
        raise FldiagError("no direction leaves its basin", "look farther: --most", usage=True)
    runs, criteria = list(dict.fromkeys(radii["run"])), list(dict.fromkeys(radii["criterion"]))
    looks = style.looks(runs)
    low, high = float(radii["value"].min()), float(radii["value"].max())
    width = style.ONE_COLUMN * 1.2 if len(criteria) == 1 else style.TWO_COLUMNS
    with style.paper():
        fig, axes = style.panels(len(criteria), 0.85 + 0.5 * len(runs), 0.3, width=width, least=2.5, sharey=True)
        for ax, criterion in zip(axes, criteria, strict=True):
            for place, run in enumerate(runs):
                _row(ax, only(table, run=run, criterion=criterion), -place, looks[run])
            ax.set(title=TITLES[criterion], xscale="log", xlim=(low / 1.5, high * 1.5), ylim=(0.6 - len(runs), 0.6),
                   xlabel="radius (norms of the weights)")
            style.few_decades(ax.xaxis, low / 1.5, high * 1.5)
            ax.set_yticks([-p for p in range(len(runs))], [style.plain(style.shorten(r, 26)) for r in runs])
            ax.grid(True, axis="x")
        grey = "#555555"
        handles = [Line2D([], [], linestyle="", marker="o", color=grey, alpha=0.5, markersize=3),
                   Line2D([], [], color=grey, linewidth=2.2), Line2D([], [], linestyle="", marker="|", color=grey, markersize=9),
                   Line2D([], [], linestyle="", marker=">", color=grey, markerfacecolor="white", markersize=5),
                   Line2D([], [], linestyle="", marker="x", color=grey, markersize=5)]
        style.legend(fig, handles, ["a random direction", "quartiles", "median (most case)", "uphill", "worst case"],
                     loc="outside lower center", ncols=5 if len(criteria) > 1 else 3, handletextpad=0.4, columnspacing=1.2)
    return fig


def _row(ax: Axes, rows: pd.DataFrame, at: float, look: style.Look) -> None:
    random = np.sort(floats(only(rows, metric="radius", direction="random")["value"].dropna()))
    # spread evenly over a narrow band, each third one higher: no chance
    ax.plot(random, at + 0.13 + 0.07 * (np.arange(len(random)) % 3), "o", color=look.color, markersize=2.2, markeredgewidth=0,
            alpha=0.5)
    low, high = (number(rows, "most_case", column=c) for c in ("low", "high"))
    if low is not None and high is not None:
        ax.plot([low, high], [at, at], color=look.color, linewidth=2.2, solid_capstyle="butt")
    for value, marker, size, fill, below in ((number(rows, "most_case"), "|", 10, look.color, 0.0),
                                             (number(rows, "radius", direction="ascent"), ">", 5.5, "white", 0.0),
                                             (number(rows, "worst_case"), "x", 4, look.color, 0.17)):
        if value is not None:
            ax.plot(value, at - below, marker, color=look.color, markersize=size, markerfacecolor=fill)
