"""The few shapes of pictures: curves over rounds, values over a setting, and numbers beside the printed ones.

Methods look alike everywhere. Bars and bands are one standard deviation over seeds, and absent where there is one seed.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from fldiag.plotting import style

from .reported import FEDERATION, MARKS, parse

#: What a cell of a paper's table is called.
KEYS = ["metric", "setting", "method", "model", "data"]
#: A table of more columns than these has the paper's columns as lines.
COLUMNS = 6
#: What is written for a metric, where it is not its name with spaces.
METRICS = {
    "accuracy": "accuracy [%]",
    "personal_accuracy": "personal accuracy [%]",
    "params_M": "parameters [M]",
    "MFLOPs": "multiply-adds an image [M]",
    "GFLOPs": "multiply-adds an image [G]",
    "seconds_per_round": "seconds a round",
    "lambda_max": "λ₁",
    "trace": "trace",
    "uplink": "sent / model",
    "downlink": "received / model",
    "client_state": "kept / model",
    "flops_relative": "operations / FedAvg's",
    "rounds_to_best_of_fedsam": "rounds to FedSAM's best",
    "cost_80": "rounds to 80 % / FedTOGA's",
    "cost_82": "rounds to 82 % / FedTOGA's",
}


def metric_text(metric: str) -> str:
    """
    >>> metric_text("rounds_to_80"), metric_text("train_examples")
    ('rounds to 80 %', 'train examples')
    """
    text = METRICS.get(metric, metric.replace("_", " ") if metric.islower() else metric)
    return f"{text} %" if metric.startswith("rounds_to_") and metric[-1].isdigit() else text


def data_text(table: pd.DataFrame) -> dict[str, str]:
    """Data of the paper -> what is written: "MNIST for CIFAR-10" where others were trained on."""
    pairs = table[["data", "trained_on"]].drop_duplicates().itertuples(index=False)
    return {
        data: style.display_name(data)
        if on == data
        else f"{_whole(on)} for {style.display_name(data)}"
        for data, on in pairs
    }


def _whole(name: str) -> str:
    """The name of data of which so many images were kept, without the number."""
    return style.display_name(re.sub(r"-\d+$", "", name))


def look_points(ax: Axes, x: Any, values: pd.DataFrame, look: style.Look, **line: Any) -> None:
    """Means over seeds at ``x`` with bars of their standard deviation; ``values``: columns mean and std."""
    ax.plot(x, values["mean"], **{**look.line, **line})
    several = values["std"].notna().to_numpy()
    if several.any():
        at, part = np.asarray(x)[several], values[several]
        ax.errorbar(at, part["mean"], part["std"], fmt="none", ecolor=look.color, elinewidth=0.8)


def _legend(fig: Figure, looks: Mapping[str, style.Look], table: pd.DataFrame) -> None:
    """The lines, a cross for what diverged, and what the bars are."""
    handles = {name: Line2D([], [], **look.line) for name, look in looks.items()}
    if table["value"].isna().any():
        handles["diverged"] = Line2D([], [], linestyle="none", marker="x", color="#444444")
    seeds = table["seed"].nunique()
    title = f"mean ± standard deviation of {seeds} seeds" if seeds > 1 else None
    style.legend(fig, list(handles.values()), handles, title=title)


def curves(
    table: pd.DataFrame,
    panel: str,
    texts: Mapping[str, str],
    *,
    ylabel: str = "",
    chance: float | None = None,
    printed: pd.DataFrame | None = None,
) -> Figure:
    """Values over rounds, a panel for each value of the column ``panel``, a line a label.

    With thirty rounds or more lines are moving means over a fifteenth of the rounds, above faint raw means. A cross: weights are
    not finite from there on. ``texts``: value of ``panel`` -> name of the axis; with a ``ylabel`` of all panels, its title.
    ``printed``: columns data, label, value; dotted where the panel is of these data."""
    looks = style.looks(table["label"])
    levels = pd.DataFrame({"data": []}) if printed is None else printed
    rounds = table["round"].nunique()
    # Of rounds that were stored now and then there are few.
    window = max(1, rounds // 15) if rounds == table["round"].max() else 1
    with style.paper():
        width = style.TWO_COLUMNS if len(texts) > 1 else style.ONE_COLUMN
        fig, axes = style.panels(len(texts), 2.15, 0.1, width=width, sharey=bool(ylabel))
        for ax, (name, text) in zip(axes, texts.items(), strict=True):
            rows = table[table[panel] == name]
            for label, look in looks.items():
                by_round = rows[rows["label"] == label].groupby("round")["value"]
                if by_round.ngroups:
                    _curve(ax, by_round.agg(["mean", "std"]), look, window)
            for level in levels[levels["data"] == name].itertuples():
                ax.axhline(
                    level.value, color=looks[level.label].color, linestyle=":", linewidth=0.9
                )
            ax.set_title(textwrap.fill(text, 34) if ylabel else "", fontsize=7)
            smooth = f"\n(mean of {window} rounds)" if window > 1 else ""
            ax.set(xlabel="round", ylabel=(ylabel or text) + smooth)
            ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
            ax.grid(True)
        if chance is not None:
            for ax in axes:
                style.chance(ax, chance)
        _legend(fig, looks, table)
    return fig


def _curve(ax: Axes, points: pd.DataFrame, look: style.Look, window: int) -> None:
    """One line, its band, and a cross at its last finite value where more rounds follow."""
    smooth = points.rolling(window, center=True, min_periods=1).mean() if window > 1 else points
    if window > 1:
        ax.plot(points.index, points["mean"], color=look.color, linewidth=0.5, alpha=0.3)
    low, high = smooth["mean"] - smooth["std"], smooth["mean"] + smooth["std"]
    low = low.clip(lower=0) if points["mean"].min() >= 0 else low
    ax.fill_between(smooth.index, low, high, color=look.color, alpha=0.15, linewidth=0)
    ax.plot(smooth.index, smooth["mean"], markevery=max(len(smooth) // 6, 1), **look.line)
    finite = points["mean"].dropna()
    if len(finite) and len(finite) < len(points):
        ax.plot(finite.index[-1], finite.iloc[-1], "x", color=look.color, zorder=5)


def over(
    table: pd.DataFrame,
    panels: Mapping[str, str],
    log: Collection[str] = (),
) -> Figure:
    """Accuracy over the column ``at``, a panel for each ``factor``, a line a label; rows without ``at`` are a level line.

    ``panels``: factor -> name of its axis; ``log``: those with a logarithmic one. A cross at the foot: weights that diverged."""
    looks = style.looks(table["label"])
    with style.paper():
        count = len(panels)
        width = min(style.TWO_COLUMNS, 0.4 + 3.25 * count)
        fig, axes = style.panels(count, 2.5, width=width, across=count, least=1.3, sharey=True)
        for ax, (factor, text) in zip(axes, panels.items(), strict=True):
            rows = table[table["factor"] == factor]
            for place, (label, look) in enumerate(looks.items()):
                part = rows[rows["label"] == label]
                level = part.loc[part["at"].isna(), "value"].mean()
                if not np.isnan(level):
                    ax.axhline(level, color=look.color, linestyle=look.dash, linewidth=1)
                by_value = part.dropna(subset="at").groupby("at")["value"].agg(["mean", "std"])
                look_points(ax, by_value.index, by_value, look)
                lost = part.loc[part["value"].isna(), "at"]
                foot = ax.get_xaxis_transform()
                height = np.full(len(lost), 0.04 + 0.08 * place)
                ax.plot(lost, height, "x", color=look.color, transform=foot)
            ticks = sorted(rows["at"].dropna().unique())
            ax.set(xlabel=text, xscale="log" if factor in log else "linear")
            ax.set_xticks(ticks, [f"{t:g}" for t in ticks], rotation=90 if count > 1 else 0)
            ax.minorticks_off()
            ax.grid(True)
        for ax in axes:
            style.chance(ax, 10, name=ax is axes[0])
        axes[0].set_ylabel("test accuracy [%]")
        fig.align_xlabels()
        _legend(fig, looks, table)
    return fig


# ---- numbers beside the printed ones


def settings(lines: pd.DataFrame) -> pd.DataFrame:
    """What tells the lines of a paper's table apart besides method and metric, in words: a column for each option, the model and
    the data that differ, "" where a line has none."""
    fields = lines[["model", "data"]].join(lines["setting"].map(parse).apply(pd.Series)).fillna("")
    fields = fields[[c for c in fields if fields[c].nunique() > 1 and c not in MARKS]]
    return fields.apply(lambda column: column.map(partial(_setting, column.name)))


def _setting(key: str, entry: str) -> str:
    if key in ("model", "data", "partition") or not entry:
        return style.display_name(entry) if key == "data" else entry
    return f"{key} {entry}" if key in FEDERATION else f"{style.display_name(key)} = {entry}"


def cells(table: pd.DataFrame, printed: pd.DataFrame) -> pd.DataFrame:
    """A line for each cell of a paper's table: ``row`` (the method and its options), ``column`` (metric, data, model and settings
    of the federation, as far as these differ), mean and deviation, measured and printed."""
    measured = table.groupby(KEYS, sort=False)["value"].agg(["mean", "std", "count", "size"])
    # Of rounds to a level, the mean of those that got there is too early.
    is_late = measured.index.get_level_values("metric").str.startswith("rounds_to_")
    measured.loc[is_late & (measured["count"] < measured["size"]), "mean"] = np.nan
    measured = measured.rename(columns={"mean": "measured", "std": "measured_std"}).reset_index()
    theirs = printed.rename(columns={"value": "printed", "std": "printed_std"})
    lines = measured.merge(theirs[[*KEYS, "printed", "printed_std"]], "left", KEYS)
    differ = settings(lines).replace(
        {style.display_name(k): v for k, v in data_text(table).items()}
    )
    is_shared = differ.columns.isin([*FEDERATION, "model", "data"])
    metrics = lines["metric"].map(metric_text)
    own = differ.loc[:, ~is_shared].assign(method=lines["method"].map(style.display_name))
    shared = differ.loc[:, is_shared]
    if metrics.nunique() > 1 or shared.empty:
        shared = shared.assign(metric=metrics)
    for name, texts in (("row", own), ("column", shared)):
        lines[name] = [", ".join(filter(None, line)) for line in texts.iloc[:, ::-1].to_numpy()]
    return lines


def numbers(table: pd.DataFrame, printed: pd.DataFrame) -> Figure:
    """A paper's table: below each measured number the printed one in brackets. Lines are the methods, or the paper's columns
    where these are many."""
    table = table.assign(**{k: table[k].astype(object).fillna("") for k in KEYS})  # as from a csv
    lines = cells(table, printed)
    is_long = lines["column"].nunique() > COLUMNS
    down, across = ("column", "row") if is_long else ("row", "column")
    names, heads = (list(dict.fromkeys(lines[k])) for k in (down, across))
    texts = {
        (line[down], line[across]): _number(line, "measured")
        + (f"\n({_number(line, 'printed')})" if pd.notna(line["printed"]) else "")
        for _, line in lines.iterrows()
    }
    body = [[name, *(texts.get((name, head), "") for head in heads)] for name in names]
    with style.paper():
        first = min(max(1.2, 0.06 * max(map(len, names))), 2.2)
        about = f"{_about(table)}; in brackets: printed"
        each = 0.8 if is_long else 1.4
        head = [textwrap.fill(about, int(20 * first))]
        head += [textwrap.fill(text, int(20 * each)) for text in heads]
        width = style.wide(min(style.TWO_COLUMNS, first + each * len(heads) + 0.2))
        fig = style.figure(width, 0.3 * (len(body) + 1) + 0.2)
        ax = fig.add_axes((0, 0, 1, 1))
        ax.axis("off")
        share = first / width
        sheet = ax.table(
            [head, *body],
            colWidths=[share, *[(1 - share) / len(heads)] * len(heads)],
            cellLoc="center",
            bbox=Bbox.from_extents(0, 0.16 / fig.get_figheight(), 1, 1),
            edges="horizontal",
        )
        sheet.auto_set_font_size(False)
        for (at, column), cell in sheet.get_celld().items():
            cell.set_fontsize(6)
            cell.set_linewidth(0.7 if at == 0 else 0.2)
            cell.set_text_props(ha="center" if column else "left")
            cell.PAD = 0.02
    return fig


def _about(table: pd.DataFrame) -> str:
    """What was measured, in words."""
    stand_in = sorted({*table["trained_on"]} - {*table["data"], ""})
    on = f" on {', '.join(map(_whole, stand_in))}" if stand_in and all(table["data"]) else ""
    seeds = table["seed"].nunique()
    return f"measured{on}" + (f" (± deviation of {seeds} seeds)" if seeds > 1 else "")


def _number(line: pd.Series, kind: str) -> str:
    value, std = line[kind], line[f"{kind}_std"]
    if pd.isna(value):
        return "–"
    kind = line["metric"].partition("_")[0]
    digits = {"rounds": 0, "accuracy": 1, "personal": 1}.get(kind, 2 if abs(value) < 10 else 1)
    return f"{value:,.{digits}f}" + ("" if pd.isna(std) else f" ± {std:.{digits}f}")
