"""The few shapes of pictures: curves over rounds, values over a setting, numbers beside the printed ones as dots or as a table.

Methods look alike everywhere. Bars and bands are one standard deviation over seeds, and absent where there is one seed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from fldiag.plotting import style, words

from .reported import FEDERATION, parse

MEASURED, PRINTED = style.look(2), style.look(0)
#: What a cell of a paper's table is called.
KEYS = ["metric", "setting", "method", "model", "data"]
#: More panels than these are a table.
PANELS = 6
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
PARTITIONS = {
    "sharding": "{shards} shards",
    "lda": "LDA {alpha}",
    "dirichlet": "Dir {alpha}",
    "pathological": "{classes} classes",
    "iid": "IID",
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
        data: words.data(data) if on == data else f"{_whole(on)} for {words.data(data)}"
        for data, on in pairs
    }


def _whole(name: str) -> str:
    """The name of data of which so many images were kept, without the number."""
    return words.data(re.sub(r"-\d+$", "", name))


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
    style.legend(fig, list(handles.values()), list(handles), handlelength=2.6, title=title)


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
            ax.set_title("\n".join(style.wrap(text, 1.9, 2)) if ylabel else "", fontsize=7)
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
    *,
    log: Collection[str] = (),
    chance: float = 10,
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
            style.chance(ax, chance, name=ax is axes[0])
        axes[0].set_ylabel("test accuracy [%]")
        fig.align_xlabels()
        _legend(fig, looks, table)
    return fig


# ---- numbers beside the printed ones


def cells(table: pd.DataFrame, printed: pd.DataFrame) -> pd.DataFrame:
    """A line for each cell of a paper's table: ``row`` (method and the options in which its rows differ), ``column`` (metric,
    data, model and settings of the federation, as far as these differ), mean and deviation, measured and printed."""
    measured = table.groupby(KEYS, sort=False)["value"].agg(["mean", "std", "count", "size"])
    # Of rounds to a level, the mean of those that got there is too early.
    is_late = measured.index.get_level_values("metric").str.startswith("rounds_to_")
    measured.loc[is_late & (measured["count"] < measured["size"]), "mean"] = np.nan
    measured = measured.rename(columns={"mean": "measured", "std": "measured_std"}).reset_index()
    theirs = printed.rename(columns={"value": "printed", "std": "printed_std"})
    lines = measured.merge(theirs[[*KEYS, "printed", "printed_std"]], "left", KEYS)
    own = lines["setting"].map(parse)
    differs = [k for k in FEDERATION if len({s.get(k) for s in own}) > 1]
    lines["row"] = [
        _row(method, setting, own[lines["method"] == method])
        for method, setting in zip(lines["method"], own, strict=True)
    ]
    several = [c for c in ("metric", "data") if lines[c].nunique() > 1]
    several += ["model"] if lines.groupby("data")["model"].nunique().max() > 1 else []
    texts = {**data_text(table), **{m: metric_text(m) for m in lines["metric"]}}
    lines["column"] = [
        ", ".join(
            [*(texts.get(line[c], line[c]) for c in several if line[c]), *_split(setting, differs)]
        )
        or metric_text(line["metric"])
        for (_, line), setting in zip(lines.iterrows(), own, strict=True)
    ]
    return lines


def _row(method: str, own: Mapping[str, str], others: pd.Series) -> str:
    """The method, and those of its options in which its rows differ."""
    options = [
        f"{words.symbol(key)} = {value}"
        for key, value in own.items()
        if key not in FEDERATION and len({other.get(key) for other in others}) > 1
    ]
    return words.method(method) + (f" ({', '.join(options)})" if options else "")


def _split(own: Mapping[str, str], differs: Sequence[str]) -> list[str]:
    """The partition, where it differs, and other settings of the federation that do."""
    is_shown = {*differs} & {*FEDERATION[:4]} and "partition" in own
    parts = [PARTITIONS[own["partition"]].format(**own)] if is_shown else []
    return parts + [f"{k} {own[k]}" for k in differs if k in own and k not in FEDERATION[:4]]


def numbers(table: pd.DataFrame, printed: pd.DataFrame) -> Figure:
    """A paper's table, measured beside printed: dots in a panel for each column, or a table where there are many."""
    texts = {k: table[k].astype(object).fillna("") for k in KEYS}  # as read from a csv
    table = table.assign(**texts)
    lines = cells(table, printed)
    columns, rows = list(dict.fromkeys(lines["column"])), list(dict.fromkeys(lines["row"]))
    if len(columns) > PANELS or len(rows) == 1:
        return _grid(lines, columns, rows, table)
    return _dots(lines, columns, rows, table)


