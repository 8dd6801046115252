"""Lines over rounds with bands: the shape that pictures of runs share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fldiag.plotting import style
from fldiag.plotting.tables import floats

Band = tuple[np.ndarray, np.ndarray]


def line(ax: Axes, rows: pd.DataFrame, look: style.Look, band: Band | None) -> None:
    """The values of a table indexed by round, with a band (low, high). A round that is not there is a gap."""
    rounds, values = rows.index.to_numpy(float), floats(rows["value"])
    x = (
        np.arange(rounds.min(), rounds.max() + 1)
        if len(rounds) > 1 and np.diff(rounds).min() == 1
        else rounds
    )

    def spread(v: np.ndarray) -> np.ndarray:
        value_of = dict(zip(rounds, v, strict=True))
        return np.array([value_of.get(r, np.nan) for r in x])

    if band is not None:
        low, high = map(spread, band)
        ax.fill_between(x, low, high, color=look.color, alpha=0.15, linewidth=0)
    ax.plot(
        x,
        spread(values),
        color=look.color,
        linestyle=look.dash,
        marker=look.marker,
        markersize=3.4,
        markevery=max(len(x) // 8, 1),
        markeredgecolor="white",
        markeredgewidth=0.4,
    )


def key(look: style.Look) -> Line2D:
    """What a legend shows of such a line."""
    return Line2D(
        [],
        [],
        color=look.color,
        linestyle=look.dash,
        marker=look.marker,
        markersize=3.4,
        markeredgecolor="white",
        markeredgewidth=0.4,
    )


def rounds_axis(ax: Axes) -> None:
    """Whole rounds along the axis; one alone in the middle."""
    rounds = {
        x
        for artist in ax.get_lines()
        for x in np.asarray(artist.get_xdata(), dtype=float)
        if artist.get_marker() != "None"
    }
    if len(rounds) == 1:
        (single,) = rounds
        ax.set_xlim(single - 1, single + 1)
        ax.set_xticks([single], [f"{single:g}"])
    else:
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    ax.set_xlabel("round")


def legend_below(ax: Axes, keys: Sequence[tuple[Line2D, str]], ncols: int = 1) -> None:
    """A panel's own legend, below it."""
    if keys:
        style.legend(
            ax,
            [k for k, _ in keys],
            [t for _, t in keys],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.22),
            ncols=ncols,
            handlelength=2.6,
            borderpad=0.1,
            labelspacing=0.3,
        )


def legend_of_runs(fig, looks: dict[str, style.Look]) -> None:
    """The figure's legend: a line a run."""
    texts = [style.wrap(r, style.wide() - 0.6)[0] for r in looks]
    keys = [key(look) for look in looks.values()]
    style.legend(fig, keys, texts, loc="outside lower center", ncols=3, handlelength=2.6)
