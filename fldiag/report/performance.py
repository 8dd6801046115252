"""Sections drawn from the table that training writes: learning curves, steps, personal accuracy."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

import pandas as pd

from fldiag.plotting.style import number
from fldiag.report.collect import Collection, Member, Source
from fldiag.report.elements import (
    Figure,
    Group,
    Missing,
    Section,
    Table,
    axes,
    lines,
    literal,
    percent,
    plus_minus,
    series,
    shorts,
)
from fldiag.report.summary import accuracy, interval, recipe, worlds
from fldiag.results import select
from fldiag.results.select import last_round, only

PERSONAL = "personal_accuracy"


def command(verb: str, m: Member, *more: str) -> str:
    """What to type, quoted for a shell."""
    return shlex.join(["fldiag", verb, str(m.given), *more])


def curves(found: Collection) -> Section:
    section = Section("curves", "Learning curves", "Accuracy and loss of the global model on the test split after each round, "
                      "and the mean minibatch loss of the clients that trained in it. A band is the standard deviation over "
                      "seeds.")
    names = worlds(found.members)
    for data, name in names.items():
        members = [m for m in found.members if m.data == data and "metrics" in m.tables]
        group = Group(title=f"On {name}" if len(names) > 1 else "")
        for metric, text, moment in (("accuracy", "test accuracy", "aggregated"), ("loss", "test loss", "aggregated"),
                                     ("minibatch_loss", "training loss of the clients", "trained")):
            drawn = _lines(members, metric, moment)
            if drawn:
                group.figures.append(Figure(text.capitalize(), lines(drawn, text, share=metric == "accuracy")))
        if group.figures:
            section.groups.append(group)
    for m in found.members:
        if "metrics" not in m.tables:
            section.missing.append(Missing(m.label, "its table of metrics is missing; training writes it after the first round"))
    rows = [r for m in found.members if "metrics" in m.tables for r in _best(m)]
    section.tables = [Table("Last and best round on the test split. Choosing the best round on test data flatters it.",
                            ("Run", "Last round", "Test accuracy (95 % interval)", "Test loss", "Best accuracy", "in round"),
                            rows)] if rows else []
    section.sources = [s.place for _, s in found.having("metrics")]
    return section


def _lines(members: Sequence[Member], metric: str, moment: str) -> list[dict[str, object]]:
    """A line a run; runs that differ by the seed only become one line with a band, theirs faint beneath."""
    tables = {m.place: _one_source(only(m.tables["metrics"].frame, metric=metric, moment=moment, scope="global"))
              for m in members}
    groups: dict[str, list[Member]] = {}
    for m in members:
        if tables[m.place]["value"].notna().any():
            groups.setdefault(recipe(m), []).append(m)
    drawn = []
    for group in groups.values():
        lead = group[0]
        several = len(group) > 1
        drawn += [series(m.label, tables[m.place], run=m.place, look=lead.place, faint=several) for m in group]
        if several:
            values = pd.concat([tables[m.place] for m in group]).groupby("round")["value"].agg(["mean", "std"]).reset_index()
            values = values.rename(columns={"mean": "value"})
            drawn.append(series(f"mean of {len(group)} seeds: {', '.join(m.label for m in group)}", values, run=lead.place,
                                spread="std"))
    return drawn


def _one_source(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the test split; without any, those of the first of the programs that told of this number."""
    test = rows[rows["slice"] == "test"]
    if len(test) or "source" not in rows or not len(rows):
        return test if len(test) else rows
    first = rows["source"].iloc[0]
    return rows[rows["source"].isna() if pd.isna(first) else rows["source"] == first]


def _best(m: Member) -> list[list[str]]:
    rows = only(m.tables["metrics"].frame, moment="aggregated", scope="global", slice="test").dropna(subset=["value"])
    right = only(rows, metric="accuracy")
    last = last_round(rows)
    if last is None:
        return []
    best = right.loc[right["value"].astype(float).idxmax()] if len(right) else None
    return [[m.label, str(last), interval(accuracy(m)), number(select.number(rows, "loss", round=last)),
             "–" if best is None else percent(best["value"]), "–" if best is None else str(int(best["round"]))]]


# -- personal models


def personal(found: Collection) -> Section:
    section = Section("personal", "Personalised models", "Accuracy of every client's own model on test examples of its own "
                      "mixture of classes, before and after fine-tuning. A point is a client; each counts once. Lines in a box: "
                      "the median, and dashed the mean.")
    names = worlds(found.members)
    tables: dict[int, tuple[Source, pd.DataFrame]] = {}
    for m in found.members:
        if (own := _own_accuracies(m)) is not None:
            tables[m.place] = own
        else:
            section.missing.append(_why_not_personal(m))
    cells = []
    for data, name in names.items():
        members = [(m, tables[m.place][1]) for m in found.members if m.data == data and m.place in tables]
        if not members:
            continue
        epochs = sorted({int(e) for _, rows in members for e in rows["index"]})
        frame = {"labels": [str(e) for e in epochs], "series": [_box(m, rows, epochs) for m, rows in members]}
        spec = {"kind": "boxes", "controls": [], **axes("personal accuracy", x="epochs of fine-tuning", share=True),
                "frames": {"": frame}}
        section.groups.append(Group([Figure("Personal accuracy of the clients", spec, wide=True)],
                                    f"On {name}" if len(names) > 1 else ""))
        cells += [row for m, rows in members for row in _over_the_clients(m, rows)]
    if cells:
        section.tables.append(Table("Over the clients", ("Run", "Epochs of fine-tuning", "Clients", "Mean ± standard deviation",
                                                         "Lowest", "Highest"), cells))
    section.sources = sorted({s.place for s, _ in tables.values()})
    return section


def _own_accuracies(m: Member) -> tuple[Source, pd.DataFrame] | None:
    """The table with the clients' own accuracies, and their rows: that of `fldiag personalise` before the run's metrics."""
    for kind in ("personalise", "metrics"):
        if (source := m.tables.get(kind)) is None:
            continue
        rows = only(source.frame, metric=PERSONAL, scope="client").dropna(subset=["value", "index"])
        if len(rows):
            return source, rows
    return None


def _why_not_personal(m: Member) -> Missing:
    if "origin" in m.run.index:
        return Missing(m.label, "another program trained it, and fine-tuning needs the config of its training")
    if m.run.status != "finished":
        return Missing(m.label, "clients start from the final model, and training has not come to its end")
    return Missing(m.label, "not computed yet", command("personalise", m))


def _over_the_clients(m: Member, rows: pd.DataFrame) -> Iterator[list[str]]:
    for e, part in rows.groupby("index"):
        values = part["value"].astype(float)
        yield [m.label, str(int(e)), str(len(values)), plus_minus(values.mean(), values.std(ddof=0), share=True),
               percent(values.min()), percent(values.max())]


def _box(m: Member, rows: pd.DataFrame, epochs: Sequence[int]) -> dict[str, object]:
    rows = rows.sort_values(["index", "client"])
    return {"name": literal(m.label), "run": m.place, "look": m.place, "x": [epochs.index(int(e)) for e in rows["index"]],
            "y": shorts(rows["value"]), "text": [f"client {int(c)}" for c in rows["client"]]}
