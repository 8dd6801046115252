"""The shapes that pictures share, lines over rounds, cells in colour and bars by name, and what they ask of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fldiag.plotting import style

if TYPE_CHECKING:  # as in ``style``
    from matplotlib.axes import Axes

#: With more clients than this, pictures show how a number is spread over them instead of one place a client.
MANY = 50

# Tables


def floats(column: pd.Series) -> np.ndarray:
    """A column as float64, missing values as nan."""
    return column.astype(float).to_numpy()


def pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """The value of every pair ``client``, ``client_b`` in both halves of a square table; nan for one with itself."""
    rows = rows.astype({"client": int, "client_b": int, "value": float})
    wide = rows.pivot(index="client", columns="client_b", values="value")
    upper, lower = wide.align(wide.T)
    return upper.fillna(lower)


def compares_runs(draw: Any) -> Any:
    """Decorator of a drawing function: of a table with several runs it draws them together, told apart by ``run``."""
    draw.compares_runs = True
    return draw


# Shapes


def lines(
    ax: Axes,
    tables: Mapping[str, pd.DataFrame],
    looks: Mapping[str, style.Look] | None = None,
) -> None:
    """The values of each table over its rounds, with a band of one standard error where it is known and there are at most four
    tables. A round that is not there is a gap.

    Args:
        ax: the panel.
        tables: name of a line -> its rows.
        looks: name -> look, where the figure has one legend for all panels; else several lines get a legend below the panel.
    """
    from matplotlib.ticker import MaxNLocator

    palette, handles = looks or style.looks(tables), list[Any]()
    for name, rows in tables.items():
        points = rows.dropna(subset=["round", "value"])
        points = points.astype({"round": int, "value": float, "stderr": float})
        points = points.set_index("round").sort_index()
        if 1 in np.diff(points.index):
            points = points.reindex(range(points.index[0], points.index[-1] + 1))
        value, error, look = points["value"], points["stderr"], palette[name]
        if len(tables) <= 4:
            band = value - error, value + error
            ax.fill_between(points.index, *band, color=look.color, alpha=0.15, linewidth=0)
        handles += ax.plot(points.index, value, markevery=max(len(points) // 8, 1), **look.line)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    ax.set_xlabel("round")
    ax.grid(True)
    if looks is None and len(tables) > 1:
        ax.legend(
            handles,
            map(style.plain, tables),
            ncols=1 if max(map(len, tables)) > 12 else 2,
            loc="upper center",
            bbox_to_anchor=(0.5, 0),
            borderaxespad=4.0,
        )


def dots(ax: Axes, rows: pd.DataFrame, color: str) -> None:
    """A faint dot for every row: the clients of each round, under their mean."""
    ax.plot(
        floats(rows["round"]), floats(rows["value"]), ".", ms=3, color=color, alpha=0.4, zorder=1
    )


def wide_range(ax: Axes, values: np.ndarray) -> None:
    """A logarithmic axis where positive values spread over more than a factor of 30."""
    if len(values) and 0 < 30 * values.min() < values.max():
        ax.set_yscale("log")


def cells(ax: Axes, wide: pd.DataFrame, **options: Any) -> None:
    """A heatmap with the table's index and columns at the axes; what is not there is blank.

    ``options``: of ``seaborn.heatmap``.
    """
    import seaborn  # a second, which a table from the store does not need

    options = {"cmap": style.COLORMAP, "cbar_kws": {"pad": 0.02}, **options}
    seaborn.heatmap(wide.astype(float), ax=ax, **options)
    ax.tick_params(length=0)
    ax.tick_params(axis="y", rotation=0)


def bars(
    ax: Axes,
    table: pd.DataFrame,
    looks: Mapping[str, style.Look],
    category: str = "layer",
) -> None:
    """Bars from the left by ``category``, the first on top, side by side for every run, each with its standard error."""
    order = list(dict.fromkeys(table[category]))
    value, errors = (
        table.astype({column: float})
        .pivot(index=category, columns="run", values=column)
        .reindex(index=order, columns=looks)
        for column in ("value", "stderr")
    )
    errors = errors.where(errors > 5e-3 * value.abs().max(axis=None))  # others are specks
    colors = [look.color for look in looks.values()]
    marks = {"elinewidth": 0.7, "ecolor": "#888888"}
    value.plot.barh(ax=ax, xerr=errors, color=colors, width=0.8, legend=False, error_kw=marks)
    names_down(ax, order)
    ax.axvline(0, color="black", linewidth=0.5)
    ax.grid(True, axis="x")


def names_down(ax: Axes, names: Sequence[str], width: int = 24) -> None:
    """A name a row, the first on top."""
    ax.set_yticks(range(len(names)), [style.plain(style.shorten(name, width)) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_ylabel("")
