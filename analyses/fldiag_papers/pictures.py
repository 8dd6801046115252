"""The picture that most studies share: measured beside reported numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting import words as words_of
from fldiag.plotting.tables import need
from fldiag_papers.reported import FEDERATION, MARKS

PICTURE = "picture of measured beside reported numbers"
MEASURED, REPORTED = style.look(2), style.look(0)
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
    return (
        dict(pair.split("=", 1) for pair in str(setting).split(";"))
        if isinstance(setting, str) and setting
        else {}
    )


def columns(table: pd.DataFrame) -> pd.Series:
    """Head of each number's column: metric, data, model, partition and other settings of the federation, as far as they
    differ within the table; then the data that stood in for the paper's."""
    instead = {
        metric: stand_ins(part) for metric, part in table.groupby("metric")
    }  # what is counted is not what is trained
    settings = [{k: v for k, v in parse(s).items() if k in FEDERATION} for s in table["setting"]]
    differs, several = _differing(settings), _several(table)
    names = []
    for (_, row), setting in zip(table.iterrows(), settings, strict=True):
        parts = [words(row[c]) if c == "metric" else str(row[c]) for c in several if row[c]]
        parts += _of_the_federation(setting, differs)
        stand_in = instead[row["metric"]].get(row["data"])
        names.append(
            ", ".join(
                [*(parts or [words(row["metric"])]), *([f"here {stand_in}"] if stand_in else [])]
            )
        )
    return pd.Series(names, index=table.index)


def _differing(settings: Sequence[Mapping[str, str]]) -> set[str]:
    """The keys whose values differ, or that are not in all."""
    return {k for k in {k for s in settings for k in s} if len({s.get(k) for s in settings}) > 1}


def _several(table: pd.DataFrame) -> list[str]:
    """Those of metric, data and model that a head must name: of the model, where data have more than one."""
    models = table.groupby("data")["model"].nunique().max()
    return [
        c
        for c in ("metric", "data", "model")
        if (models if c == "model" else table[c].nunique()) > 1
    ]


def _of_the_federation(setting: Mapping[str, str], differs: set[str]) -> list[str]:
    """The partition, and what else of the federation differs: the ratio last."""
    split = []
    if differs & {"partition", "alpha", "shards", "classes"}:
        kind = setting.get("partition", "")
        split = [_SHORT.get(kind, kind).format(**setting)]
    rest = sorted(FEDERATION[4:], key=lambda k: k == "ratio")
    return [text for text in split if text] + [
        f"{k} {setting[k]}" for k in rest if k in setting and k in differs
    ]


def stand_ins(table: pd.DataFrame) -> dict[str, str]:
    """Data of the paper -> those that were trained on instead, where they are others."""
    pairs = {}
    if "trained_on" in table:
        for theirs, ours in (
            table[["data", "trained_on"]].dropna().drop_duplicates().itertuples(index=False)
        ):
            if theirs and ours and theirs != ours.split("@")[0]:
                pairs[str(theirs)] = str(ours)
    return pairs


def trained_on(table: pd.DataFrame) -> str:
    """What is said once of a picture whose panels name the paper's data, where others were trained on."""
    names = sorted({words_of.data(d) for d in stand_ins(table).values()})
    return f"trained on {', '.join(names)}" if names else ""


