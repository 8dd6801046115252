"""The picture that most studies share, measured beside reported numbers, and the same as a table for reading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting import words as display
from fldiag.plotting.tables import need
from fldiag_papers import shapes
from fldiag_papers.reported import FEDERATION, MARKS

PICTURE = "picture of measured beside reported numbers"
MEASURED, REPORTED = style.look(2), style.look(0)
#: The line at the accuracy of guessing.
CHANCE: dict[str, Any] = {
    "color": "#666666",
    "linewidth": 0.7,
    "linestyle": (0, (1, 2)),
    "zorder": 1,
}
_SHORT = {
    "sharding": "{shards} shards",
    "lda": "LDA {alpha}",
    "lda_fedsol": "LDA {alpha}",
    "dirichlet": "Dir {alpha}",
    "pathological": "{classes} classes",
    "iid": "iid",
}
#: What is written for a metric.
WORDS = {
    "accuracy": "accuracy [%]",
    "accuracy_late": "accuracy, mean of the last 20 rounds [%]",
    "accuracy_ahead": "the same, minus the base's in the same rounds",
    "personal_accuracy": "personal accuracy [%]",
    "params_M": "parameters [M]",
    "MFLOPs": "MFLOPs an image",
    "GFLOPs": "GFLOPs an image",
    "seconds_per_round": "seconds a round",
    "lambda_max": "λ₁",
    "MFLOPs_saved": "operations saved [%]",
    "params_M_saved": "parameters saved [%]",
    "rounds_saved": "rounds saved [%]",
    "train_examples": "training examples",
    "test_examples": "test examples",
    "client_state": "kept by a client",
    "flops_relative": "operations / FedAvg's",
    "rounds_to_best_of_fedsam": "rounds to the best of FedSAM",
}


def words(metric: str) -> str:
    """What is written for a metric, with its unit."""
    kind, _, level = metric.rpartition("_")
    if level.isdigit() and kind in ("rounds_to", "cost"):
        return f"rounds to {level} %" + (" / FedTOGA's" if kind == "cost" else "")
    return WORDS.get(metric, metric.replace("_", " ") if kind.islower() else metric)


def parse(setting: Any) -> dict[str, str]:
    """A setting as in reported.csv: ``a=1;b=2``."""
    has_any = isinstance(setting, str) and setting
    return dict(pair.split("=", 1) for pair in setting.split(";")) if has_any else {}


# ---- rows and columns


def heads(table: pd.DataFrame) -> list[tuple[str, ...]]:
    """Head of each number's column, in parts: metric, data, model, partition and other settings of the federation, as far as
    they differ within the table."""
    settings = [{k: v for k, v in parse(s).items() if k in FEDERATION} for s in table["setting"]]
    differs = {k for s in settings for k in s if len({s.get(k) for s in settings}) > 1}
    # A model is named where data have more than one.
    models = table.groupby("data")["model"].nunique().max()
    counts = {"metric": table["metric"].nunique(), "data": table["data"].nunique(), "model": models}
    several = [column for column, count in counts.items() if count > 1]
    result = []
    for (_, row), setting in zip(table.iterrows(), settings, strict=True):
        parts = [words(row[c]) if c == "metric" else str(row[c]) for c in several if row[c]]
        if differs & {"partition", "alpha", "shards", "classes"}:
            kind = setting.get("partition", "")
            parts += filter(None, [_SHORT.get(kind, kind).format(**setting)])
        for key in sorted(FEDERATION[4:], key=lambda k: k == "ratio"):
            parts += [f"{key} {setting[key]}"] if key in setting and key in differs else []
        result.append(tuple(parts or [words(row["metric"])]))
    return result


def stand_ins(table: pd.DataFrame) -> dict[str, str]:
    """Data of the paper -> those that were trained on instead, where they are others."""
    if "trained_on" not in table:
        return {}
    pairs = table[["data", "trained_on"]].dropna().drop_duplicates().itertuples(index=False)
    return {a: b for a, b in pairs if a and b and a != b.split("@")[0]}


def trained_on(table: pd.DataFrame) -> str:
    """What is said once of a picture whose panels name the paper's data, where others were trained on."""
    names = sorted({display.data(d) for d in stand_ins(table).values()})
    return f"trained on {', '.join(names)}" if names else ""


