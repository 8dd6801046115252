"""Reported against measured numbers in one picture: those measured like for like in colour, the others grey."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fldiag.plotting import style, words
from fldiag_papers import agreement, pictures

#: What numbers rest on -> what the legend calls it.
NAMES = {
    "trained": "trained under the paper's protocol",
    "cost": "cost, counted",
    "data": "size of a data set",
    "arithmetic": "worked out from the paper's other numbers",
}
OTHERWISE = "reduced protocol, other data or model"
GREY = "#b8b8b8"
#: Factor from which on a name stands beside a point.
FAR = 1.2
#: Metrics in percent or in points of it, on linear axes; all others share the logarithmic ones.
PERCENT = (
    "accuracy",
    "personal_accuracy",
    "personal_accuracy_std",
    "accuracy_change",
    "accuracy_gain",
    "MFLOPs_saved",
    "params_M_saved",
    "rounds_saved",
)


def draw(ledger: pd.DataFrame) -> Figure:
    """``ledger``: the ledger. One point a number; bars of one standard deviation, as printed and over the seeds, or over the last
    rounds of the only run."""
    numbers = ledger[
        (ledger["kind"] == "number") & ledger["reported"].notna() & ledger["measured"].notna()
    ]
    percent = numbers["metric"].isin(PERCENT)
    spans = numbers[~percent & (numbers["reported"] > 0) & (numbers["measured"] > 0)]
    with style.paper():
        fig, (left, right) = style.panels(2, 4.0, across=2, least=2.6)
        _panel(left, spans, "costs, rounds, curvature, examples", log=True)
        _panel(right, numbers[percent], "accuracy and savings [%]", log=False)
        bases = [basis for basis in NAMES if basis in set(_alike(numbers)["basis"])]
        grey = (
            [Line2D([], [], linestyle="none", marker=".", color=GREY)]
            if len(_alike(numbers)) < len(numbers)
            else []
        )
        keys = [
            Line2D(
                [], [], linestyle="none", marker=_look(b).marker, color=_look(b).color, markersize=4
            )
            for b in bases
        ]
        keys, texts = keys + grey, [NAMES[b] for b in bases] + [OTHERWISE] * len(grey)
        if keys:
            style.legend(fig, keys, texts, loc="outside lower center", ncols=len(texts))
    return fig


def _alike(numbers: pd.DataFrame) -> pd.DataFrame:
    return numbers[~numbers["agrees"].isin(agreement.UNLIKE)]


def _look(basis: str) -> style.Look:
    return style.look(1 + list(NAMES).index(basis))


def _panel(ax: Axes, rows: pd.DataFrame, title: str, *, log: bool) -> None:
    if log:
        ax.set_xscale("log")
        ax.set_yscale("log")
    alike = _alike(rows)
    other = rows.drop(alike.index)
    _points(ax, other, marker=".", color=GREY, markersize=3, elinewidth=0.3, capsize=0, zorder=2)
    for number, (basis, part) in enumerate(alike.groupby("basis")):
        look = _look(str(basis))
        _points(
            ax,
            part,
            marker=look.marker,
            color=look.color,
            markersize=4,
            elinewidth=0.6,
            capsize=1.5,
            zorder=4 + number,
        )
    if log:
        _annotate_outliers(ax, alike)
    values = rows[["reported", "measured"]].to_numpy(float)
    if len(values):
        ends = np.array([values.min(), values.max()])
        ax.plot(ends, ends, color="black", linewidth=0.6, zorder=1)
    ax.set_title(style.plain(title))
    ax.set_xlabel("reported in the paper")
    ax.set_ylabel("measured here")
    ax.set_box_aspect(1)


def _annotate_outliers(ax: Axes, alike: pd.DataFrame) -> None:
    """Names beside those that are far off: once where a metric of a table has several."""
    off = alike[(np.log(alike["measured"] / alike["reported"])).abs() > np.log(FAR)]
    for (source, metric), part in off.groupby(["source", "metric"], sort=False):
        names = [words.method(str(name)) for name in part["method"].unique()]
        text = f"{names[0] + ', ' if len(names) == 1 else ''}{source.split(' = ')[0]}: {pictures.words(str(metric))}"
        last = part.loc[part["reported"].idxmax()]
        above = last["measured"] > last["reported"]  # the text stands away from the diagonal
        ax.annotate(
            "\n".join(style.wrap(text, 0.75 if above else 1.1, 3, 6)),
            (last["reported"], last["measured"]),
            fontsize=6,
            xytext=(-5, 2) if above else (5, -2),
            textcoords="offset points",
            ha="right" if above else "left",
            va="bottom" if above else "top",
        )


def _points(ax: Axes, rows: pd.DataFrame, **look: Any) -> None:
    if len(rows):
        spread = rows["measured_std"].fillna(rows["last_rounds_std"])
        x, y, up, across = (
            rows.assign(up=spread)[["reported", "measured", "up", "reported_std"]]
            .fillna(0)
            .to_numpy(float)
            .T
        )
        ax.errorbar(x, y, up, across, linestyle="none", **look)
