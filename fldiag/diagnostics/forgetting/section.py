"""What forgetting shows in a report: accuracies before and after local training, and what each client forgot by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from fldiag.plotting.collected import Collected, Member, absent, incomplete, worlds
from fldiag.plotting.sections import (
    Control,
    Figure,
    Group,
    Section,
    Table,
    add_lines,
    axes,
    percent,
    plus_minus,
    series,
    short,
    shorts,
)
from fldiag.plotting.tables import MANY, floats, of_clients, percentiles
from fldiag.results import select
from fldiag.results.select import SPLITS, last_round, only, split_of

MOMENTS = {
    "received": "as received",
    "trained": "after local training",
    "aggregated": "after averaging",
}
SHARES = {
    "drop": "accuracy lost in local training",
    "forgotten": "forgotten: right before, wrong after",
    "learned": "learned: wrong before, right after",
    "restored": "restored by averaging, of the forgotten",
}


def section(found: Collected) -> Section:
    splits = [
        split
        for split in SPLITS
        if any(split_of(s.frame) == split for _, s in found.having("forgetting"))
    ] or ["test"]
    words = " or ".join(SPLITS[split] for split in splits).capitalize()
    made = Section(
        "forgetting",
        "Forgetting",
        f"{words} accuracy of the model that clients receive, of theirs after local "
        "training (mean and standard deviation over clients), and of their average. What local training forgets, "
        "averaging partly restores.",
    )
    names = worlds(found.members)
    for data, name, split in [
        (data, name, split) for data, name in names.items() for split in splits
    ]:
        word = SPLITS[split]
        members = [
            (m, s.frame)
            for m, s in found.having("forgetting")
            if m.data == data and split_of(s.frame) == split
        ]
        group = Group(title=f"On {name}" if len(names) > 1 else "")
        for moment, text in MOMENTS.items():
            drawn = []
            for m, frame in members:
                rows = only(
                    frame, metric="accuracy", moment=moment, scope="global", slice=split, index=None
                )
                if moment == "trained":
                    std = only(
                        frame,
                        metric="accuracy_std",
                        moment=moment,
                        scope="global",
                        slice=split,
                        index=None,
                    )
                    rows = rows.assign(std=rows["round"].map(std.set_index("round")["value"]))
                if rows["value"].notna().any():
                    drawn.append(
                        series(
                            m.label,
                            rows,
                            run=m.place,
                            spread="std" if moment == "trained" else "interval",
                        )
                    )
            add_lines(
                group, f"{word.capitalize()} accuracy {text}", drawn, f"{word} accuracy", share=True
            )
        for metric, text in SHARES.items():
            drawn = [
                series(m.label, rows, run=m.place)
                for m, frame in members
                if (
                    rows := only(
                        frame,
                        metric=metric,
                        moment="trained",
                        scope="global",
                        slice=split,
                        index=None,
                    )
                )["value"]
                .notna()
                .any()
            ]
            add_lines(
                group,
                text.capitalize(),
                drawn,
                text.split(":")[0],
                share=True,
                zero=metric == "drop",
            )
        _match(group.figures[: len(MOMENTS)])
        if group.figures:
            made.groups.append(group)
    _heatmaps(made, found)
    made.missing = [
        absent(m, "forgetting", clients=True) for m in found.members if "forgetting" not in m.tables
    ]
    incomplete(made, found, "forgetting")
    for split in splits:
        having = [(m, s.frame) for m, s in found.having("forgetting") if split_of(s.frame) == split]
        if rows := [r for m, frame in having for r in _lost(m, frame)]:
            made.tables.append(
                Table(
                    f"Last round, {SPLITS[split]} split, mean over clients",
                    (
                        "Run",
                        "Round",
                        "Received",
                        "Trained ± std",
                        "Aggregated",
                        "Lost (drop)",
                        "Forgotten",
                        "Learned",
                        "Restored",
                        "Largest loss of a class",
                    ),
                    rows,
                )
            )
        if clients := [r for m, frame in having for r in _clients(m, frame)]:
            made.tables.append(
                Table(
                    f"Clients in the last round, {SPLITS[split]} split",
                    (
                        "Client",
                        "Run",
                        "Training examples",
                        "Classes held",
                        "Accuracy on its classes",
                        "Accuracy on others",
                        "Lost (drop)",
                        "Forgotten",
                        "Largest loss of a class",
                    ),
                    clients,
                )
            )
    made.sources = [s.place for _, s in found.having("forgetting")]
    return made


def _clients(m: Member, frame: pd.DataFrame) -> list[list[str]]:
    """A row a client that was trained in the last round; of many clients their percentiles, each column by itself."""
    rows = only(frame, scope="client", moment="trained", slice=split_of(frame), index=None)
    last = last_round(only(rows, metric="drop"))
    if last is None:
        return []
    wide = (
        only(rows, round=last)
        .drop_duplicates(["client", "metric"])
        .pivot(index="client", columns="metric", values="value")
    )
    held = only(frame, metric="class_examples").dropna(subset=["value"]).groupby("client")["value"]
    wide = wide.assign(examples=held.sum(), classes=held.agg(lambda v: (v > 0).sum())).astype(float)
    rows = of_clients([{"client": f"{int(k)}", **row} for k, row in wide.to_dict("index").items()])

    def count(value: float | None) -> str:
        return "–" if value is None or pd.isna(value) else f"{int(value):,}"

    return [
        [
            row["client"],
            m.label,
            count(row["examples"]),
            count(row["classes"]),
            *(
                percent(row.get(name))
                for name in ("accuracy_seen", "accuracy_unseen", "drop", "forgotten", "forgetting")
            ),
        ]
        for row in rows
    ]


def _match(figures: Sequence[Figure]) -> None:
    """One range of the vertical axis, since these are compared with each other."""
    ends = [
        v
        for f in figures
        for s in f.spec["frames"][""]["series"]
        for key in ("y", "low", "high")
        for v in s.get(key, ())
        if v is not None
    ]
    if ends:
        room = 0.05 * (max(ends) - min(ends) or 1)
        for f in figures:
            f.spec["yrange"] = [short(min(ends) - room), short(max(ends) + room)]


def _lost(m: Member, frame: pd.DataFrame) -> list[list[str]]:
    rows = only(frame, scope="global", slice=split_of(frame), index=None)
    last = last_round(only(rows, metric="accuracy", moment="trained"))
    if last is None:
        return []
    rows = only(rows, round=last)

    def of(metric: str, moment: str = "trained") -> float | None:
        return select.number(rows, metric, moment=moment)

    return [
        [
            m.label,
            str(last),
            percent(of("accuracy", "received")),
            plus_minus(of("accuracy"), of("accuracy_std"), share=True),
            percent(of("accuracy", "aggregated")),
            *(percent(of(k)) for k in ("drop", "forgotten", "learned", "restored", "forgetting")),
        ]
    ]


def _heatmaps(made: Section, found: Collected) -> None:
    """Client by class, one a run, all on one scale and following one slider."""
    tables = {
        m.place: (m, rows, only(s.frame, metric="class_examples"))
        for m, s in found.having("forgetting")
        if len(
            rows := only(s.frame, metric="class_forgetting", scope="client").dropna(
                subset=["client", "index"]
            )
        )
    }
    if not tables:
        return
    rounds = sorted({int(r) for _, rows, _ in tables.values() for r in rows["round"].dropna()})
    reach = (
        max(
            float(rows["value"].abs().max())
            for _, rows, _ in tables.values()
            if rows["value"].notna().any()
        )
        if any(rows["value"].notna().any() for _, rows, _ in tables.values())
        else 1.0
    )
    reach = float(f"{reach or 1:.3g}")
    group = Group(
        title="By client and class",
        controls=[
            Control(
                "forgetting-round",
                "Round",
                [str(r) for r in rounds],
                slider=True,
                start=len(rounds) - 1,
            )
        ],
        notes=[
            "Accuracy on a class as received minus after the client's training: orange is forgotten, purple learned. Grey: "
            "too few examples. A dot: the client has no training example of the class."
        ],
    )
    for m, rows, held in tables.values():
        classes = sorted({int(c) for c in rows["index"]})
        none = {
            (int(c), int(k))
            for c, k, n in zip(held["client"], held["index"], held["value"], strict=True)
            if n == 0
        }
        many = max(part["client"].nunique() for _, part in rows.groupby("round")) > MANY
        frames = {
            str(int(r)): _cells(part, classes, none, many) for r, part in rows.groupby("round")
        }
        who = "percentile of the clients" if many else "client"
        group.figures.append(
            Figure(
                f"{m.label}: forgetting by class",
                {
                    "kind": "heatmap",
                    "controls": ["forgetting-round"],
                    "frames": frames,
                    "colours": "diverging",
                    "range": [-reach, reach],
                    "what": "accuracy lost",
                    **axes(who, x="class", share=True),
                },
                run=m.place,
            )
        )
    made.groups.append(group)


def _cells(
    rows: pd.DataFrame, classes: Sequence[int], none: set[tuple[int, int]], many: bool
) -> dict[str, Any]:
    ids = sorted({int(c) for c in rows["client"]})
    cells = np.full((len(ids), len(classes)), np.nan)
    for c, k, v in zip(rows["client"], rows["index"], floats(rows["value"]), strict=True):
        cells[ids.index(int(c)), classes.index(int(k))] = v
    if many:
        spread = percentiles(pd.DataFrame(cells))
        return {
            "x": [str(c) for c in classes],
            "y": [f"{p} %" for p in spread.index],
            "z": [shorts(r) for r in spread.to_numpy()],
            "dots": [],
        }
    dots = [[classes.index(k), ids.index(c)] for c, k in sorted(none) if c in ids and k in classes]
    return {
        "x": [str(c) for c in classes],
        "y": [str(c) for c in ids],
        "z": [shorts(r) for r in cells],
        "dots": dots,
    }