def _about(table: pd.DataFrame) -> str:
    """What was measured, in words."""
    stand_in = sorted({*table["trained_on"]} - {*table["data"], ""})
    on = f" on {', '.join(map(_whole, stand_in))}" if stand_in and all(table["data"]) else ""
    seeds = table["seed"].nunique()
    return f"measured{on}" + (f" (± deviation of {seeds} seeds)" if seeds > 1 else "")


def _dots(
    lines: pd.DataFrame, columns: Sequence[str], rows: Sequence[str], table: pd.DataFrame
) -> Figure:
    spread = " (± as printed)" if lines["printed_std"].notna().any() else ""
    kinds = [("measured", -0.14, MEASURED, _about(table))]
    if lines["printed"].notna().any():
        kinds.append(("printed", 0.14, PRINTED, f"printed in the paper{spread}"))
    width = style.ONE_COLUMN if len(columns) == 1 else style.TWO_COLUMNS
    y = np.arange(len(rows))
    with style.paper():
        tall = max(0.17 * len(rows) + 0.1, 0.5) + 0.62
        fig, axes = style.panels(len(columns), tall, 0.6, least=1.5, width=width, sharey=True)
        handles: dict[str, Any] = {}
        for ax, column in zip(axes, columns, strict=True):
            part = lines[lines["column"] == column].set_index("row").reindex(rows)
            for kind, shift, look, text in kinds:
                dots: dict[str, Any] = {**look.point, "marker": "o", "capsize": 0}
                dots["markerfacecolor"] = look.color if kind == "measured" else "none"
                error = part[f"{kind}_std"].fillna(0)
                handles[text] = ax.errorbar(part[kind], y + shift, xerr=error, **dots)[0]
            late = y[part["measured"].isna() & (part["metric"].str[:6] == "rounds")]
            if len(late):
                edge: dict[str, Any] = {"color": MEASURED.color, "markerfacecolor": "white"}
                at = ax.get_yaxis_transform()
                marks = ax.plot(np.full(len(late), 0.98), late - 0.14, ">", transform=at, **edge)
                handles["not reached"] = marks[0]
            style.names_down(ax, rows, 34)
            ax.set_title("\n".join(map(style.plain, style.wrap(column, 1.8, 2))), fontsize=7)
            extremes = part[["measured", "printed"]].to_numpy(float)
            ratio = np.nanmax(extremes) / np.nanmin(extremes) if np.nanmin(extremes) > 0 else 0
            if ratio > 30:
                ax.set_xscale("log")
                ax.xaxis.set_major_locator(LogLocator(subs=(1,) if ratio > 100 else (1, 3)))
                ax.xaxis.set_major_formatter("{x:g}")
                ax.xaxis.set_minor_locator(NullLocator())
            else:
                ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
            ax.grid(True)
        style.legend(fig, list(handles.values()), list(handles))
    return fig


def _grid(
    lines: pd.DataFrame, columns: Sequence[str], rows: Sequence[str], table: pd.DataFrame
) -> Figure:
    """Columns of the paper are lines here, methods columns; below each number the printed one in brackets."""
    texts = {
        (line["column"], line["row"]): _number(line, "measured")
        + (f"\n({_number(line, 'printed')})" if pd.notna(line["printed"]) else "")
        for _, line in lines.iterrows()
    }
    body = [[c, *(texts.get((c, r), "") for r in rows)] for c in columns]
    with style.paper():
        names = min(max(map(style.text_width, columns)), 2.2)
        about = style.wrap(f"{_about(table)}; in brackets: printed", names, 3, 6)
        head = ["\n".join(about), *("\n".join(style.wrap(r, 0.75, 2, 6)) for r in rows)]
        width = style.wide(min(style.TWO_COLUMNS, names + 0.8 * len(rows) + 0.2))
        fig = style.figure(width, 0.3 * (len(body) + 1) + 0.2)
        ax = fig.add_axes((0, 0, 1, 1))
        ax.axis("off")
        share = names / width
        each = (1 - share) / len(rows)
        sheet = ax.table(
            [head, *body],
            colWidths=[share, *[each] * len(rows)],
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


def _number(line: pd.Series, kind: str) -> str:
    value, std = line[kind], line[f"{kind}_std"]
    if pd.isna(value):
        return "–"
    kind = line["metric"].partition("_")[0]
    digits = {"rounds": 0, "accuracy": 1, "personal": 1}.get(kind, 2 if abs(value) < 10 else 1)
    return f"{value:,.{digits}f}" + ("" if pd.isna(std) else f" ± {std:.{digits}f}")