def labels(table: pd.DataFrame) -> pd.Series:
    """What its row is called: the method and those of its options in which its rows differ."""
    hidden = (*FEDERATION, *MARKS)
    options = [{k: v for k, v in parse(s).items() if k not in hidden} for s in table["setting"]]
    methods = list(table["method"])
    names = []
    for method, values in zip(methods, options, strict=True):
        alike = [o for m, o in zip(methods, options, strict=True) if m == method]
        differing = [f"{k}={v}" for k, v in values.items() if len({o.get(k) for o in alike}) > 1]
        names.append(str(method) + (f" ({', '.join(differing)})" if differing else ""))
    return pd.Series(names, index=table.index)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One line a cell: ``row``, ``column`` (and in parts ``head``, ``stand_in``), ``metric``, ``data`` of the paper and those
    that were ``trained_on``, ``measured``, ``measured_std``, ``seeds``, how many of them are ``missing``, ``reported`` and
    ``reported_std``."""
    need(table, ("origin", "setting", "method", "model", "data", "metric", "value"), PICTURE)
    # What is counted is not what is trained.
    instead = {metric: stand_ins(part) for metric, part in table.groupby("metric")}
    table = table.assign(
        row=labels(table),
        head=heads(table),
        stand_in=[
            instead[m].get(d, "") for m, d in zip(table["metric"], table["data"], strict=True)
        ],
        value=table["value"].astype(float),
        std=table["std"].astype(float) if "std" in table else np.nan,
    )
    table["column"] = [
        ", ".join([*head, *([f"here {name}"] if name else [])])
        for head, name in zip(table["head"], table["stand_in"], strict=True)
    ]
    cells = table.groupby(["column", "row"], sort=False)
    lines = cells[["head", "stand_in", "metric", "data"]].first()
    trained = table[table["origin"] == "measured"].groupby(["column", "row"])
    measured = trained["value"]
    lines["trained_on"] = trained["trained_on"].first() if "trained_on" in table else ""
    lines["measured"], lines["measured_std"] = measured.mean(), measured.std()
    lines["seeds"], lines["missing"] = measured.count(), measured.size() - measured.count()
    printed = table[table["origin"] == "reported"].groupby(["column", "row"])
    lines[["reported", "reported_std"]] = printed[["value", "std"]].first()
    # Of rounds to a level, the mean of those that got there is too early.
    lines["is_late"] = lines["metric"].str.startswith("rounds_to_") & (lines["missing"] > 0)
    lines.loc[lines["is_late"], ["measured", "measured_std"]] = np.nan
    return lines.reset_index()


def by_data(table: pd.DataFrame) -> pd.DataFrame:
    """The same with a row for each data set, for numbers of data and not of methods."""
    names = [display.data(name) for name in table["data"]]
    return table.assign(method=names, data="", model="", setting="")


# ---- a table for reading


def cells(table: pd.DataFrame) -> pd.DataFrame:
    """Rows and columns as in the paper: measured ± std, the paper's number in brackets."""
    lines = summary(table)
    lines["text"] = [_text(r) for r in lines.to_dict("records")]
    layout = lines.pivot(index="row", columns="column", values="text")
    layout = layout.reindex(index=lines["row"].unique(), columns=lines["column"].unique())
    return layout.rename_axis(index="method", columns=None)


def markdown(layout: pd.DataFrame) -> str:
    names = [layout.index.name or "", *map(str, layout.columns)]
    rows = [
        [str(name), *("" if pd.isna(v) else str(v) for v in row)] for name, row in layout.iterrows()
    ]
    lines = ["| " + " | ".join(row) + " |" for row in (names, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(names), *lines[1:]]) + "\n"


def _text(r: Mapping[str, Any]) -> str:
    seeds = r["seeds"]
    count = f"{seeds:.0f} of {seeds + r['missing']:.0f} seeds" if seeds > 0 else "–"
    printed = _pair(r, "reported")
    return (_pair(r, "measured") or count) + (f" ({printed})" if printed else "")


def _pair(r: Mapping[str, Any], name: str) -> str:
    """A number ± its standard deviation; nothing where there is none."""
    value, std = r[name], r[f"{name}_std"]
    if pd.isna(value):
        return ""
    digits = 2 if abs(value) < 10 else 1
    return f"{value:.{digits}f}" + ("" if pd.isna(std) else f" ± {std:.{digits}f}")


# ---- the picture


