"""Other pictures that several studies share: numbers over a setting, and learning curves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.results.select import only
from fldiag_papers import learning_curves
from fldiag_papers.caption import LAST
from fldiag_papers.gather import KEYS
from fldiag_papers.pictures import both_data, parse, stand_ins, trained_on

FAINT = "#bbbbbb"


def lines(
    table: pd.DataFrame, x: str, panels: Mapping[str, str], *, log: Collection[str] = ()
) -> Figure:
    """Mean accuracy and its standard deviation (bars, over seeds) over ``x``: a panel a metric, a line a label.

    ``x``: a column, or a key of the setting; rows without it are a horizontal line. ``panels``: metric -> what its ``x``
    is; ``log``: those with a logarithmic axis. A cross: runs that diverged. Raises FldiagError where no metric has rows."""
    if x not in table:
        table = table.assign(**{x: [float(parse(s).get(x, "nan")) for s in table["setting"]]})
    table = only(table, metric=tuple(panels)).astype({"value": float})
    if table.empty:
        raise FldiagError(
            f"the picture over {x} has no rows of {', '.join(panels)}",
            "ask the runs for them",
        )
    looks = style.looks(table["label"].dropna())
    with style.paper():
        width = min(style.TWO_COLUMNS, 0.4 + 3.25 * len(panels))
        count = len(panels)
        fig, axes = style.panels(count, 2.5, width=width, across=count, least=1.3, sharey=True)
        for ax, (metric, text) in zip(axes, panels.items(), strict=True):
            rows = only(table, metric=metric)
            for row, (label, look) in enumerate(looks.items()):
                part = only(rows, label=label)
                _sampled(ax, part, x)
                if len(flat := part.loc[part[x].isna(), "value"]):
                    level = flat.mean()
                    ax.axhline(
                        level, color=look.color, linestyle=look.dash, linewidth=1, label=label
                    )
                means(ax, part, x, look, label)
                lost = part.loc[part["value"].isna(), x]
                height = np.full(len(lost), 0.04 + 0.08 * row)
                ax.plot(
                    lost,
                    height,
                    "x",
                    color=look.color,
                    markersize=5,
                    markeredgewidth=1.2,
                    transform=ax.get_xaxis_transform(),
                )
            ticks = sorted(rows[x].dropna().unique())
            ax.set(xlabel=text, xscale="log" if metric in log else "linear")
            ax.set_xticks(ticks, [f"{t:g}" for t in ticks], rotation=90 if count > 1 else 0)
            ax.minorticks_off()
            ax.grid(True)
        for ax in axes:
            style.chance(ax, 10, name=ax is axes[0])
        axes[0].set_ylabel("test accuracy [%]")
        fig.align_xlabels()
        # The caption is about the only line.
        handles = (
            {n: Line2D([], [], **look.line) for n, look in looks.items()} if len(looks) > 1 else {}
        )
        if table["value"].isna().any():
            handles["diverged"] = learning_curves.diverged()
        if any(bars.get_label() == "_sampled" for ax in axes for bars in ax.containers):
            text = "± standard error over the test examples, one seed"
            handles[text] = Line2D([], [], color=FAINT, linewidth=1.6)
        if handles:
            ncols, marks = min(len(handles), 4), list(handles.values())
            style.legend(fig, marks, list(handles), loc="outside lower center", ncols=ncols)
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
    figure = learning_curves.draw(
        rows, panels, smooth=window, chance=10, note=trained_on(answers), width=style.TWO_COLUMNS
    )
    looks = style.looks(answers["label"])
    stand_in = stand_ins(answers)
    for ax, panel in zip(figure.axes, panels, strict=True):
        if set(only(answers, data=panel)["trained_on"]) == {panel}:
            _printed(ax, only(table, origin="reported", data=panel, label=tuple(looks)), looks)
        ax.set_title(both_data(panel, stand_in.get(panel, "")), fontsize=8)
        ax.set(ylabel=ax.get_ylabel().replace(panel.replace("_", " "), "test accuracy"))
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


def _printed(ax: Axes, rows: pd.DataFrame, looks: Mapping[str, style.Look]) -> None:
    low, high = ax.get_ylim()
    for label, value in zip(rows["label"], rows["value"].astype(float), strict=True):
        ax.axhline(value, color=looks[label].color, linestyle=":", linewidth=0.9)
        low, high = min(low, value - 1), max(high, value + 1)
    ax.set_ylim(low, high)


def _sampled(ax: Axes, part: pd.DataFrame, x: str) -> None:
    """Of an accuracy of one seed: a faint bar of its standard error over the test examples."""
    if "n_examples" not in part or part.groupby(x).size().max() != 1:
        return
    rows = part.dropna(subset=[x, "value"])
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


def means(ax: Axes, part: pd.DataFrame, x: str, look: style.Look, label: str | None = None) -> None:
    """The mean of ``value`` over ``x``, with bars of one standard deviation where there are several seeds."""
    groups = part.dropna(subset=[x]).astype({"value": float}).groupby(x)["value"]
    mean, std = groups.mean(), groups.std()
    if mean.empty:
        return
    ax.plot(
        mean.index.to_numpy(float),
        mean,
        color=look.color,
        linestyle=look.dash,
        marker=look.marker,
        markersize=3.6,
        label=label,
    )
    if (several := std.notna()).any():
        at = std.index[several].to_numpy(float)
        ax.errorbar(at, mean[several], std[several], fmt="none", ecolor=look.color, elinewidth=0.8)
