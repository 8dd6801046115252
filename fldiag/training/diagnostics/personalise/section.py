"""What personal models show in a report: the accuracy of every client's own, before and after fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from fldiag.plotting.collected import Collected, Member, Source, command, own, worlds
from fldiag.plotting.sections import Figure, Group, Missing, Section, Table, axes, literal, percent, plus_minus, shorts
from fldiag.results.select import only
from fldiag.training.personalise import METRIC


def section(found: Collected) -> Section:
    made = Section("personal", "Personalised models", "Accuracy of every client's own model on test examples of its own "
                   "mixture of classes, before and after fine-tuning. A point is a client; each counts once. Lines in a box: "
                   "the median, and dashed the mean.")
    names = worlds(found.members)
    tables: dict[int, tuple[Source, pd.DataFrame]] = {}
    for m in found.members:
        for kind in ("personalise", "metrics"):
            source = m.tables.get(kind)
            rows = only(own(source, [m]), metric=METRIC, scope="client").dropna(subset=["value", "index"]) if source else None
            if source and rows is not None and len(rows):
                tables[m.place] = source, rows
                break
        else:
            why = "not computed yet"
            if "origin" in m.run.index:
                why = "another program trained it, and fine-tuning needs the config of its training"
            elif m.run.status != "finished":
                why = "clients start from the final model, and training has not come to its end"
            made.missing.append(Missing(m.label, why, command("personalise", m) if why == "not computed yet" else ""))
    cells = []
    for data, name in names.items():
        members = [m for m in found.members if m.data == data and m.place in tables]
        if not members:
            continue
        epochs = sorted({int(e) for m in members for e in tables[m.place][1]["index"]})
        spec = {"kind": "boxes", "controls": [], **axes("personal accuracy", x="epochs of fine-tuning", share=True), "frames": {
            "": {"labels": [str(e) for e in epochs], "series": [_box(m, tables[m.place][1], epochs) for m in members]}}}
        made.groups.append(Group([Figure("Personal accuracy of the clients", spec, wide=True)],
                                 f"On {name}" if len(names) > 1 else ""))
        for m in members:
            for e, part in tables[m.place][1].groupby("index"):
                values = part["value"].astype(float)
                cells.append([m.label, str(int(e)), str(len(values)), plus_minus(values.mean(), values.std(ddof=0), share=True),
                              percent(values.min()), percent(values.max())])
    if cells:
        made.tables.append(Table("Over the clients", ("Run", "Epochs of fine-tuning", "Clients", "Mean ± standard deviation",
                                                      "Lowest", "Highest"), cells))
    made.sources = sorted({s.place for s, _ in tables.values()})
    return made


def _box(m: Member, rows: pd.DataFrame, epochs: Sequence[int]) -> dict[str, object]:
    rows = rows.sort_values(["index", "client"])
    return {"name": literal(m.label), "run": m.place, "look": m.place, "x": [epochs.index(int(e)) for e in rows["index"]],
            "y": shorts(rows["value"]), "text": [f"client {int(c)}" for c in rows["client"]]}
