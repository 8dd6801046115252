"""Label distribution per client: the bubble chart of class counts.

The picture of Lee et al., "FedSOL" (CVPR 2024), figure 2.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.tables import floats, names, need, percentiles

PICTURE = "partition chart"
_FILL, _ALPHA = "#0072B2", 0.8
#: The papers draw up to 100 clients.
CROWD = 100
#: Points²: no bubble is smaller, so that one example can be seen.
LEAST = 1.2


def draw(table: pd.DataFrame, *, title: str = "") -> Figure:
    """Bubbles over clients (x) and classes (y); the area of a bubble is proportional to the count.

    ``table``: columns ``client``, ``class``, ``count``; with a column ``run`` of several labels, one panel a
    label, all on one scale of areas. Clients and classes that are numbers keep their place also when they hold
    nothing. Of more than ``CROWD`` clients: percentiles of the counts of each class. ``title``: of all panels.
    One column wide
    for up to 12 clients in one panel, else two. Raises FldiagError for missing columns, and for counts that are negative,
    missing or given twice.
    """
    need(table, ("client", "class", "count"), PICTURE)
    runs = names(table["run"]) if "run" in table.columns else [""] * len(table)
    table = pd.DataFrame(
        {
            "run": runs,
            "client": table["client"].tolist(),
            "class": table["class"].tolist(),
            "count": floats(table["count"]),
        }
    )
    _check(table)
    crowd = table["client"].nunique() > CROWD
    table = _percentiles(table) if crowd else table
    clients, classes = _places(table["client"]), _places(table["class"])
    panels = list(table.groupby("run", sort=False))
    columns = len(panels) if len(clients) <= 15 and len(panels) <= 3 else 1
    width = style.wide(
        style.ONE_COLUMN if columns == 1 and len(clients) <= 12 else style.TWO_COLUMNS
    )
    columns = min(columns, max(int(width / 2), 1))
    rows = -(-len(panels) // columns)
    cell = (width - 0.6) / columns / (len(clients) + 1)  # inches a client
    tall = float(np.clip(len(classes) * min(max(cell, 0.11), 0.3), 0.7, 6.0))
    with style.paper():
        fig = style.figure(
            width,
            rows * (tall + (0.22 if len(panels) > 1 else 0.05)) + 0.95,
            layout=ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.04, hspace=0.02, wspace=0.02),
        )
        axes = fig.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        largest = float(table["count"].max())
        step = 72 * min((width - 0.75) / columns / len(clients), tall / len(classes))
        # The largest bubble fills its cell; where cells are tiny it may reach over its neighbours, which shine
        # through, for else the small ones could not be seen.
        reach = float(np.clip(9 / step, 0.98, 1.8))
        area = min(reach * step, 22) ** 2 / max(
            largest, 1e-300
        )  # points^2 a count, of the bounding square
        for ax, (run, part) in zip(axes.flat, panels, strict=False):
            bubbles = part[part["count"] > 0]
            ax.scatter(
                bubbles["client"].map(clients),
                bubbles["class"].map(classes),
                s=np.maximum(area * bubbles["count"], LEAST),
                color=_FILL,
                linewidths=0,
                alpha=_ALPHA,
            )
            _axes(ax, clients, classes, int(tall * 72 / 8))
            if len(panels) > 1:
                ax.set_title(style.plain(style.wrap(run, width / columns - 0.5, size=8.5)[0]))
        for ax in axes.flat[len(panels) :]:
            ax.remove()
        for ax in axes[-1]:
            ax.set_xlabel("percentile of the clients, in each class" if crowd else "client")
        for ax in axes[:, 0]:
            ax.set_ylabel("class")
        if largest > 0:
            _sizes(fig, largest, area)
        if title:
            fig.text(
                0.06,
                1 - 0.05 / fig.get_figheight(),
                "\n".join(style.wrap(title, width - 2.0, 2, 8)),
                fontsize=8,
                va="top",
            )
    return fig


def _percentiles(table: pd.DataFrame) -> pd.DataFrame:
    """The table with percentiles in the place of clients."""
    frames = []
    for run, part in table.groupby("run", sort=False):
        cells = percentiles(part.pivot(index="client", columns="class", values="count").fillna(0))
        long = (
            cells.rename_axis("client")
            .reset_index()
            .melt("client", var_name="class", value_name="count")
        )
        frames.append(long.assign(run=run))
    return pd.concat(frames)


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
    values = list(dict.fromkeys(column))
    if all(
        isinstance(v, int | np.integer) or (isinstance(v, float) and v.is_integer()) for v in values
    ):
        low, high = int(min(0, *values)) if len(values) > 1 else int(values[0]), int(max(values))
        if high - low + 1 <= 2 * len(
            values
        ):  # a sample of few clients out of many would be mostly gaps
            return {v: v - low for v in range(low, high + 1)}
        values = sorted(values)
    return {v: i for i, v in enumerate(values)}


def _axes(ax, clients: dict[object, int], classes: dict[object, int], lines: int) -> None:
    for axis, places, room in ((ax.xaxis, clients, 21), (ax.yaxis, classes, lines)):
        stride = next(
            s
            for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000, 10**9)
            if len(places) <= s * room
        )
        ticks = [(at, value) for value, at in places.items() if at % stride == 0]
        axis.set_ticks(
            [at for at, _ in ticks], [style.plain(style.shorten(v, 14)) for _, v in ticks]
        )
        axis.set_ticks(list(places.values()), minor=True)
    if max(len(str(v)) for v in clients) > 4:
        ax.tick_params(axis="x", labelrotation=45)
    ax.tick_params(which="minor", length=0)
    ax.grid(True, which="both" if max(len(clients), len(classes)) <= 30 else "major")
    ax.set(xlim=(-0.7, len(clients) - 0.3), ylim=(-0.7, len(classes) - 0.3))


def _sizes(fig: Figure, largest: float, area: float) -> None:
    """A legend of bubbles: round counts, one not below the largest bubble, one near its third and one near its tenth."""
    counts = []
    for share in (0.1, 0.35, 1.0):
        unit = 10 ** np.floor(np.log10(largest * share))
        value = (
            np.ceil(2 * largest / unit - 1e-9) * unit / 2
            if share == 1
            else max(d * unit for d in (1, 2, 5) if d * unit <= largest * share * (1 + 1e-9))
        )
        if value >= 1 and value not in counts:
            counts.append(float(value))
    handles = [
        Line2D(
            [],
            [],
            linestyle="none",
            marker="o",
            color=_FILL,
            alpha=_ALPHA,
            markeredgewidth=0,
            markersize=np.sqrt(max(area * v, LEAST)),
        )
        for v in counts or [largest]
    ]
    room = (
        float(np.sqrt(area * max(counts or [largest]))) / 5.5
    )  # the largest bubble covers neither title nor numbers
    style.legend(
        fig,
        handles,
        [f"{v:,.0f}" if v >= 1 else style.number(v) for v in counts or [largest]],
        handleheight=room,
        handlelength=room,
        loc="outside upper right",
        ncols=len(handles),
        title="examples (area)",
        alignment="right",
        borderpad=0.1,
        borderaxespad=0.3,
        handletextpad=0.4,
        columnspacing=1.2,
    )
