"""What drift shows in a report: distances, cosines, proximal loss and similarity of representations, over the rounds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

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
    plus_minus,
    series,
)
from fldiag.plotting.style import number
from fldiag.results import select
from fldiag.results.select import last_round, only

PANELS = (
    (
        "global_local_divergence",
        "trained",
        "Distance of client weights from the received model",
        "‖w_k − w‖",
    ),
    (
        "local_local_divergence",
        "trained",
        "Distance of client weights from each other",
        "‖w_k − w_j‖",
    ),
    ("update_cosine", "trained", "Cosine between two clients' updates", "cosine"),
    ("server_cosine", "trained", "Cosine between a client's update and the server's", "cosine"),
    (
        "gradient_cosine",
        "received",
        "Cosine between a client's gradient and the global one",
        "cosine",
    ),
    ("proximal_loss", "trained", "Proximal loss of the trained models", "proximal loss"),
    ("cka", "trained", "Similarity of representations (CKA) with the received model", "CKA"),
)


def section(found: Collected) -> Section:
    made = Section(
        "drift",
        "Client drift",
        "How far, and in which directions, clients move in local training: means over the "
        "clients of a round, with standard errors.",
    )
    names = worlds(found.members)
    groups: dict[tuple[str, str], list[tuple[Member, pd.DataFrame]]] = {}
    for m, s in found.having("drift"):
        groups.setdefault((m.data, m.model), []).append(
            (m, only(s.frame, scope="global", estimator="exact"))
        )
    for (data, _), members in groups.items():
        title = (
            ""
            if len(groups) == 1
            else f"On {names[data]}, model {members[0][0].setting('model', 'name', 'unknown')}"
        )
        group = Group(title=title)
        for metric, moment, caption, y in PANELS:
            drawn = []
            for m, frame in members:
                rows = only(frame, metric=metric, moment=moment, layer=None)
                if rows["value"].notna().any():
                    drawn.append(series(m.label, rows, run=m.place, spread="stderr"))
            add_lines(group, caption, drawn, y, zero=y == "cosine")
        if group.figures:
            made.groups.append(group)
        if angles := _angles(members, title):
            made.groups.append(angles)
    if len({_asked(s.options) for _, s in found.having("drift")}) > 1:
        made.notes.append(
            "The runs' drift was computed with different options (see where the numbers come from); proximal "
            "loss and the cosine of g_u and g_p depend on them."
        )
    made.missing = [
        absent(m, "drift", clients=True) for m in found.members if "drift" not in m.tables
    ]
    incomplete(made, found, "drift")
    rows = [r for members in groups.values() for m, frame in members for r in _moved(m, frame)]
    if rows:
        made.tables.append(
            Table(
                "Last round, mean over clients ± standard error",
                (
                    "Run",
                    "Round",
                    "Global–local",
                    "Local–local",
                    "Cosine of updates",
                    "Cosine with server",
                    "Cosine of gradients",
                    "Proximal loss",
                    "CKA",
                ),
                rows,
            )
        )
    made.sources = [s.place for _, s in found.having("drift")]
    return made


def _asked(options: Mapping[str, Any]) -> str:
    return json.dumps(
        {k: options.get(k) for k in ("rho", "loss", "tau", "strength", "part", "batch")},
        default=str,
    )


def _angles(members: Sequence[tuple[Member, pd.DataFrame]], title: str) -> Group | None:
    """The cosine of g_u and g_p, with the radius of the perturbation to choose."""
    tables = [
        (m, only(frame, metric="cos_gu_gp", layer=None).dropna(subset=["rho"]))
        for m, frame in members
        if "rho" in frame.columns
    ]
    radii = sorted({float(r) for _, rows in tables for r in rows["rho"]})
    if not radii:
        return None
    id_ = f"drift-rho-{members[0][0].place}"
    frames = {
        f"{r:g}": {
            "series": [
                series(m.label, part, run=m.place, spread="stderr")
                for m, rows in tables
                if len(part := only(rows, rho=r))
            ]
        }
        for r in radii
    }
    figure = Figure(
        "Cosine between g_u, the gradient of the local loss at w + e(ρ), and g_p, that of the proximal loss",
        {"kind": "lines", "controls": [id_], "frames": frames, **axes("cosine", zero=True)},
        wide=True,
    )
    return Group(
        [figure],
        "Conflict of local and proximal loss"
        + (f", {title[0].lower()}{title[1:]}" if title else ""),
        controls=[Control(id_, "Radius ρ of the perturbation", [f"{r:g}" for r in radii])],
    )


def _moved(m: Member, frame: pd.DataFrame) -> list[list[str]]:
    last = last_round(frame, "global_local_divergence")
    if last is None:
        return []
    cells = []
    for metric, moment, _, _ in PANELS:
        rows = only(frame, metric=metric, moment=moment, layer=None, round=last)
        cells.append(
            plus_minus(select.number(rows), select.number(rows, column="stderr"))
            if len(rows)
            else number(None)
        )
    return [[m.label, str(last), *cells]]
