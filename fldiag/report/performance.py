"""Learning curves, from the table that training writes: the one chart of the report that is not a diagnostic's picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from fldiag.plotting.pages import Chart, Group, Missing, Section, literal, tables_of
from fldiag.plotting.style import Look, number
from fldiag.plotting.tables import floats
from fldiag.report.members import Collected, Member, worlds
from fldiag.report.summary import accuracy, interval, replicates
from fldiag.results import select
from fldiag.results.select import SPLITS, last_round, only, split_of
from fldiag.results.summary import percent

#: matplotlib's marks in plotly's words.
MARKS = {"o": "circle", "D": "diamond", "s": "square", "^": "triangle-up", "v": "triangle-down"}
MARKS |= {"P": "cross", "X": "x", "p": "pentagon", "*": "star"}
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
        "trained in it. A bar is the standard deviation over seeds. Click on a name to hide its line.",
    )
    tables = [(m, s.frame) for m, s in collection.having("metrics")]
    names = worlds(collection.members)
    for data, name in names.items():
        members = [(m, frame) for m, frame in tables if m.data == data]
        group = Group(f"On {name}" if len(names) > 1 else "")
        for metric in ("accuracy", "loss"):
            for split, word in (*SPLITS.items(), ("", "reported")):
                rows = [
                    (m, _judged(only(f, metric=metric, scope="global"), split)) for m, f in members
                ]
                group.charts += _charts(f"{word} {metric}", rows, share=metric == "accuracy")
        rows = [(m, only(f, metric="minibatch_loss", scope="global")) for m, f in members]
        rows = [(m, _one_source(only(r, moment="trained"))) for m, r in rows]
        group.charts += _charts("training loss of the clients", rows)
        section.groups.append(group)
    why = "its table of metrics is missing; training writes it after the first round"
    lacking = [m for m in collection.members if "metrics" not in m.tables]
    section.missing = [Missing(m.label, why) for m in lacking]
    numbers = Group()
    for split, word in SPLITS.items():
        cells = [row for m, _ in tables for row in _best(m, split)]
        caption = f"Last and best round on the {word} split. Best-round accuracy is optimistically biased."
        numbers.tables += tables_of(caption, cells)
    section.groups.append(numbers)
    section.sources = [s.place for _, s in collection.having("metrics")]
    return section


def _charts(
    text: str, tables: Sequence[tuple[Member, pd.DataFrame]], share: bool = False
) -> list[Chart]:
    """A chart with a line a run, none where there are no values; runs that differ by the seed only become one line, with bars of
    their standard deviation, and theirs faint beneath."""
    rows_of = {m.place: rows for m, rows in tables}
    traces = []
    for group in replicates([m for m, rows in tables if rows["value"].notna().any()]):
        look, several = group[0].look, len(group) > 1
        traces += [line(m.label, rows_of[m.place], look, share, several) for m in group]
        if several:
            values = pd.concat([rows_of[m.place] for m in group]).groupby("round")["value"]
            means = values.agg(value="mean", std="std").reset_index()
            name = f"mean of {len(group)} seeds: {', '.join(m.label for m in group)}"
            traces.append(line(name, means, look, share))
    last = max((m.run.done for m, _ in tables), default=0)
    return [Chart(text.capitalize(), "lines", traces, layout(text, last, share))] if traces else []


def layout(y: str, last: int, share: bool = False) -> dict[str, Any]:
    """plotly's layout of lines over rounds up to the ``last``; few rounds have a tick each, and none between them."""
    ticks = {"dtick": 1} if last <= TICKS else {"nticks": TICKS}
    frame = {"automargin": True, "zeroline": False}
    rounds = {**frame, **ticks, "title": {"text": "round", "standoff": 4}, "tickformat": "d"}
    values = {**frame, "title": {"text": literal(y)}, **({"tickformat": "~%"} if share else {})}
    return {
        "xaxis": rounds,
        "yaxis": values,
        "margin": {"l": 48, "r": 14, "t": 30, "b": 44},
        "legend": {"orientation": "h", "y": -0.32, "yanchor": "top"},
        "showlegend": True,
        "hovermode": "closest",
    }


def line(
    name: str, rows: pd.DataFrame, look: Look, share: bool = False, faint: bool = False
) -> dict[str, Any]:
    """plotly's trace of a line over rounds; where there is a column ``std``, with bars of that half width."""
    rows = rows.dropna(subset=["round"]).sort_values("round")
    text, values = literal(name), "%{y:.4~%}" if share else "%{y:.4~g}"
    dash = "solid" if look.dash == "-" else ",".join(f"{3 * points:g}px" for points in look.dash[1])
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers" if len(rows) <= 30 else "lines",
        "x": [int(r) for r in rows["round"]],
        "y": shorts(floats(rows["value"])),
        "name": text,
        "opacity": 0.35 if faint else 1,
        "line": {"color": look.color, "dash": dash, "width": 1 if faint else 2},
        "marker": {"color": look.color, "symbol": MARKS[look.marker], "size": 4 if faint else 7},
        "hovertemplate": f"<b>{text}</b><br>round %{{x}}<br>{values}<extra></extra>",
    }
    if "std" in rows.columns:
        trace["error_y"] = {"array": shorts(floats(rows["std"])), "thickness": 1, "width": 0}
    return trace


def shorts(values: np.ndarray) -> list[float | None]:
    """Numbers with few digits for a chart; None where there is none to draw."""
    return [float(f"{v:.{DIGITS}g}") if np.isfinite(v) else None for v in values]


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


def _best(m: Member, split: str) -> list[dict[str, str]]:
    rows = only(m.tables["metrics"].frame, moment="aggregated", scope="global", slice=split).dropna(
        subset=["value"]
    )
    right = only(rows, metric="accuracy")
    last = last_round(rows)
    if last is None or (split == "train" and split_of(m.tables["metrics"].frame) == "test"):
        return []
    best = right.loc[right["value"].astype(float).idxmax()] if len(right) else None
    word = SPLITS[split].capitalize()
    return [
        {
            "Run": m.label,
            "Last round": str(last),
            f"{word} accuracy (95 % interval)": interval(accuracy(m, split)),
            f"{word} loss": number(select.number(rows, "loss", round=last)),
            "Best accuracy": "–" if best is None else percent(best["value"]),
            "in round": "–" if best is None else str(int(best["round"])),
        }
    ]