def labels(table: pd.DataFrame) -> pd.Series:
    """What its row is called: the method and those of its options in which its rows differ."""
    options = [
        {k: v for k, v in parse(s).items() if k not in (*FEDERATION, *MARKS)}
        for s in table["setting"]
    ]
    of: dict[str, list[dict[str, str]]] = {}
    for method, row_options in zip(table["method"], options, strict=True):
        of.setdefault(method, []).append(row_options)
    names = []
    for method, row_options in zip(table["method"], options, strict=True):
        differing = [
            f"{k}={v}" for k, v in row_options.items() if len({o.get(k) for o in of[method]}) > 1
        ]
        names.append(str(method) + (f" ({', '.join(differing)})" if differing else ""))
    return pd.Series(names, index=table.index)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One line a cell: ``row``, ``column``, ``measured``, ``measured_std``, ``seeds``, ``reported``, ``reported_std``,
    and the first ``data``, ``model``, ``metric``."""
    need(table, ("origin", "setting", "method", "model", "data", "metric", "value"), PICTURE)
    table = table.assign(
        column=columns(table), row=labels(table), value=pd.to_numeric(table["value"]).astype(float)
    )
    keys = ["column", "row"]
    mine, theirs = table[table["origin"] == "measured"], table[table["origin"] == "reported"]
    grouped = mine.groupby(keys, sort=False)
    averages = (
        grouped["value"]
        .agg(measured="mean", measured_std="std", seeds="count")
        .join(grouped[["data", "model", "metric"]].first())
    )
    printed = theirs.groupby(keys, sort=False).first()[
        ["value", *(["std"] if "std" in theirs else [])]
    ]
    printed = printed.rename(columns={"value": "reported", "std": "reported_std"})
    averages["missing"] = grouped["value"].agg(lambda v: int(v.isna().sum()))
    late = averages["metric"].str.startswith("rounds_to_") & (averages["missing"] > 0)
    averages.loc[late, ["measured", "measured_std"]] = (
        np.nan
    )  # the mean of those that got there is too early
    lines = averages.join(printed, how="outer", sort=False).reset_index()
    rank = {
        k: i for i, k in enumerate(dict.fromkeys(zip(table["column"], table["row"], strict=True)))
    }
    return (
        lines.iloc[
            np.argsort(
                [rank[k] for k in zip(lines["column"], lines["row"], strict=True)], kind="stable"
            )
        ]
        .reset_index(drop=True)
        .reindex(columns=[*lines.columns, *({"reported", "reported_std"} - set(lines.columns))])
    )


def by_data(table: pd.DataFrame) -> pd.DataFrame:
    """The same with a row for each data set, for numbers of data and not of methods."""
    return table.assign(
        method=[words_of.data(name) for name in table["data"]], data="", model="", setting=""
    )


def cells(table: pd.DataFrame) -> pd.DataFrame:
    """Rows and columns as in the paper: measured ± std, the paper's number in brackets."""
    lines = summary(table)
    lines["text"] = [_text(r) for r in lines.to_dict("records")]
    rows, heads = list(dict.fromkeys(lines["row"])), list(dict.fromkeys(lines["column"]))
    layout = lines.pivot(index="row", columns="column", values="text").reindex(
        index=rows, columns=heads
    )
    layout.index.name, layout.columns.name = "method", None
    return layout


