"""What the second-order account shows in a report: the terms of every update, and who hurts whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fldiag.plotting.collected import Collected, Member, absent
from fldiag.plotting.sections import (
    Control,
    Figure,
    Group,
    Section,
    Table,
    axes,
    literal,
    plus_minus,
    shorts,
)
from fldiag.plotting.style import number
from fldiag.plotting.tables import floats
from fldiag.results import select
from fldiag.results.select import last_round, only

TERMS = {"linear": "linear g'd", "quadratic": "quadratic d'Hd/2", "rest": "rest"}


def section(found: Collected) -> Section:
    made = Section(
        "account",
        "Second-order account",
        "Why an update changes the global loss: L(w + d) − L(w) = g'd + d'Hd/2 "
        "+ rest, with gradient g and Hessian H at the received weights. Above zero an update does harm.",
    )
    tables = found.having("account")
    scales = {
        m.data: _reach([s.frame for other, s in tables if other.data == m.data]) for m, _ in tables
    }
    made.groups = [
        group for m, source in tables for group in _of_a_run(m, source.frame, *scales[m.data])
    ]
    made.missing = [
        absent(m, "forgetting", "--why", clients=True)
        for m in found.members
        if "account" not in m.tables
    ]
    rows = [row for m, s in tables for row in _all(m, s.frame)]
    if rows:
        made.tables.append(
            Table(
                "The aggregated update, and the mean over the clients' updates, in the last round",
                ("Run", "Round", "Loss of", "Update", "Change", "Linear", "Quadratic", "Rest"),
                rows,
            )
        )
    made.sources = [s.place for _, s in tables]
    return made


def _of_a_run(m: Member, frame: pd.DataFrame, near: float, reach: float) -> Iterator[Group]:
    """A run's terms by client, eigenvector and layer, and who hurts whom; a slider where there are several rounds."""
    rounds = select.rounds(frame, "change")
    if not rounds:
        return
    slider = Control(
        f"account-round-{m.place}",
        "Round",
        [str(r) for r in rounds],
        slider=True,
        start=len(rounds) - 1,
    )
    group = Group(title=m.label, pairs=True, controls=[slider] if len(rounds) > 1 else [])
    controls = [c.id for c in group.controls]
    end = "" if controls else f", round {rounds[0]}"
    parts = {str(r) if controls else "": only(frame, round=r) for r in rounds}
    clients = {k: _terms(part) for k, part in parts.items()}
    vectors = {
        k: _split(only(part, estimator="eigen", moment="trained"), "index")
        for k, part in parts.items()
    }
    layers = {
        k: _split(only(part, estimator="layer", moment="trained"), "layer")
        for k, part in parts.items()
    }
    change = f"change of the {only(frame, metric='change')['slice'].iloc[0]} loss"
    for caption, x, frames in (
        ("Terms of every client's update", "client (all: the aggregated update)", clients),
        ("Along the Hessian eigenvectors, mean over clients", "eigenvector", vectors),
        ("By layer, mean over clients", "layer", layers),
    ):
        if any(f["labels"] for f in frames.values()):
            spec = {"kind": "terms", "controls": controls, "frames": frames, **axes(change, x=x)}
            group.figures.append(Figure(caption + end, spec, run=m.place))
    harm = {k: _harm(only(part, metric="harm"), near, reach) for k, part in parts.items()}
    if any(h["x"] for h in harm.values()):
        group.figures.append(
            Figure(
                f"Who hurts whom: change of the loss of a client by another's update{end}",
                {
                    "kind": "heatmap",
                    "controls": controls,
                    "frames": harm,
                    "colours": "diverging",
                    "square": True,
                    "what": "change of the loss",
                    **axes("update of client", x="its own loss changes"),
                },
                run=m.place,
            )
        )
    yield group


def _terms(rows: pd.DataFrame) -> dict[str, Any]:
    exact = only(rows, estimator="exact", metric=["change", *TERMS])
    ids = sorted({int(c) for c in exact["client"].dropna()})
    labels = [*(str(c) for c in ids), "all"]

    def values(metric: str) -> list[float | None]:
        part = only(exact, metric=metric)
        return shorts([select.number(part, client=c) for c in (*ids, None)])

    return {
        "labels": labels if len(exact) else [],
        "stacked": True,
        "marks": values("change"),
        "series": [
            {"name": text, "term": i, "x": labels, "y": values(k)}
            for i, (k, text) in enumerate(TERMS.items())
        ],
    }


def _split(rows: pd.DataFrame, by: str) -> dict[str, Any]:
    rows = rows.dropna(subset=[by])
    order = (
        sorted(rows[by].unique(), key=lambda v: (v == 0, v))
        if by == "index"
        else list(dict.fromkeys(rows[by]))
    )
    labels = [literal(v) if by == "layer" else "others" if v == 0 else str(int(v)) for v in order]
    return {
        "labels": labels,
        "stacked": False,
        "series": [
            {
                "name": TERMS[metric],
                "term": i,
                "x": labels,
                "y": shorts(
                    [
                        only(rows, metric=metric, **{by: v})["value"].astype(float).mean()
                        for v in order
                    ]
                ),
            }
            for i, metric in enumerate(("linear", "quadratic"))
        ],
    }


def _reach(frames: Sequence[pd.DataFrame]) -> tuple[float, float]:
    """(median, largest) size of what updates do to others, over all runs on the same data."""
    size = np.abs(np.concatenate([floats(only(f, metric="harm")["value"]) for f in frames]))
    size = size[np.isfinite(size)]
    reach = float(size.max()) if len(size) and size.max() > 0 else 1.0
    return min(max(float(np.median(size)) if len(size) else reach, 1e-6 * reach), reach), reach


def _harm(rows: pd.DataFrame, near: float, reach: float) -> dict[str, Any]:
    """Colours on a scale that is linear around zero and logarithmic beyond the median size, as harm spans decades."""
    wide = rows.assign(value=floats(rows["value"])).pivot_table(
        index="client", columns="client_b", values="value"
    )
    values = wide.to_numpy(dtype=float)

    def place(v: Any) -> Any:
        return np.sign(v) * np.log10(1 + np.abs(v) / near)

    ends = [reach, reach / 10 if reach > 10 * near else None]
    ticks = [(sign * e, sign) for e in ends if e for sign in (-1, 1)] + [(0.0, 0)]
    return {
        "x": [str(int(c)) for c in wide.columns],
        "y": [str(int(c)) for c in wide.index],
        "z": [shorts(r) for r in place(values)],
        "v": [shorts(r) for r in values],
        "range": [-float(place(reach)), float(place(reach))],
        "ticks": [[float(place(v)), number(v, 2)] for v, _ in sorted(ticks)],
    }


def _all(m: Member, frame: pd.DataFrame) -> list[list[str]]:
    exact = only(frame, estimator="exact", metric=["change", *TERMS])
    last = last_round(exact, "change")
    if last is None:
        return []
    exact, made = only(exact, round=last), []
    for name, rows in (
        ("aggregated", only(exact, client=None)),
        ("mean over clients", exact[exact["client"].notna()]),
    ):
        values = [only(rows, metric=k)["value"].astype(float) for k in ("change", *TERMS)]
        made.append(
            [
                m.label,
                str(last),
                str(exact["slice"].iloc[0]),
                name,
                *(plus_minus(v.mean(), None) for v in values),
            ]
        )
    return made
