"""Other pictures that several studies share: numbers over a setting, and learning curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fldiag.errors import FldiagError
from fldiag.plotting import curves, style, words
from fldiag.results.select import only
from fldiag_papers.caption import LAST
from fldiag_papers.gather import KEYS
from fldiag_papers.pictures import parse, trained_on

FAINT = "#bbbbbb"


def lines(
    table: pd.DataFrame,
    x: str,
    metrics: Mapping[str, str],
    *,
    by: str = "label",
    xlabel: str = "",
    log: bool = False,
    sharey: bool = False,
) -> Figure:
    """Mean and standard deviation (bars, over seeds) of metrics over a column of the table; a panel each, a line a label.

    ``metrics``: name -> text of the axis. ``x``: a column, or a key of the setting. Rows without it are drawn as a
    horizontal line. Raises FldiagError for a metric without rows."""
    table = (
        table
        if x in table.columns
        else table.assign(**{x: [_number(parse(s).get(x)) for s in table["setting"]]})
    )
    names = list(dict.fromkeys(table[by].dropna()))
    looks = style.looks(names)
    with style.paper():
        fig, axes = style.panels(
            len(metrics),
            2.5,
            width=min(style.TWO_COLUMNS, 0.4 + 3.25 * len(metrics)),
            across=len(metrics),
            least=1.3,
            sharey=sharey,
        )
        for ax, (metric, text) in zip(axes, metrics.items(), strict=True):
            rows = only(table, metric=metric)
            if rows.empty:
                raise FldiagError(
                    f"the picture over {x} has no rows of metric {metric!r}", "ask the runs for it"
                )
            for name, part in rows.groupby(by, sort=False):
                _line(ax, part, x, looks[name])
            ax.set(xlabel=xlabel or x, ylabel=text)
            if log:
                ax.set_xscale("log")
            ax.grid(True)
        keys = [
            Line2D([], [], color=looks[n].color, linestyle=looks[n].dash, marker=looks[n].marker)
            for n in names
        ]
        if len(names) == 1:  # what the caption is about
            keys, names = [], []
        if any(container.get_label() == "_sampled" for ax in axes for container in ax.containers):
            keys.append(Line2D([], [], color=FAINT, linewidth=1.6))
            names.append("± standard error over the test examples, one seed")
        if names:
            style.legend(fig, keys, names, loc="outside lower center", ncols=min(len(names), 4))
    return fig


def learning(table: pd.DataFrame) -> Figure:
    """Accuracy over the rounds: a panel a data set, a line a method, moving means over a fifteenth of the rounds where that is
    two or more. Dotted, where the paper's own data were trained on: the accuracies that it prints."""
    answers = only(table, ask="curve")
    window = max(1, int(answers["round"].max()) // 15)
    rows, panels = (
        answers.drop(columns="slice").assign(metric=answers["data"]),
        list(dict.fromkeys(answers["data"])),
    )
    figure = curves.draw(
        rows, panels, smooth=window, chance=10, note=trained_on(answers), width=style.TWO_COLUMNS
    )
    looks = style.looks(answers["label"])
    for ax, panel in zip(figure.axes, panels, strict=True):
        if set(only(answers, data=panel)["trained_on"]) == {panel}:
            _printed(ax, only(table, origin="reported", data=panel, label=tuple(looks)), looks)
        ax.set_title(f"protocol for {words.data(panel)}", fontsize=8)
        ax.set(ylabel=ax.get_ylabel().replace(words.metric(panel), "test accuracy"))
    return figure


def ends(
    table: pd.DataFrame,
    base: str = "fedavg",
    *,
    by: str = "method",
    alike: Sequence[str] = ("setting", "data", "seed", "round"),
) -> pd.DataFrame:
    """Numbers beside :func:`learning`, each with the deviation over the rounds (``std``) where it is of several.

    ``accuracy`` after the last round; ``accuracy_late``, its mean over the last 20; ``accuracy_ahead``, the mean over these
    of its difference to the line whose column ``by`` is ``base``, in rows that are ``alike``. Runs that have the same clients in
    a round swing together, so these differences swing less."""
    keys = ["label", "run", "seed", *KEYS, "origin", "trained_on", "trained_model", "unit"]
    rows = table.assign(value=table["value"].astype(float))
    end = rows.groupby(keys)["round"].transform("max")
    late = rows[rows["round"] > end - LAST]
    ahead = late[late[by] != base].merge(
        only(late, **{by: base})[[*alike, "value"]], on=list(alike), suffixes=("", "_base")
    )
    pieces = [rows[rows["round"] == end][[*keys, "value"]].assign(metric="accuracy")]
    for name, part in (
        ("accuracy_late", late),
        ("accuracy_ahead", ahead.assign(value=ahead["value"] - ahead["value_base"])),
    ):
        statistics = part.groupby(keys, as_index=False).agg(
            value=("value", "mean"), std=("value", "std")
        )
        pieces.append(statistics.assign(metric=name))
    return pd.concat(pieces, ignore_index=True)


def _printed(ax: Any, rows: pd.DataFrame, looks: Mapping[str, style.Look]) -> None:
    low, high = ax.get_ylim()
    for label, value in zip(rows["label"], rows["value"].astype(float), strict=True):
        ax.axhline(value, color=looks[label].color, linestyle=":", linewidth=0.9)
        low, high = min(low, value - 1), max(high, value + 1)
    ax.set_ylim(low, high)


def _line(ax: Any, part: pd.DataFrame, x: str, look: style.Look) -> None:
    values = part.assign(value=pd.to_numeric(part["value"]).astype(float))
    _sampled(ax, values, x)
    flat = values[values[x].isna()]["value"]
    if len(flat):
        ax.axhline(flat.mean(), color=look.color, linestyle=look.dash, linewidth=1)
    if values[x].notna().any():
        means(ax, values, x, look)


def _sampled(ax: Any, part: pd.DataFrame, x: str) -> None:
    """Of an accuracy of one seed: a faint bar of its standard error over the test examples."""
    if not {"n_examples", "unit"} <= set(part.columns) or part.groupby(x).size().max() != 1:
        return
    rows = part[part["unit"].eq("%")].dropna(subset=[x, "value"])
    share = rows["value"].to_numpy(float) / 100
    error = 100 * np.sqrt(share * (1 - share) / rows["n_examples"].to_numpy(float))
    ax.errorbar(
        rows[x].to_numpy(float),
        100 * share,
        yerr=error,
        fmt="none",
        ecolor=FAINT,
        elinewidth=1.6,
        zorder=1,
        label="_sampled",
    )


def means(ax: Any, part: pd.DataFrame, x: str, look: style.Look, label: str | None = None) -> None:
    """The mean of ``value`` over ``x``, with bars of one standard deviation where there are several seeds."""
    statistics = (
        part.dropna(subset=[x])
        .astype({"value": float})
        .groupby(x)["value"]
        .agg(["mean", "std"])
        .sort_index()
    )
    if statistics.empty:
        return
    at = statistics.index.to_numpy(float)
    ax.plot(
        at,
        statistics["mean"],
        color=look.color,
        linestyle=look.dash,
        marker=look.marker,
        markersize=3.6,
        label=label,
    )
    several = statistics["std"].notna().to_numpy()
    if several.any():
        ax.errorbar(
            at[several],
            statistics["mean"][several],
            yerr=statistics["std"][several],
            fmt="none",
            ecolor=look.color,
            elinewidth=0.8,
        )


def _number(text: str | None) -> float:
    try:
        return float(text) if text is not None else math.nan
    except ValueError:
        return math.nan
