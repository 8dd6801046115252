"""What spectra show in a report: the largest eigenvalues of the Hessian, those that landscapes found included."""

from __future__ import annotations

import pandas as pd

from fldiag.plotting.collected import Collected, Piece, absent, pieces, worlds
from fldiag.plotting.sections import (
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
from fldiag.results import select
from fldiag.results.select import only


def section(found: Collected) -> Section:
    made = Section(
        "curvature",
        "Hessian eigenvalues",
        "The largest eigenvalues of the Hessian of the loss, with residuals: "
        "how sharp the minimum is, and in how many directions.",
    )
    names = worlds(found.members)
    groups: dict[tuple[str, str, str], dict[str, Piece]] = {}
    for piece in pieces(found, "spectrum") + pieces(found, "landscape"):
        if piece.claim.client is not None or not (piece.rows["metric"] == "eigenvalue").any():
            continue
        m = piece.member
        groups.setdefault((m.data, m.model, piece.claim.slice), {}).setdefault(
            piece.label, piece
        )  # a spectrum comes first
    cells = []
    for (data, _, slice_), members in groups.items():
        drawn = []
        for piece in members.values():
            rows = (
                only(piece.rows, metric="eigenvalue", layer=None)
                .dropna(subset=["index"])
                .sort_values("index")
            )
            drawn.append(
                {
                    "name": literal(piece.label),
                    "run": piece.member.place,
                    "look": piece.member.place,
                    "x": [int(i) for i in rows["index"]],
                    "y": shorts(rows["value"]),
                    "error": shorts(rows["residual"]),
                }
            )
            trace = only(piece.rows, metric="trace", layer=None)
            top, ratio = only(rows, index=1), select.number(piece.rows, "eigenvalue_ratio")
            done = all(v in (True, "True") for v in rows["converged"].dropna())
            cells.append(
                [
                    piece.label,
                    slice_,
                    "–" if piece.claim.n is None else f"{piece.claim.n:,}",
                    _shown(top, "residual"),
                    number(ratio),
                    _shown(trace, "stderr"),
                    "yes" if done else "no",
                    piece.source.name,
                ]
            )
        title = f"Eigenvalues on {slice_ or 'unnamed data'}" + (
            f", {names[data]}" if len(names) > 1 else ""
        )
        made.groups.append(
            Group(
                [
                    Figure(
                        title,
                        {
                            "kind": "lines",
                            "controls": [],
                            "frames": {"": {"series": drawn}},
                            **axes("eigenvalue", x="index"),
                        },
                        wide=True,
                    )
                ]
            )
        )
    there = {p.member.place for members in groups.values() for p in members.values()}
    made.missing = [absent(m, "spectrum") for m in found.members if m.place not in there]
    if cells:
        made.tables.append(
            Table(
                "Curvature",
                (
                    "Checkpoint",
                    "Slice",
                    "Examples",
                    "λ₁ ± residual",
                    "λ₁/λ₅",
                    "Trace ± stderr",
                    "All converged",
                    "Table",
                ),
                cells,
            )
        )
    made.sources = sorted({p.source.place for members in groups.values() for p in members.values()})
    return made


def _shown(rows: pd.DataFrame, error: str) -> str:
    return plus_minus(select.number(rows), select.number(rows, column=error))
