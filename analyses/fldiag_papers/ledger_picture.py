"""Reported against measured numbers in one picture: those measured like for like in colour, the others grey."""

from __future__ import annotations

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
    """One point a number of the ledger; bars of one standard deviation, as printed and over the seeds, or over the last rounds of
    the only run."""
    numbers = ledger[
        (ledger["kind"] == "number") & ledger["reported"].notna() & ledger["measured"].notna()
    ]
    is_alike = ~numbers["agrees"].isin(agreement.UNLIKE)
    numbers = numbers.assign(look=numbers["basis"].where(is_alike, OTHERWISE))
    is_percent = numbers["metric"].isin(PERCENT)
    is_positive = (numbers["reported"] > 0) & (numbers["measured"] > 0)
    looks = {basis: style.look(1 + place) for place, basis in enumerate(NAMES)}
    looks[OTHERWISE] = style.Look(GREY, ".", "-")
    looks = {name: look for name, look in looks.items() if (numbers["look"] == name).any()}
    with style.paper():
        fig, (left, right) = style.panels(2, 4.0, across=2, least=2.6)
        left.set(xscale="log", yscale="log")
        for ax, rows, title in (
            (left, numbers[~is_percent & is_positive], "costs, rounds, curvature, examples"),
            (right, numbers[is_percent], "accuracy and savings [%]"),
        ):
            for place, (name, look) in enumerate(looks.items()):
                _points(ax, rows[rows["look"] == name], look, 2 if name == OTHERWISE else 4 + place)
            if len(values := rows[["reported", "measured"]].to_numpy(float)):
                ends = [values.min(), values.max()]
                ax.plot(ends, ends, color="black", linewidth=0.6, zorder=1)
            ax.set_title(style.plain(title))
            ax.set_xlabel("reported in the paper")
            ax.set_ylabel("measured here")
            ax.set_box_aspect(1)
        _annotate_outliers(left, numbers[~is_percent & is_positive & is_alike])
        handles = [
            Line2D([], [], linestyle="none", marker=look.marker, color=look.color, markersize=4)
            for look in looks.values()
        ]
        texts = [NAMES.get(name, name) for name in looks]
        if texts:
            style.legend(fig, handles, texts, loc="outside lower center", ncols=len(texts))
    return fig


def _points(ax: Axes, rows: pd.DataFrame, look: style.Look, zorder: int) -> None:
    spread = rows["measured_std"].fillna(rows["last_rounds_std"])
    is_faint = look.color == GREY
    ax.errorbar(
        rows["reported"].astype(float),
        rows["measured"].astype(float),
        spread.fillna(0).astype(float),
        rows["reported_std"].fillna(0).astype(float),
        linestyle="none",
        marker=look.marker,
        color=look.color,
        markersize=3 if is_faint else 4,
        elinewidth=0.3 if is_faint else 0.6,
        capsize=0 if is_faint else 1.5,
        zorder=zorder,
    )


def _annotate_outliers(ax: Axes, alike: pd.DataFrame) -> None:
    """Names beside those that are far off: once where a metric of a table has several."""
    ratio = (alike["measured"] / alike["reported"]).astype(float)
    off = alike[np.log(ratio).abs() > np.log(FAR)]
    for (source, metric), part in off.groupby(["source", "metric"], sort=False):
        names = [words.method(str(name)) for name in part["method"].unique()]
        text = f"{names[0] + ', ' if len(names) == 1 else ''}{source.split(' = ')[0]}: {pictures.words(str(metric))}"
        last = part.loc[part["reported"].idxmax()]
        above = last["measured"] > last["reported"]  # the text stands away from the diagonal
        room, lines = (1.1, 3) if above else (1.5, 2)  # the axis is near on the left
        ax.annotate(
            "\n".join(style.wrap(text, room, lines, 6)),
            (last["reported"], last["measured"]),
            fontsize=6,
            xytext=(-5, 2) if above else (5, -2),
            textcoords="offset points",
            ha="right" if above else "left",
            va="bottom" if above else "top",
        )
