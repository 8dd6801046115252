"""Sections about what local training does: forgetting, and drift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from fldiag.plotting.style import number
from fldiag.plotting.tables import floats
from fldiag.report.collect import Collection, Member
from fldiag.report.elements import (
    Control,
    Figure,
    Group,
    Missing,
    Section,
    Table,
    axes,
    lines,
    percent,
    plus_minus,
    series,
    short,
    shorts,
)
from fldiag.report.performance import command
from fldiag.report.summary import worlds
from fldiag.results import select
from fldiag.results.select import last_round, only

NO_CLIENTS = "it kept no client weights; train it again with --set checkpoint.clients=sampled"
MOMENTS = {"received": "as received", "trained": "after local training", "aggregated": "after averaging"}
SHARES = {"drop": "accuracy lost in local training", "forgotten": "forgotten: right before, wrong after",
          "learned": "learned: wrong before, right after", "restored": "restored by averaging, of the forgotten"}


def absent(m: Member, verb: str, *more: str) -> Missing:
    """Why a table of client weights is not there, and what makes it."""
    if not m.keeps_clients:
        return Missing(m.label, NO_CLIENTS)
    if not m.rounds:
        return Missing(m.label, "it has no checkpoint yet; train at least one round")
    return Missing(m.label, "not computed yet", command(verb, m, *more))


def incomplete(section: Section, found: Collection, kind: str) -> None:
    """Tables that end before the run does."""
    for m, source in found.having(kind):
        last = last_round(source.frame)
        if last is not None and last < m.run.done:
            section.notes.append(f"{m.label}: {source.name} ends with round {last}, the run has {m.run.done}; "
                                 f"{command(kind, m)} makes it anew.")


def forgetting(found: Collection) -> Section:
    section = Section("forgetting", "Forgetting", "Test accuracy of the model that clients receive, of theirs after local "
                      "training (mean and standard deviation over clients), and of their average. What local training forgets, "
                      "averaging partly restores.")
    names = worlds(found.members)
    for data, name in names.items():
        members = [(m, s.frame) for m, s in found.having("forgetting") if m.data == data]
        group = Group(title=f"On {name}" if len(names) > 1 else "")
        for moment, text in MOMENTS.items():
            drawn = []
            for m, frame in members:
                rows = only(frame, metric="accuracy", moment=moment, scope="global", slice="test", index=None)
                if moment == "trained":
                    std = only(frame, metric="accuracy_std", moment=moment, scope="global", slice="test", index=None)
                    rows = rows.assign(std=rows["round"].map(std.set_index("round")["value"]))
                if rows["value"].notna().any():
                    drawn.append(series(m.label, rows, run=m.place, spread="std" if moment == "trained" else "interval"))
            _add(group, f"Test accuracy {text}", drawn, "test accuracy", share=True)
        for metric, text in SHARES.items():
            drawn = [series(m.label, rows, run=m.place) for m, frame in members
                     if (rows := only(frame, metric=metric, moment="trained", scope="global", slice="test", index=None)
                         )["value"].notna().any()]
            _add(group, text.capitalize(), drawn, text.split(":")[0], share=True, zero=metric == "drop")
        _match(group.figures[:len(MOMENTS)])
        if group.figures:
            section.groups.append(group)
    _heatmaps(section, found)
    section.missing = [absent(m, "forgetting") for m in found.members if "forgetting" not in m.tables]
    incomplete(section, found, "forgetting")
    rows = [r for m, s in found.having("forgetting") for r in _lost(m, s.frame)]
    if rows:
        section.tables.append(Table("Last round, test split, mean over clients", (
            "Run", "Round", "Received", "Trained ± std", "Aggregated", "Lost (drop)", "Forgotten", "Learned", "Restored",
            "Largest loss of a class"), rows))
    section.sources = [s.place for _, s in found.having("forgetting")]
    return section


def _add(group: Group, caption: str, drawn: Sequence[dict[str, Any]], y: str, **more: Any) -> None:
    if drawn:
        group.figures.append(Figure(caption, lines(drawn, y, **more)))


def _match(figures: Sequence[Figure]) -> None:
    """One range of the vertical axis, since these are compared with each other."""
    ends = [v for f in figures for s in f.spec["frames"][""]["series"] for key in ("y", "low", "high") for v in s.get(key, ())
            if v is not None]
    if ends:
        room = 0.05 * (max(ends) - min(ends) or 1)
        for f in figures:
            f.spec["yrange"] = [short(min(ends) - room), short(max(ends) + room)]


def _lost(m: Member, frame: pd.DataFrame) -> list[list[str]]:
    rows = only(frame, scope="global", slice="test", index=None)
    last = last_round(only(rows, metric="accuracy", moment="trained"))
    if last is None:
        return []
    rows = only(rows, round=last)

    def of(metric: str, moment: str = "trained") -> float | None:
        return select.number(rows, metric, moment=moment)

    return [[m.label, str(last), percent(of("accuracy", "received")),
             plus_minus(of("accuracy"), of("accuracy_std"), share=True), percent(of("accuracy", "aggregated")),
             *(percent(of(k)) for k in ("drop", "forgotten", "learned", "restored", "forgetting"))]]


def _heatmaps(section: Section, found: Collection) -> None:
    """Client by class, one a run, all on one scale and following one slider."""
    tables = {m.place: (m, rows, only(s.frame, metric="class_examples")) for m, s in found.having("forgetting")
              if len(rows := only(s.frame, metric="class_forgetting", scope="client").dropna(subset=["client", "index"]))}
    if not tables:
        return
    rounds = sorted({int(r) for _, rows, _ in tables.values() for r in rows["round"].dropna()})
    reach = max(float(rows["value"].abs().max()) for _, rows, _ in tables.values() if rows["value"].notna().any()) if any(
        rows["value"].notna().any() for _, rows, _ in tables.values()) else 1.0
    reach = float(f"{reach or 1:.3g}")
    group = Group(title="By client and class", controls=[
        Control("forgetting-round", "Round", [str(r) for r in rounds], slider=True, start=len(rounds) - 1)], notes=[
        "Accuracy on a class as received minus after the client's training: orange is forgotten, purple learned. Grey: too few "
        "test examples. A dot: the client has no training example of the class."])
    for m, rows, held in tables.values():
        classes = sorted({int(c) for c in rows["index"]})
        none = {(int(c), int(k)) for c, k, n in zip(held["client"], held["index"], held["value"], strict=True) if n == 0}
        frames = {str(int(r)): _cells(part, classes, none) for r, part in rows.groupby("round")}
        group.figures.append(Figure(f"{m.label}: forgetting by class", {
            "kind": "heatmap", "controls": ["forgetting-round"], "frames": frames, "colours": "diverging",
            "range": [-reach, reach], "what": "accuracy lost", **axes("client", x="class", share=True)}, run=m.place))
    section.groups.append(group)


def _cells(rows: pd.DataFrame, classes: Sequence[int], none: set[tuple[int, int]]) -> dict[str, Any]:
    ids = sorted({int(c) for c in rows["client"]})
    cells = np.full((len(ids), len(classes)), np.nan)
    for c, k, v in zip(rows["client"], rows["index"], floats(rows["value"]), strict=True):
        cells[ids.index(int(c)), classes.index(int(k))] = v
    dots = [[classes.index(k), ids.index(c)] for c, k in sorted(none) if c in ids and k in classes]
    return {"x": [str(c) for c in classes], "y": [str(c) for c in ids], "z": [shorts(r) for r in cells], "dots": dots}


# -- drift

PANELS = (("global_local_divergence", "trained", "Distance of client weights from the received model", "‖w_k − w‖"),
          ("local_local_divergence", "trained", "Distance of client weights from each other", "‖w_k − w_j‖"),
          ("update_cosine", "trained", "Cosine between two clients' updates", "cosine"),
          ("server_cosine", "trained", "Cosine between a client's update and the server's", "cosine"),
          ("gradient_cosine", "received", "Cosine between a client's gradient and the global one", "cosine"),
          ("proximal_loss", "trained", "Proximal loss of the trained models", "proximal loss"),
          ("cka", "trained", "Similarity of representations (CKA) with the received model", "CKA"))


def drift(found: Collection) -> Section:
    section = Section("drift", "Client drift", "How far, and in which directions, clients move in local training: means over the "
                      "clients of a round, with standard errors.")
    names = worlds(found.members)
    groups: dict[tuple[str, str], list[tuple[Member, pd.DataFrame]]] = {}
    for m, s in found.having("drift"):
        groups.setdefault((m.data, m.model), []).append((m, only(s.frame, scope="global", estimator="exact")))
    for (data, _), members in groups.items():
        title = "" if len(groups) == 1 else f"On {names[data]}, model {members[0][0].setting('model', 'name', 'unknown')}"
        group = Group(title=title)
        for metric, moment, caption, y in PANELS:
            drawn = []
            for m, frame in members:
                rows = only(frame, metric=metric, moment=moment, layer=None)
                if rows["value"].notna().any():
                    drawn.append(series(m.label, rows, run=m.place, spread="stderr"))
            _add(group, caption, drawn, y, zero=y == "cosine")
        if group.figures:
            section.groups.append(group)
        if angles := _angles(members, title):
            section.groups.append(angles)
    if len({json_options(s.options) for _, s in found.having("drift")}) > 1:
        section.notes.append("The runs' drift was computed with different options (see where the numbers come from); proximal "
                             "loss and the cosine of g_u and g_p depend on them.")
    section.missing = [absent(m, "drift") for m in found.members if "drift" not in m.tables]
    incomplete(section, found, "drift")
    rows = [r for members in groups.values() for m, frame in members for r in _moved(m, frame)]
    if rows:
        section.tables.append(Table("Last round, mean over clients ± standard error", (
            "Run", "Round", "Global–local", "Local–local", "Cosine of updates", "Cosine with server", "Cosine of gradients",
            "Proximal loss", "CKA"), rows))
    section.sources = [s.place for _, s in found.having("drift")]
    return section


def json_options(options: dict[str, Any]) -> str:
    import json

    return json.dumps({k: options.get(k) for k in ("rho", "loss", "tau", "strength", "part", "batch")}, default=str)


def _angles(members: Sequence[tuple[Member, pd.DataFrame]], title: str) -> Group | None:
    """The cosine of g_u and g_p, with the radius of the perturbation to choose."""
    tables = [(m, only(frame, metric="cos_gu_gp", layer=None).dropna(subset=["rho"])) for m, frame in members
              if "rho" in frame.columns]
    radii = sorted({float(r) for _, rows in tables for r in rows["rho"]})
    if not radii:
        return None
    id_ = f"drift-rho-{members[0][0].place}"
    frames = {f"{r:g}": {"series": [series(m.label, part, run=m.place, spread="stderr") for m, rows in tables
                                    if len(part := only(rows, rho=r))]} for r in radii}
    figure = Figure("Cosine between g_u, the gradient of the local loss at w + e(ρ), and g_p, that of the proximal loss", {
        "kind": "lines", "controls": [id_], "frames": frames, **axes("cosine", zero=True)}, wide=True)
    return Group([figure], "Conflict of local and proximal loss" + (f", {title[0].lower()}{title[1:]}" if title else ""),
                 controls=[Control(id_, "Radius ρ of the perturbation", [f"{r:g}" for r in radii])])


def _moved(m: Member, frame: pd.DataFrame) -> list[list[str]]:
    last = last_round(frame, "global_local_divergence")
    if last is None:
        return []
    cells = []
    for metric, moment, _, _ in PANELS:
        rows = only(frame, metric=metric, moment=moment, layer=None, round=last)
        cells.append(plus_minus(select.number(rows), select.number(rows, column="stderr")) if len(rows) else number(None))
    return [[m.label, str(last), *cells]]
