"""Learning curves, from the table that training writes: the one chart of the report that is not a diagnostic's picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from fldiag.plotting.pages import Chart, Group, Missing, Section, Table, literal
from fldiag.plotting.style import Look, number
from fldiag.plotting.tables import floats
from fldiag.report.members import Collected, Member, worlds
from fldiag.report.summary import accuracy, interval, replicates
from fldiag.results import select
from fldiag.results.select import SPLITS, last_round, only, split_of
from fldiag.results.summary import percent

#: matplotlib's marks in plotly's words.
MARKS = {
    "o": "circle",
    "D": "diamond",
    "s": "square",
    "^": "triangle-up",
    "v": "triangle-down",
    "P": "cross",
    "X": "x",
    "p": "pentagon",
    "*": "star",
}
_DASHES = {1: "solid", 2: "dash", 4: "dashdot", 6: "longdashdot"}
#: Significant digits of the numbers in charts; downloads hold them as the tables do.
DIGITS = 5
#: Ticks on the axis of rounds.
TICKS = 8


def curves(collection: Collected) -> Section:
    section = Section(
        "curves",
        "Learning curves",
        "Accuracy and loss of the global model after each round on the test split (of "
        "runs without test examples: on the training split), and the mean minibatch loss of the clients that "
        "trained in it. A band is the standard deviation over seeds. Click on a name to hide its line.",
    )
    names = worlds(collection.members)
    for data, name in names.items():
        members = [
            (m, m.tables["metrics"].frame)
            for m in collection.members
            if m.data == data and "metrics" in m.tables
        ]
        group = Group(f"On {name}" if len(names) > 1 else "")
        drawings: list[tuple[str, str, Callable[[pd.DataFrame], pd.DataFrame]]] = [
            (metric, f"{word} {metric}", partial(_judged, split=split))
            for metric in ("accuracy", "loss")
            for split, word in (*SPLITS.items(), ("", "reported"))
        ]
        for metric, text, choose in [
            *drawings,
            ("minibatch_loss", "training loss of the clients", _of_training),
        ]:
            rows = [(m, choose(only(f, metric=metric, scope="global"))) for m, f in members]
            if traces := _lines(rows, share=metric == "accuracy"):
                last = max(m.run.done for m, _ in members)
                about = layout(text, last, share=metric == "accuracy")
                group.charts.append(Chart(text.capitalize(), "lines", traces, about))
        section.groups.append(group)
    for m in collection.members:
        if "metrics" not in m.tables:
            section.missing.append(
                Missing(
                    m.label,
                    "its table of metrics is missing; training writes it after the first round",
                )
            )
    numbers = Group()
    for split, word in SPLITS.items():
        trained = [m for m in collection.members if "metrics" in m.tables]
        if cells := [row for m in trained for row in _best(m, split)]:
            head = (
                "Run",
                "Last round",
                f"{word.capitalize()} accuracy (95 % interval)",
                f"{word.capitalize()} loss",
                "Best accuracy",
                "in round",
            )
            caption = f"Last and best round on the {word} split. Best-round accuracy is optimistically biased."
            numbers.tables.append(Table(caption, head, cells))
    section.groups.append(numbers)
    section.sources = [s.place for _, s in collection.having("metrics")]
    return section


def layout(y: str, last: int, *, share: bool = False) -> dict[str, Any]:
    """plotly's layout of lines over rounds up to the ``last``; few rounds have a tick each, and none between them."""
    axis: dict[str, Any] = {"automargin": True, "zeroline": False}
    ticks = {"dtick": 1} if last <= TICKS else {"nticks": TICKS}
    return {
        "xaxis": {
            **axis,
            **ticks,
            "title": {"text": "round", "standoff": 4},
            "tickformat": "d",
        },
        "yaxis": {
            **axis,
            "title": {"text": literal(y)},
            **({"tickformat": "~%"} if share else {}),
        },
        "margin": {"l": 48, "r": 14, "t": 30, "b": 44},
        "legend": {"orientation": "h", "y": -0.32, "yanchor": "top"},
        "showlegend": True,
        "hovermode": "closest",
    }