def dots(table: pd.DataFrame) -> Figure:
    """A panel for each column of the table that was measured, a line for each method: measured filled, reported hollow;
    bars of one standard deviation. Raises FldiagError when nothing was measured."""
    lines = summary(table)
    lines = lines[lines.groupby("column")["measured"].transform("count") > 0]
    if lines.empty:
        raise FldiagError(f"the {PICTURE} has no measured number", "train something first")
    columns = lines.drop_duplicates("column")
    stand_ins = set(columns["stand_in"])
    shared = display.data(stand_ins.pop()) if len(stand_ins) == 1 else ""
    metrics = lines["metric"].unique()
    titles = [
        _title(column, is_shared=bool(shared), is_alone=len(metrics) == 1)
        for column in columns.to_dict("records")
    ]
    rows = {r: _row(r) for r in lines["row"].unique()}
    if len(rows) == 1 and len(titles) > 2:  # dots beneath each other would compare nothing
        return _listed(lines, titles, shared, *rows.values())
    room = min(0.35 + max(style.text_width(r) for r in rows.values()), 2.2)
    across = max(1, min(len(titles), int((style.wide() - room) / 1.15)))
    across = -(-len(titles) // -(-len(titles) // across))  # rows of about the same length
    tall = max(0.17 * len(rows) + 0.1, 0.5) + 0.62
    width = style.TWO_COLUMNS if len(titles) > 2 else room + 2.2 * len(titles)
    with style.paper():
        fig, axes = style.panels(
            len(titles),
            tall,
            0.6,
            across=across,
            least=1,
            width=min(width, style.TWO_COLUMNS),
            sharey=True,
        )
        for ax, column, title in zip(axes, columns["column"], titles, strict=True):
            _panel(ax, lines[lines["column"] == column], rows)
            text = [line for part in title for line in style.wrap(part, 1.15, 2, 7)]
            ax.set_title("\n".join(map(style.plain, text)), fontsize=7)
        has_chance = _share_scales(axes, lines, columns)
        for ax in axes[-across:]:  # the lowest of every column
            if len(metrics) == 1:  # else it stands above every panel
                ax.set_xlabel(style.plain(words(metrics[0])))
            elif all(str(m).startswith("rounds_to") for m in metrics):
                ax.set_xlabel("round")
        measured, reported = (lines[f"{c}_std"].notna().any() for c in ("measured", "reported"))
        names = {display.data(name) for name in columns["data"]} if shared else set()
        names = {name for name in names if not any(name in " ".join(title) for title in titles)}
        texts = [
            "measured here"
            + (f" on {shared}" if shared else "")
            + (" (± std of the seeds)" if measured else ""),
            "reported in the paper"
            + (f" on {names.pop()}" if len(names) == 1 else "")
            + (" (± as printed)" if reported else ""),
        ]
        marks = [("o", MEASURED, None), ("o", REPORTED, "none")]
        if lines["is_late"].any():
            marks.append((">", MEASURED, "white"))
            texts.append("not reached")
        handles = [
            Line2D(
                [],
                [],
                linestyle="none",
                marker=marker,
                color=look.color,
                markersize=4,
                markerfacecolor=face,
            )
            for marker, look, face in marks
        ]
        if has_chance:
            handles.append(Line2D([], [], **CHANCE))
            texts.append("chance")
        ncols = style.columns(texts, fig.get_figwidth() - 0.2)
        style.legend(fig, handles, texts, loc="outside lower center", ncols=ncols)
    return fig


def _title(column: Mapping[str, Any], is_shared: bool, is_alone: bool) -> list[str]:
    """What stands above a panel. Of data that stand in for the paper's, both: "MNIST for CIFAR-10".

    ``is_shared``: the legend names what stands in; ``is_alone``: the axis names the only metric."""
    stand_in, data, head = column["stand_in"], column["data"], column["head"]
    if is_alone and data and head == (words(column["metric"]),):
        head = (data,)
    parts = [both_data(data, stand_in) if part == data else part for part in head]
    is_named = is_shared or not stand_in or data in head
    return parts if is_named else [*parts, f"here {display.data(stand_in)}"]


def both_data(data: str, stand_in: str) -> str:
    """The paper's data, and those that were trained on for them.

    >>> both_data("cifar10", "mnist-2000"), both_data("mnist", "mnist-2000"), both_data("cifar10", "")
    ('MNIST for CIFAR-10', 'MNIST', 'CIFAR-10')
    """
    base = stand_in.partition("@")[0]
    base = base.rpartition("-")[0] or base
    name = display.data(data)
    return f"{display.data(base)} for {name}" if base not in ("", data) else name


def _share_scales(axes: Sequence[Axes], lines: pd.DataFrame, columns: pd.DataFrame) -> bool:
    """One x-scale for all panels of accuracies, and for all of rounds to a level; whether chance is marked in any."""
    panels: dict[str, list[tuple[Axes, str]]] = {}
    for ax, column, metric in zip(axes, columns["column"], columns["metric"], strict=True):
        kind = metric if metric == "accuracy" else metric.rpartition("_")[0]
        panels.setdefault(f"{kind}, {ax.get_xscale()}", []).append((ax, column))
    has_chance = False
    for kind, alike in panels.items():
        if not kind.startswith(("accuracy, ", "rounds_to, ")):
            continue
        low, high = _range(ax for ax, _ in alike)
        levels: dict[str, float] = {}
        for _, column in alike if kind.startswith("accuracy") else ():
            names = lines.loc[lines["column"] == column, "trained_on"].dropna().unique()
            counts = [count for name in names if name and (count := shapes.classes(name))]
            if counts and low <= 300 / min(counts):  # as style.chance: where they come near it
                levels[column] = 100 / min(counts)
        low = min([low, *(level - 0.04 * (high - low) for level in levels.values())])
        for ax, column in alike:
            ax.set_xlim(low, high)
            if ax.get_xscale() == "log":
                _mark_powers(ax, low, high)
            if column in levels:
                ax.axvline(levels[column], **CHANCE)
        has_chance |= bool(levels)
    return has_chance


def _range(axes: Iterable[Axes]) -> tuple[float, float]:
    """Of all axes together, with room at both ends where there is none in the whole."""
    limits = np.array([ax.get_xlim() for ax in axes])
    low, high = limits.min(), limits.max()
    is_alike = len(np.unique(limits, axis=0)) == 1
    room = 0.0 if is_alike or low <= 0 or high > 30 * low else 0.03 * (high - low)
    return low - room, high + room


def _mark_powers(ax: Axes, low: float, high: float) -> None:
    """Ticks at powers of ten; at three times these too where there are few."""
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 3) if high < 100 * low else (1,)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_locator(NullLocator())


