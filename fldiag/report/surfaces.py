"""Sections about curvature: loss landscapes on shared scales, and the largest Hessian eigenvalues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from fldiag.diagnostics.landscape import interactive
from fldiag.diagnostics.landscape.surfaces import Surface, scale
from fldiag.diagnostics.landscape.surfaces import surfaces as grids_of
from fldiag.plotting.style import number
from fldiag.report.collect import Claim, Collection, Member, Source
from fldiag.report.elements import Figure, Group, Missing, Section, Table, axes, literal, plus_minus, shorts
from fldiag.report.performance import command
from fldiag.report.summary import worlds
from fldiag.results import select
from fldiag.results.select import only

AXES = {"eigen": ("eigenvector 1", "eigenvector 2"), "random": ("random direction 1", "random direction 2"),
        "plane": ("towards checkpoint 2", "at right angles, to checkpoint 3"), "pca": ("principal axis 1", "principal axis 2")}
TITLES = {"eigen": "Along the two sharpest directions (Hessian eigenvectors)", "random": "Along two random directions",
          "plane": "Plane through three checkpoints",
          "pca": "Plane of the trajectory (principal axes, with their shares of variance)"}

SHORT = {"eigen": "eigenvectors", "random": "random", "plane": "plane", "pca": "trajectory"}


@dataclass(frozen=True)
class Piece:
    """The part of a table that is about one checkpoint."""

    member: Member
    source: Source
    claim: Claim
    label: str
    rows: pd.DataFrame
    directions: str = ""


def pieces(found: Collection, prefix: str) -> list[Piece]:
    """What the runs' tables of this kind say, one piece a checkpoint, in the order of the runs."""
    made = []
    for m in found.members:
        for kind, source in m.tables.items():
            if kind.split(":")[0] != prefix:
                continue
            for claim in source.claims:
                r = m.round_of.get(claim.sha256)
                rows = source.frame if not claim.label else only(source.frame, run=claim.label)
                if r is None or rows.empty:
                    continue
                client = "" if claim.client is None else f", client {claim.client}"
                made.append(Piece(m, source, claim, f"{m.label}, round {r}{client}", rows, kind.partition(":")[2]))
    return made


def landscapes(found: Collection) -> Section:
    section = Section("landscapes", "Loss landscapes", "The loss around the weights; the middle is the weights themselves. Drag "
                      "to turn, scroll or pinch to zoom: all scenes move together, and those of one group share height and "
                      "colours.")
    names = worlds(found.members)
    groups: dict[tuple[Any, ...], list[Piece]] = {}
    for piece in pieces(found, "landscape"):
        if not (piece.rows["metric"] == "loss").any():
            continue
        m, own = piece.member, piece.directions in ("pca", "plane")  # every such plane is another one
        key = piece.directions, m.data, m.model, piece.claim.slice, piece.claim.n, m.place if own else None
        groups.setdefault(key, []).append(piece)
    shown: list[tuple[str, Surface]] = []
    for (directions, data, _, slice_, n, _), members in sorted(groups.items(), key=lambda g: list(AXES).index(g[0][0])
                                                               if g[0][0] in AXES else 9):
        title = TITLES.get(directions, directions) + f", {slice_}" + ("" if n is None else f", {n:,} examples")
        group, grids = _group(section, members, directions, f"{title}, {names[data]}" if len(names) > 1 else title)
        if group:
            section.groups.append(group)
            shown += [(SHORT.get(directions, directions), g) for g in grids]
    there = {p.member.place for members in groups.values() for p in members}
    for m in found.members:
        if m.place not in there:
            section.missing.append(_absent(m, "landscape"))
    if len({k[3:5] for k in groups if k[0] == "eigen"}) > 1:
        section.notes.append("Surfaces on different slices or numbers of examples have scales of their own.")
    if shown:
        section.tables.append(_numbers(shown))
    section.sources = sorted({p.source.place for members in groups.values() for p in members})
    return section


def _absent(m: Member, verb: str) -> Missing:
    if not m.rounds:
        return Missing(m.label, "it has no checkpoint yet; train at least one round")
    return Missing(m.label, "not computed yet", command(verb, m))


