"""What landscapes show in a report: surfaces on shared scales, turned together."""

from __future__ import annotations

from typing import Any

import pandas as pd

from fldiag.diagnostics.landscape import interactive
from fldiag.diagnostics.landscape.surfaces import AXES, Surface, scale
from fldiag.diagnostics.landscape.surfaces import surfaces as grids_of
from fldiag.plotting.collected import Collected, Piece, absent, pieces, worlds
from fldiag.plotting.sections import Figure, Group, Section, Table, plus_minus
from fldiag.plotting.style import number
from fldiag.results import select

TITLES = {
    "eigen": "Along the two sharpest directions (Hessian eigenvectors)",
    "random": "Along two random directions",
    "plane": "Plane through three checkpoints",
    "pca": "Plane of the trajectory (principal axes, with their shares of variance)",
}

SHORT = {"eigen": "eigenvectors", "random": "random", "plane": "plane", "pca": "trajectory"}


def section(found: Collected) -> Section:
    made = Section(
        "landscapes",
        "Loss landscapes",
        "The loss around the weights; the middle is the weights themselves. Drag "
        "to turn, scroll or pinch to zoom: all scenes move together, and those of one group share height and "
        "colours.",
    )
    names = worlds(found.members)
    groups: dict[tuple[Any, ...], list[Piece]] = {}
    for piece in pieces(found, "landscape"):
        if not (piece.rows["metric"] == "loss").any():
            continue
        m, own = piece.member, piece.variant in ("pca", "plane")  # every such plane is another one
        key = (
            piece.variant,
            m.data,
            m.model,
            piece.claim.slice,
            piece.claim.n,
            m.place if own else None,
        )
        groups.setdefault(key, []).append(piece)
    shown: list[tuple[str, Surface]] = []
    for (directions, data, _, slice_, n, _), members in sorted(
        groups.items(), key=lambda g: list(AXES).index(g[0][0]) if g[0][0] in AXES else 9
    ):
        title = (
            TITLES.get(directions, directions)
            + f", {slice_}"
            + ("" if n is None else f", {n:,} examples")
        )
        group, grids = _group(
            made, members, directions, f"{title}, {names[data]}" if len(names) > 1 else title
        )
        if group:
            made.groups.append(group)
            shown += [(SHORT.get(directions, directions), g) for g in grids]
    there = {p.member.place for members in groups.values() for p in members}
    for m in found.members:
        if m.place not in there:
            made.missing.append(absent(m, "landscape"))
    if len({k[3:5] for k in groups if k[0] == "eigen"}) > 1:
        made.notes.append(
            "Surfaces on different slices or numbers of examples have scales of their own."
        )
    if shown:
        made.tables.append(_numbers(shown))
    made.sources = sorted({p.source.place for members in groups.values() for p in members})
    return made


def _group(
    made: Section, members: list[Piece], directions: str, title: str
) -> tuple[Group | None, list[Surface]]:
    frame = pd.concat([p.rows.assign(run=p.label) for p in members], ignore_index=True)
    try:
        grids = grids_of(frame)
        shared = scale(grids)
    except Exception as error:  # a table made by other means must not spoil the report
        made.notes.append(
            f"{members[0].source.name} is not drawn: {getattr(error, 'what', error)}."
        )
        return None, []
    names = _axes(frame, directions)
    group = Group(
        title=title,
        notes=shared.notes(),
        bar=[
            (100 * (t - shared.low) / (shared.high - shared.low), shared.label(t))
            for t in shared.ticks(5)
        ],
    )
    layout = interactive.layout(grids, shared, names)
    for grid, piece in zip(grids, members, strict=True):
        group.figures.append(
            Figure(
                grid.run,
                {
                    "kind": "scene",
                    "controls": [],
                    "frames": {
                        "": {
                            "surface": interactive.scene(grid, shared),
                            "marks": interactive.marks(grid, shared),
                        }
                    },
                    "scene": layout["scene"],
                    "look": piece.member.place,
                },
                run=piece.member.place,
            )
        )
    return group, grids


def _axes(frame: pd.DataFrame, directions: str) -> tuple[str, str]:
    """What the axes are; principal axes with the share of the variance that they explain."""
    found = AXES.get(directions, ("direction 1", "direction 2"))
    shares = [select.number(frame, "explained_variance", index=i) for i in (1, 2)]
    if directions != "pca" or None in shares:
        return found
    return tuple(
        f"{name} ({100 * float(share or 0):.0f} %)"  # type: ignore[return-value]
        for name, share in zip(found, shares, strict=True)
    )


def _numbers(grids: list[tuple[str, Surface]]) -> Table:
    head = (
        "Checkpoint",
        "Directions",
        "Slice",
        "Examples",
        "λ₁ ± residual",
        "λ₁/λ₅",
        "Loss at the centre",
        "Lowest",
        "Highest",
        "Grid",
        "How",
    )
    rows = [
        [
            g.run,
            directions,
            g.slice or "–",
            "–" if g.n is None else f"{g.n:,}",
            plus_minus(g.sharpness, g.residual) + ("" if g.converged else " (not converged)"),
            number(g.ratio),
            number(g.centre),
            number(g.lowest),
            number(g.highest),
            f"{len(g.x)} × {len(g.y)}",
            " ".join(g.made()) or "all points evaluated",
        ]
        for directions, g in grids
    ]
    return Table("Surfaces", head, rows)