def markdown(layout: pd.DataFrame) -> str:
    """A table for reading."""
    heads = [layout.index.name or "", *map(str, layout.columns)]
    rows = [
        [str(name), *("" if pd.isna(v) else str(v) for v in row)] for name, row in layout.iterrows()
    ]
    lines = ["| " + " | ".join(row) + " |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]]) + "\n"


def _text(r: Mapping[str, Any]) -> str:
    count = (
        f"{r['seeds']:.0f} of {r['seeds'] + r['missing']:.0f} seeds"
        if r.get("seeds", 0) > 0
        else "–"
    )
    mine = _pair(r, "measured") or count
    return mine + (f" ({theirs})" if (theirs := _pair(r, "reported")) else "")


def _pair(r: Mapping[str, Any], name: str) -> str:
    """A number ± its standard deviation; nothing where there is none."""
    value, std = r[name], r[f"{name}_std"]
    if value is None or pd.isna(value):
        return ""
    digits = 2 if abs(value) < 10 else 1
    return f"{value:.{digits}f}" + ("" if std is None or pd.isna(std) else f" ± {std:.{digits}f}")


def dots(table: pd.DataFrame) -> Figure:
    """A panel for each column of the table that was measured, a line for each method: measured filled, reported hollow;
    bars of one standard deviation. Raises FldiagError when nothing was measured."""
    lines = summary(table)
    is_measured = lines.groupby("column", sort=False)["measured"].apply(lambda v: v.notna().any())
    heads = [c for c in dict.fromkeys(lines["column"]) if is_measured[c]]
    if not heads:
        raise FldiagError(f"the {PICTURE} has no measured number", "train something first")
    lines = lines[lines["column"].isin(heads)]
    rows = {r: _row(r) for r in dict.fromkeys(lines["row"])}
    if len(rows) == 1 and len(heads) > 2:  # dots beneath each other would compare nothing
        return _listed(lines, heads, *rows.values())
    room = min(0.35 + max(style.text_width(r) for r in rows.values()), 2.2)
    width = style.wide()
    across = max(1, min(len(heads), int((width - room) / 1.15)))
    down = -(-len(heads) // across)
    across = -(-len(heads) // down)  # rows of about the same length
    tall = max(0.17 * len(rows) + 0.1, 0.5)
    titles, stand_in = _heads(heads)
    with style.paper():
        fig = style.figure(
            width if len(heads) > 2 else min(width, room + 2.2 * len(heads)),
            down * (tall + 0.62) + 0.6,
            layout="constrained",
        )
        axes = fig.subplots(down, across, sharey=True, squeeze=False)
        for ax, head, title in zip(axes.flat, heads, titles, strict=False):
            _panel(ax, lines[lines["column"] == head], rows)
            text = [line for part in title for line in style.wrap(part, 1.15, 2, 7)]
            ax.set_title("\n".join(map(style.plain, text)), fontsize=7)
        for ax in axes.flat[len(heads) :]:
            ax.remove()
        (metric, *further_metrics) = lines["metric"].dropna().unique()
        for ax in axes.flat[max(len(heads) - across, 0) : len(heads)]:  # the lowest of every column
            if not further_metrics:  # else it stands above every panel
                ax.set_xlabel(style.plain(words(metric)))
            elif all(str(m).startswith("rounds_to") for m in (metric, *further_metrics)):
                ax.set_xlabel("round")
        keys = [
            Line2D([], [], linestyle="none", marker="o", color=MEASURED.color, markersize=4),
            Line2D(
                [],
                [],
                linestyle="none",
                marker="o",
                markerfacecolor="none",
                color=REPORTED.color,
                markersize=4,
            ),
        ]
        spread = [lines[c].notna().any() for c in ("measured_std", "reported_std")]
        texts = [
            "measured here"
            + (f" on {stand_in}" if stand_in else "")
            + (" (± std of the seeds)" if spread[0] else ""),
            "reported in the paper" + (" (± as printed)" if spread[1] else ""),
        ]
        if _late(lines).any():
            keys.append(
                Line2D(
                    [],
                    [],
                    linestyle="none",
                    marker=">",
                    color=MEASURED.color,
                    markersize=4,
                    markerfacecolor="white",
                )
            )
            texts.append("not reached")
        style.legend(
            fig,
            keys,
            texts,
            loc="outside lower center",
            ncols=style.columns(texts, fig.get_figwidth() - 0.2),
        )
    return fig


def _listed(summary_rows: pd.DataFrame, heads: Sequence[str], row: str) -> Figure:
    """One method in several settings, as a table: a line a setting."""
    titles, stand_in = _heads(heads)
    cells = [
        (
            ", ".join(title),
            *(
                _pair(summary_rows[summary_rows["column"] == head].iloc[0], name)
                for name in ("measured", "reported")
            ),
        )
        for head, title in zip(heads, titles, strict=True)
    ]
    width = style.wide(
        min(style.TWO_COLUMNS, 2.4 + max(style.text_width(c[0], 7.5) for c in cells))
    )
    tops = (row, "measured" + (f" on\n{stand_in}" if stand_in else ""), "reported\nin the paper")
    with style.paper():
        lines = [style.wrap(c[0], width - 2.1, 2, 7.5) for c in cells]
        tall = sum(0.15 * len(line) + 0.05 for line in lines) + 0.55
        fig = style.figure(width, tall)
        at, places = tall - 0.08, (0.06, width - 1.05, width - 0.06)

        def write_line(texts: Sequence[str], **more: Any) -> None:
            for x, text, side in zip(places, texts, ("left", "right", "right"), strict=True):
                plain = "\n".join(map(style.plain, text.split("\n")))
                fig.text(x / width, at / tall, plain, ha=side, va="top", fontsize=7.5, **more)

        write_line(tops, weight="bold")
        at -= 0.34
        for y in (tall - 0.04, at, 0.06):
            fig.add_artist(
                Line2D(
                    [0.06 / width, 1 - 0.06 / width], [y / tall] * 2, color="black", linewidth=0.7
                )
            )
        at -= 0.06
        for line, cell in zip(lines, cells, strict=True):
            write_line(("\n".join(line), *cell[1:]))
            at -= 0.15 * len(line) + 0.05
    return fig


def _row(label: str) -> str:
    """A row as it is drawn: the method's display name, its options with their symbols."""
    method, _, options = label.partition(" (")
    option_texts = [
        f"{words_of.symbol(k)} = {v}" if v else k
        for k, _, v in (o.partition("=") for o in options.rstrip(")").split(", "))
    ]
    return words_of.method(method) + (f" ({', '.join(option_texts)})" if options else "")


def _heads(heads: Sequence[str]) -> tuple[list[list[str]], str]:
    """The panels' titles in parts, with display names; and the data that all were trained on instead of the paper's, which then
    stand in no title."""
    parts = [
        [
            words_of.data(p.removeprefix("here ")) if p.startswith("here ") else words_of.data(p)
            for p in h.split(", ")
        ]
        for h in heads
    ]
    instead = {
        p[-1] if h.rpartition(", ")[2].startswith("here ") else ""
        for h, p in zip(heads, parts, strict=True)
    }
    if len(instead) == 1 and (stand_in := instead.pop()):
        return [p[:-1] or [""] for p in parts], stand_in
    return [
        [*p[:-1], f"here {p[-1]}"] if h.rpartition(", ")[2].startswith("here ") else p
        for h, p in zip(heads, parts, strict=True)
    ], ""


def _late(lines: pd.DataFrame) -> pd.Series:
    """Which cells are first rounds of an accuracy that not all seeds reached."""
    if "seeds" not in lines:
        return pd.Series(False, index=lines.index)
    return lines["metric"].astype(str).str.startswith("rounds_to") & (lines["missing"] > 0).fillna(
        False
    )


def _panel(ax: Any, part: pd.DataFrame, rows: Mapping[str, str]) -> None:
    at = {r: len(rows) - 1 - i for i, r in enumerate(rows)}
    y = part["row"].map(at).to_numpy(float)
    for name, shift, options in (
        ("reported", -0.14, {"markerfacecolor": "none", "color": REPORTED.color}),
        ("measured", 0.14, {"color": MEASURED.color}),
    ):
        value, std = (part[c].to_numpy(dtype=float, na_value=np.nan) for c in (name, f"{name}_std"))
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
            **options,
        )
    numbers = np.concatenate(
        [part[c].to_numpy(dtype=float, na_value=np.nan) for c in ("measured", "reported")]
    )
    numbers = numbers[np.isfinite(numbers)]
    counted = bool(part["metric"].astype(str).str.startswith("rounds_to").any())
    if len(numbers) and numbers.min() > 0 and numbers.max() > 30 * numbers.min():
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(
            LogLocator(subs=(1, 3) if numbers.max() < 100 * numbers.min() else (1,))
        )
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        if counted and len(numbers):
            ax.set_xlim(0, 1.12 * numbers.max())
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=counted))
    late = _late(part).to_numpy(bool)
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