def _listed(lines: pd.DataFrame, titles: Sequence[Sequence[str]], shared: str, row: str) -> Figure:
    """One method in several settings, as a table: a line a setting."""
    names = [style.plain(", ".join(title)) for title in titles]
    cells = [
        [name, _pair(line, "measured"), _pair(line, "reported")]
        for name, line in zip(names, lines.to_dict("records"), strict=True)
    ]
    top = [style.plain(row), "measured" + (f" on {shared}" if shared else ""), "in the paper"]
    room = max(map(style.text_width, [*names, row])) + 0.1
    width = style.wide(min(style.TWO_COLUMNS, room + 2.6))
    with style.paper():
        fig = style.figure(width, 0.19 * (len(cells) + 1) + 0.1, layout="constrained")
        ax = fig.subplots()
        ax.axis("off")
        share = room / width
        grid = ax.table(
            [top, *cells],
            cellLoc="right",
            colWidths=[share, (1 - share) / 2, (1 - share) / 2],
            bbox=Bbox.unit(),
            edges="horizontal",
        )
        grid.auto_set_font_size(False)
        grid.set_fontsize(7)
        for (at, column), cell in grid.get_celld().items():
            cell.PAD = 0.02
            cell.set_linewidth(0.7 if at == 0 else 0.2)
            cell.set_text_props(ha="right" if column else "left", weight="normal" if at else "bold")
    return fig


def _row(label: str) -> str:
    """A row as it is drawn: the method's display name, its options with their symbols."""
    method, _, options = label.partition(" (")
    pairs = [o.partition("=") for o in options.rstrip(")").split(", ")]
    texts = [f"{display.symbol(k)} = {v}" if v else k for k, _, v in pairs]
    return display.method(method) + (f" ({', '.join(texts)})" if options else "")


def _panel(ax: Axes, part: pd.DataFrame, rows: Mapping[str, str]) -> None:
    at = {r: len(rows) - 1 - i for i, r in enumerate(rows)}
    y = part["row"].map(at).to_numpy(float)
    for name, shift, color, face in (
        ("reported", -0.14, REPORTED.color, "none"),
        ("measured", 0.14, MEASURED.color, MEASURED.color),
    ):
        value, std = part[name].to_numpy(float), part[f"{name}_std"].to_numpy(float)
        ok = np.isfinite(value)
        ax.errorbar(
            value[ok],
            (y + shift)[ok],
            xerr=np.nan_to_num(std[ok]),
            linestyle="none",
            marker="o",
            markersize=3.6,
            elinewidth=0.8,
            capsize=0,
            color=color,
            markerfacecolor=face,
        )
    numbers = part[["measured", "reported"]].to_numpy(float)
    numbers = numbers[np.isfinite(numbers)]
    is_count = bool(part["metric"].str.startswith("rounds_to").any())
    if len(numbers) and numbers.min() > 0 and numbers.max() > 30 * numbers.min():
        ax.set_xscale("log")
        _mark_powers(ax, numbers.min(), numbers.max())
    else:
        if is_count and len(numbers):
            ax.set_xlim(0, 1.12 * numbers.max())
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=is_count))
    late = part["is_late"].to_numpy(bool)
    ax.plot(
        np.full(late.sum(), 0.985),
        (y + 0.14)[late],
        linestyle="none",
        marker=">",
        markersize=3.8,
        color=MEASURED.color,
        markerfacecolor="white",
        transform=ax.get_yaxis_transform(),
        label="not reached",
    )
    ax.set_yticks(list(at.values()), [style.plain(style.shorten(r, 34)) for r in rows.values()])
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.grid(True, axis="both")