def _group(section: Section, members: list[Piece], directions: str, title: str) -> tuple[Group | None, list[Surface]]:
    frame = pd.concat([p.rows.assign(run=p.label) for p in members], ignore_index=True)
    try:
        grids = grids_of(frame)
        shared = scale(grids)
    except Exception as error:  # a table made by other means must not spoil the report
        section.notes.append(f"{members[0].source.name} is not drawn: {getattr(error, 'what', error)}.")
        return None, []
    names = _axes(frame, directions)
    group = Group(title=title, notes=shared.notes(), bar=[
        (100 * (t - shared.low) / (shared.high - shared.low), shared.label(t)) for t in shared.ticks(5)])
    layout = interactive._layout(grids, shared, names)
    for grid, piece in zip(grids, members, strict=True):
        group.figures.append(Figure(grid.run, {
            "kind": "scene", "controls": [], "frames": {"": {
                "surface": interactive._scene(grid, shared), "marks": interactive._marks(grid, shared)}},
            "scene": layout["scene"], "look": piece.member.place}, run=piece.member.place))
    return group, grids


def _axes(frame: pd.DataFrame, directions: str) -> tuple[str, str]:
    """What the axes are; principal axes with the share of the variance that they explain."""
    found = AXES.get(directions, ("direction 1", "direction 2"))
    shares = [select.number(frame, "explained_variance", index=i) for i in (1, 2)]
    if directions != "pca" or None in shares:
        return found
    return tuple(f"{name} ({100 * float(share or 0):.0f} %)"  # type: ignore[return-value]
                 for name, share in zip(found, shares, strict=True))


def _numbers(grids: list[tuple[str, Surface]]) -> Table:
    head = ("Checkpoint", "Directions", "Slice", "Examples", "λ₁ ± residual", "λ₁/λ₅", "Loss at the centre", "Lowest", "Highest",
            "Grid", "How")
    rows = [[g.run, directions, g.slice or "–", "–" if g.n is None else f"{g.n:,}",
             plus_minus(g.sharpness, g.residual) + ("" if g.converged else " (not converged)"), number(g.ratio),
             number(g.centre), number(g.lowest), number(g.highest), f"{len(g.x)} × {len(g.y)}",
             " ".join(g.made()) or "all points evaluated"] for directions, g in grids]
    return Table("Surfaces", head, rows)


# -- eigenvalues


def spectrum(found: Collection) -> Section:
    section = Section("curvature", "Hessian eigenvalues", "The largest eigenvalues of the Hessian of the loss, with residuals: "
                      "how sharp the minimum is, and in how many directions.")
    names = worlds(found.members)
    groups: dict[tuple[str, str, str], dict[str, Piece]] = {}
    for piece in pieces(found, "spectrum") + pieces(found, "landscape"):
        if piece.claim.client is not None or not (piece.rows["metric"] == "eigenvalue").any():
            continue
        m = piece.member
        groups.setdefault((m.data, m.model, piece.claim.slice), {}).setdefault(piece.label, piece)  # a spectrum comes first
    cells = []
    for (data, _, slice_), members in groups.items():
        drawn = []
        for piece in members.values():
            rows = only(piece.rows, metric="eigenvalue", layer=None).dropna(subset=["index"]).sort_values("index")
            drawn.append({"name": literal(piece.label), "run": piece.member.place, "look": piece.member.place,
                          "x": [int(i) for i in rows["index"]], "y": shorts(rows["value"]), "error": shorts(rows["residual"])})
            trace = only(piece.rows, metric="trace", layer=None)
            top, ratio = only(rows, index=1), select.number(piece.rows, "eigenvalue_ratio")
            done = all(v in (True, "True") for v in rows["converged"].dropna())
            cells.append([piece.label, slice_, "–" if piece.claim.n is None else f"{piece.claim.n:,}",
                          _shown(top, "residual"), number(ratio), _shown(trace, "stderr"), "yes" if done else "no",
                          piece.source.name])
        title = f"Eigenvalues on {slice_ or 'unnamed data'}" + (f", {names[data]}" if len(names) > 1 else "")
        section.groups.append(Group([Figure(title, {"kind": "lines", "controls": [], "frames": {"": {"series": drawn}},
                                                    **axes("eigenvalue", x="index")}, wide=True)]))
    there = {p.member.place for members in groups.values() for p in members.values()}
    section.missing = [_absent(m, "spectrum") for m in found.members if m.place not in there]
    if cells:
        section.tables.append(Table("Curvature", ("Checkpoint", "Slice", "Examples", "λ₁ ± residual", "λ₁/λ₅", "Trace ± stderr",
                                                  "All converged", "Table"), cells))
    section.sources = sorted({p.source.place for members in groups.values() for p in members.values()})
    return section


def _shown(rows: pd.DataFrame, error: str) -> str:
    return plus_minus(select.number(rows), select.number(rows, column=error))
