"""What personal models show in a report: the accuracy of every client's own, before and after fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from fldiag.plotting.collected import Collected, Member, Source, command, own, worlds
from fldiag.plotting.sections import (
    Figure,
    Group,
    Missing,
    Section,
    Table,
    axes,
    literal,
    percent,
    plus_minus,
    shorts,
)
from fldiag.results.select import only
from fldiag.results.table import PERSONAL


def section(found: Collected) -> Section:
    made = Section(
        "personal",
        "Personalised models",
        "Accuracy of every client's own model on test examples of its own "
        "mixture of classes, before and after fine-tuning. A point is a client; each counts once. Lines in a box: "
        "the median, and dashed the mean.",
    )
    names = worlds(found.members)
    tables: dict[int, tuple[Source, pd.DataFrame]] = {}
    for m in found.members:
        if (accuracies := _own_accuracies(m)) is not None:
            tables[m.place] = accuracies
        else:
            made.missing.append(_why_not_personal(m))
    cells = []
    for data, name in names.items():
        members = [
            (m, tables[m.place][1]) for m in found.members if m.data == data and m.place in tables
        ]
        if not members:
            continue
        epochs = sorted({int(e) for _, rows in members for e in rows["index"]})
        frame = {
            "labels": [str(e) for e in epochs],
            "series": [_box(m, rows, epochs) for m, rows in members],
        }
        spec = {
            "kind": "boxes",
            "controls": [],
            **axes("personal accuracy", x="epochs of fine-tuning", share=True),
            "frames": {"": frame},
        }
        made.groups.append(
            Group(
                [Figure("Personal accuracy of the clients", spec, wide=True)],
                f"On {name}" if len(names) > 1 else "",
            )
        )
        cells += [row for m, rows in members for row in _over_the_clients(m, rows)]
    if cells:
        made.tables.append(
            Table(
                "Over the clients",
                (
                    "Run",
                    "Epochs of fine-tuning",
                    "Clients",
                    "Mean ± standard deviation",
                    "Lowest",
                    "Highest",
                ),
                cells,
            )
        )
    made.sources = sorted({s.place for s, _ in tables.values()})
    return made


def _own_accuracies(m: Member) -> tuple[Source, pd.DataFrame] | None:
    """The table with the clients' own accuracies, and their rows: that of `fldiag personalise` before the run's metrics."""
    for kind in ("personalise", "metrics"):
        if (source := m.tables.get(kind)) is None:
            continue
        rows = only(own(source, [m]), metric=PERSONAL, scope="client").dropna(
            subset=["value", "index"]
        )
        if len(rows):
            return source, rows
    return None


def _why_not_personal(m: Member) -> Missing:
    if "origin" in m.run.index:
        return Missing(
            m.label, "another program trained it, and fine-tuning needs the config of its training"
        )
    if m.run.status != "finished":
        return Missing(
            m.label, "clients start from the final model, and training has not come to its end"
        )
    return Missing(m.label, "not computed yet", command("personalise", m))


def _over_the_clients(m: Member, rows: pd.DataFrame) -> Iterator[list[str]]:
    for e, part in rows.groupby("index"):
        values = part["value"].astype(float)
        yield [
            m.label,
            str(int(e)),
            str(len(values)),
            plus_minus(values.mean(), values.std(ddof=0), share=True),
            percent(values.min()),
            percent(values.max()),
        ]


def _box(m: Member, rows: pd.DataFrame, epochs: Sequence[int]) -> dict[str, object]:
    rows = rows.sort_values(["index", "client"])
    return {
        "name": literal(m.label),
        "run": m.place,
        "look": m.place,
        "x": [epochs.index(int(e)) for e in rows["index"]],
        "y": shorts(rows["value"]),
        "text": [f"client {int(c)}" for c in rows["client"]],
    }
