"""A partition: the label distribution per client as bubbles, and how far the clients are from alike.

The bubbles are the picture of Lee et al., "FedSOL" (CVPR 2024), figure 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.shapes import floats, names, need, percentiles

PICTURE = "partition chart"
_FILL: dict[str, Any] = {"color": "#0072B2", "alpha": 0.8}
#: The papers draw up to 100 clients.
CROWD = 100
#: Points²: no bubble is smaller, so that one example can be seen.
LEAST = 1.2


def draw_counts(table: pd.DataFrame, *, title: str = "") -> Figure:
    """Bubbles over clients (x) and classes (y); the area of a bubble is proportional to the count.

    ``table``: columns ``client``, ``class``, ``count``; with a column ``run`` of several labels, one panel a
    label, all on one scale of areas. Clients and classes that are numbers keep their place also when they hold
    nothing. Of more than ``CROWD`` clients: percentiles of the counts of each class. ``title``: of all panels.
    One column wide for up to 12 clients in one panel, else two. Raises FldiagError for missing columns, and for counts that are
    negative, missing or given twice.
    """
    need(table, ("client", "class", "count"), PICTURE)
    runs = names(table["run"]) if "run" in table.columns else ""
    table = table[["client", "class"]].assign(run=runs, count=floats(table["count"]))
    _check(table)
    is_crowd = table["client"].nunique() > CROWD
    table = _percentiles(table) if is_crowd else table
    clients, classes = _places(table["client"]), _places(table["class"])
    panels = list(table.groupby("run", sort=False))
    natural = len(panels) == 1 and len(clients) <= 12
    width = style.wide(style.ONE_COLUMN if natural else style.TWO_COLUMNS)
    across = min(len(panels), int(width / 2)) if len(clients) <= 15 and len(panels) <= 3 else 1
    cell = (width - 0.6) / across / (len(clients) + 1)  # inches a client
    tall = float(np.clip(len(classes) * min(max(cell, 0.11), 0.3), 0.7, 6.0))
    # The largest bubble fills its cell; where cells are tiny it may reach over its neighbours, which shine
    # through, for else the small ones could not be seen.
    step = 72 * min((width - 0.75) / across / len(clients), tall / len(classes))
    largest = float(table["count"].max())
    diameter = min(float(np.clip(9 / step, 0.98, 1.8)) * step, 22)
    area = diameter**2 / max(largest, 1e-300)  # points² a count, of the bounding square
    with style.paper():
        row = tall + (0.22 if len(panels) > 1 else 0.05)
        fig, axes = style.panels(
            len(panels), row, 1.05, across=across, width=width, sharex=True, sharey=True
        )
        for ax, (run, rows) in zip(axes, panels, strict=True):
            bubbles = rows[rows["count"] > 0]
            x, y = bubbles["client"].map(clients), bubbles["class"].map(classes)
            sizes = np.maximum(area * bubbles["count"], LEAST)
            ax.scatter(x, y, s=sizes, linewidths=0, **_FILL)
            _axes(ax, clients, classes, int(tall * 72 / 8))
            if len(panels) > 1:
                ax.set_title(style.plain(style.shorten(run, int(13 * width / across))))
            ax.set_xlabel("percentile of the clients, in each class" if is_crowd else "client")
            ax.set_ylabel("class")
            ax.label_outer()
        if largest > 0:
            _sizes(fig, largest, area)
        fig.suptitle(style.plain(title), fontsize=8)
    return fig


def _percentiles(table: pd.DataFrame) -> pd.DataFrame:
    """The table with percentiles in the place of clients."""
    parts = {
        run: percentiles(rows.pivot(index="client", columns="class", values="count").fillna(0))
        for run, rows in table.groupby("run", sort=False)
    }
    cells = pd.concat(parts, names=["run", "client"]).reset_index()
    return cells.melt(["run", "client"], var_name="class", value_name="count")


def _check(table: pd.DataFrame) -> None:
    bad = table[~(np.isfinite(table["count"]) & (table["count"] >= 0))]
    if len(bad):
        row = bad.iloc[0]
        raise FldiagError(
            f"client {row['client']} has count {row['count']} of class {row['class']}",
            "counts are numbers of examples, at least 0",
            usage=True,
        )
    for column in ("client", "class"):
        if table[column].isna().any():
            raise FldiagError(
                f"the table for the {PICTURE} has a row without a {column}",
                "fill it in",
                usage=True,
            )
    twice = table[table.duplicated(["run", "client", "class"])]
    if len(twice):
        row = twice.iloc[0]
        raise FldiagError(
            f"client {row['client']} has two counts of class {row['class']}",
            "add them up, or tell the partitions apart in a column 'run'",
            usage=True,
        )


def _places(column: pd.Series) -> dict[object, int]:
    """Where each client or class stands: numbers in order with the gaps between them, names as they come."""
    values = list(dict.fromkeys(column.tolist()))
    if not all(isinstance(v, (int, float)) and float(v).is_integer() for v in values):
        return {v: i for i, v in enumerate(values)}
    low, high = int(min(0, *values)) if len(values) > 1 else int(values[0]), int(max(values))
    if high - low + 1 <= 2 * len(values):
        return {v: v - low for v in range(low, high + 1)}
    return {v: i for i, v in enumerate(sorted(values))}  # few of many: else mostly gaps


def _axes(ax: Axes, clients: dict[object, int], classes: dict[object, int], lines: int) -> None:
    for axis, places, room in ((ax.xaxis, clients, 21), (ax.yaxis, classes, lines)):
        strides = (s * 10**power for power in range(9) for s in (1, 2, 5))
        stride = next(s for s in strides if len(places) <= s * room)
        ticks = {at: style.plain(style.shorten(v, 14)) for v, at in places.items()}
        labelled_ticks = [at for at in ticks if at % stride == 0]
        axis.set_ticks(labelled_ticks, [ticks[at] for at in labelled_ticks])
        axis.set_ticks(list(ticks), minor=True)
    if max(len(str(v)) for v in clients) > 4:
        ax.tick_params(axis="x", labelrotation=45)
    ax.tick_params(which="minor", length=0)
    ax.grid(True, which="both" if max(len(clients), len(classes)) <= 30 else "major")
    ax.set(xlim=(-0.7, len(clients) - 0.3), ylim=(-0.7, len(classes) - 0.3))


def _sizes(fig: Figure, largest: float, area: float) -> None:
    """A legend of bubbles: round counts, one not below the largest bubble, one near its third and one near its tenth."""
    unit = 10 ** np.floor(np.log10(largest))
    counts = [np.ceil(2 * largest / unit - 1e-9) * unit / 2]
    for share in (0.35, 0.1):
        unit = 10 ** np.floor(np.log10(largest * share))
        counts.append(max(d * unit for d in (1, 2, 5) if d * unit <= largest * share * (1 + 1e-9)))
    counts = sorted({float(count) for count in counts if count >= 1}) or [largest]
    point: dict[str, Any] = {**_FILL, "linestyle": "none", "marker": "o", "markeredgewidth": 0}
    bubbles = [Line2D([], [], **point, markersize=max(area * v, LEAST) ** 0.5) for v in counts]
    texts = [f"{v:,.0f}" if v >= 1 else style.number(v) for v in counts]
    texts[-1] += " examples"
    room = float(np.sqrt(area * counts[-1])) / 5.5  # the largest bubble covers no number
    fig.legend(
        bubbles,
        texts,
        handleheight=room,
        handlelength=room,
        loc="outside lower center",
        ncols=len(bubbles),
        handletextpad=0.4,
        columnspacing=1.0,
        borderpad=0.1,
        borderaxespad=0.3,
    )