def line(
    name: str, rows: pd.DataFrame, look: Look, *, share: bool = False, faint: bool = False
) -> list[dict[str, Any]]:
    """plotly's traces of a line over rounds; where there is a column ``std``, a band of that half width."""
    rows = rows.dropna(subset=["round"]).sort_values("round")
    values = floats(rows["value"])
    text, x = literal(name), [int(r) for r in rows["round"]]
    traces: list[dict[str, Any]] = []
    if "std" in rows.columns:
        std = floats(rows["std"])
        red, green, blue = (int(look.color[i : i + 2], 16) for i in (1, 3, 5))
        edge = {
            "type": "scatter",
            "mode": "lines",
            "x": x,
            "line": {"width": 0},
            "legendgroup": text,
            "hoverinfo": "skip",
            "showlegend": False,
        }
        fill = {"fill": "tonexty", "fillcolor": f"rgba({red}, {green}, {blue}, 0.16)"}
        traces = [
            {**edge, "y": shorts(values - std)},
            {**edge, "y": shorts(values + std), **fill},
        ]
    dash = "solid" if look.dash == "-" else _DASHES.get(len(look.dash[1]), "dash")
    hover = f"round %{{x}}<br>{'%{y:.4~%}' if share else '%{y:.4~g}'}"
    return [
        *traces,
        {
            "type": "scatter",
            "mode": "lines+markers" if len(x) <= 30 else "lines",
            "x": x,
            "y": shorts(values),
            "name": text,
            "legendgroup": text,
            "opacity": 0.35 if faint else 1,
            "line": {
                "color": look.color,
                "dash": "dot" if look.dash != "-" and look.dash[1] == (1, 1) else dash,
                "width": 1 if faint else 2,
            },
            "marker": {
                "color": look.color,
                "symbol": MARKS[look.marker],
                "size": 4 if faint else 7,
            },
            "hovertemplate": f"<b>{text}</b><br>{hover}<extra></extra>",
        },
    ]


def shorts(values: np.ndarray) -> list[float | None]:
    """Numbers with few digits for a chart; None where there is none to draw."""
    return [float(f"{v:.{DIGITS}g}") if np.isfinite(v) else None for v in values]


def _lines(members: Sequence[tuple[Member, pd.DataFrame]], *, share: bool) -> list[dict[str, Any]]:
    """A line a run; runs that differ by the seed only become one line with a band, theirs faint beneath."""
    tables = {m.place: rows for m, rows in members}
    traces = []
    for group in replicates([m for m, _ in members if tables[m.place]["value"].notna().any()]):
        look, several = group[0].look, len(group) > 1
        for m in group:
            traces += line(m.label, tables[m.place], look, share=share, faint=several)
        if several:
            mean = (
                pd.concat([tables[m.place] for m in group])
                .groupby("round")["value"]
                .agg(["mean", "std"])
                .reset_index()
                .rename(columns={"mean": "value"})
            )
            text = f"mean of {len(group)} seeds: {', '.join(m.label for m in group)}"
            traces += line(text, mean, look, share=share)
    return traces


def _of_training(rows: pd.DataFrame) -> pd.DataFrame:
    return _one_source(only(rows, moment="trained"))


def _judged(rows: pd.DataFrame, split: str) -> pd.DataFrame:
    """The rows of the global model on the split by which it is judged where that is this one; ``split`` "": what another program
    reports, of a run that fldiag did not judge."""
    rows = only(rows, moment="aggregated")
    mine = only(rows, slice=split_of(rows))
    if split:
        return only(mine, slice=split)
    return rows.iloc[:0] if len(mine) else _one_source(rows)


def _one_source(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the test split; without any, those of the first of the programs that told of this number."""
    test = only(rows, slice="test")
    if len(test) or "source" not in rows or not len(rows):
        return test if len(test) else rows
    first = rows["source"].iloc[0]
    return rows[rows["source"].isna() if pd.isna(first) else rows["source"] == first]


def _best(m: Member, split: str) -> list[list[str]]:
    rows = only(m.tables["metrics"].frame, moment="aggregated", scope="global", slice=split).dropna(
        subset=["value"]
    )
    right = only(rows, metric="accuracy")
    last = last_round(rows)
    if last is None or (split == "train" and split_of(m.tables["metrics"].frame) == "test"):
        return []
    best = right.loc[right["value"].astype(float).idxmax()] if len(right) else None
    return [
        [
            m.label,
            str(last),
            interval(accuracy(m, split)),
            number(select.number(rows, "loss", round=last)),
            "–" if best is None else percent(best["value"]),
            "–" if best is None else str(int(best["round"])),
        ]
    ]
