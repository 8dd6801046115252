"""Learning curves, from the table that training writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd

from fldiag.plotting.collected import Collected, Member, worlds
from fldiag.plotting.sections import Figure, Group, Missing, Section, Table, lines, percent, series
from fldiag.plotting.style import number
from fldiag.report.summary import accuracy, interval, replicates
from fldiag.results import select
from fldiag.results.select import SPLITS, last_round, only, split_of


def curves(found: Collected) -> Section:
    section = Section(
        "curves",
        "Learning curves",
        "Accuracy and loss of the global model after each round on the test split (of "
        "runs without test examples: on the training split), and the mean minibatch loss of the clients that "
        "trained in it. A band is the standard deviation over seeds.",
    )
    names = worlds(found.members)
    for data, name in names.items():
        members = [
            (m, m.tables["metrics"].frame)
            for m in found.members
            if m.data == data and "metrics" in m.tables
        ]
        group = Group(title=f"On {name}" if len(names) > 1 else "")
        drawings: list[tuple[str, str, Callable[[pd.DataFrame], pd.DataFrame]]] = [
            (metric, f"{word} {metric}", partial(_judged, split=split))
            for metric in ("accuracy", "loss")
            for split, word in (*SPLITS.items(), ("", "reported"))
        ]
        for metric, text, choose in [
            *drawings,
            ("minibatch_loss", "training loss of the clients", _of_training),
        ]:
            if drawn := _lines(
                [(m, choose(only(frame, metric=metric, scope="global"))) for m, frame in members]
            ):
                group.figures.append(
                    Figure(text.capitalize(), lines(drawn, text, share=metric == "accuracy"))
                )
        if group.figures:
            section.groups.append(group)
    for m in found.members:
        if "metrics" not in m.tables:
            section.missing.append(
                Missing(
                    m.label,
                    "its table of metrics is missing; training writes it after the first round",
                )
            )
    section.tables = [
        Table(
            f"Last and best round on the {word} split. Best-round accuracy is optimistically biased.",
            (
                "Run",
                "Last round",
                f"{word.capitalize()} accuracy (95 % interval)",
                f"{word.capitalize()} loss",
                "Best accuracy",
                "in round",
            ),
            rows,
        )
        for split, word in SPLITS.items()
        if (rows := [r for m in found.members if "metrics" in m.tables for r in _best(m, split)])
    ]
    section.sources = [s.place for _, s in found.having("metrics")]
    return section


def _lines(members: Sequence[tuple[Member, pd.DataFrame]]) -> list[dict[str, object]]:
    """A line a run; runs that differ by the seed only become one line with a band, theirs faint beneath."""
    tables = {m.place: rows for m, rows in members}
    drawn = []
    for group in replicates([m for m, _ in members if tables[m.place]["value"].notna().any()]):
        lead = group[0]
        several = len(group) > 1
        drawn += [
            series(m.label, tables[m.place], run=m.place, look=lead.place, faint=several)
            for m in group
        ]
        if several:
            values = (
                pd.concat([tables[m.place] for m in group])
                .groupby("round")["value"]
                .agg(["mean", "std"])
                .reset_index()
            )
            values = values.rename(columns={"mean": "value"})
            drawn.append(
                series(
                    f"mean of {len(group)} seeds: {', '.join(m.label for m in group)}",
                    values,
                    run=lead.place,
                    spread="std",
                )
            )
    return drawn


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
