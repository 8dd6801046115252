"""Sections about clients beside each other: Hessian matching, and the second-order account of their updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fldiag.plotting.style import number
from fldiag.plotting.tables import floats
from fldiag.report.clients import absent
from fldiag.report.collect import Collection, Member
from fldiag.report.elements import Control, Figure, Group, Section, Table, axes, literal, plus_minus, short, shorts
from fldiag.report.summary import worlds
from fldiag.results import select
from fldiag.results.select import last_round, only

MODES = {"diag": "diagonals", "tensor_trace": "tensor traces"}
DATA = {"client": "own data", "global": "all clients' data"}
PAPER = {("diag", "client"): " (as in the paper)", ("tensor_trace", "global"): " (as in the released code)"}
METRICS = {"H_N": "H_N: squared difference of norms", "H_D": "H_D: cosine"}


def matching(found: Collection) -> Section:
    section = Section("matching", "Hessian matching", "How alike the clients' loss surfaces are at their trained weights: H_N is "
                      "small and H_D near 1 where two clients' Hessians agree. Blank: a client with itself, and what is not "
                      "defined.")
    members = [(m, s.frame) for m, s in found.having("matching")]
    section.groups = [*_matrices(members), *_curvature(members, worlds(found.members))]
    section.missing = [absent(m, "matching") for m in found.members if "matching" not in m.tables]
    cells = [row for m, f in members for row in _means(m, f)]
    if cells:
        section.tables.append(Table("Means over the pairs of different clients", (
            "Run", "Round", "D", "Hessians on", "H_N", "H_D", "H_N with self pairs", "H_D with self pairs"), cells))
    section.sources = [s.place for _, s in found.having("matching")]
    return section


def _matrices(members: Sequence[tuple[Member, pd.DataFrame]]) -> Iterator[Group]:
    """H_N and H_D of every run, client by client; one choice of the form and of the round for all. Nothing without pairs."""
    pairs = [(m, only(f, metric=list(METRICS), scope="pair")) for m, f in members]
    forms = list(dict.fromkeys(p for _, rows in pairs for p in zip(rows["diag_mode"], rows["data"], strict=True)))
    forms.sort(key=lambda p: p not in PAPER)
    rounds = sorted({int(r) for _, rows in pairs for r in rows["round"].dropna()})
    if not forms or not rounds:
        return
    group = Group(pairs=True, controls=[Control("matching-form", "Hessians compared by", [_form(p) for p in forms])])
    if len(rounds) > 1:
        group.controls.append(Control("matching-round", "Round", [str(r) for r in rounds], slider=True, start=len(rounds) - 1))
    ranges = {(metric, p): _range([only(rows, metric=metric, diag_mode=p[0], data=p[1]) for _, rows in pairs], metric)
              for metric in METRICS for p in forms}
    for m, rows in pairs:
        for metric, text in METRICS.items():
            frames = {}
            for p in forms:
                part = only(rows, metric=metric, diag_mode=p[0], data=p[1])
                for r in rounds:
                    key = _form(p) + (f"|{r}" if len(rounds) > 1 else "")
                    frames[key] = square(only(part, round=r), *ranges[metric, p])
            group.figures.append(Figure(f"{m.label}: {text}", {
                "kind": "heatmap", "controls": [c.id for c in group.controls], "frames": frames, "colours": "sequential",
                "what": metric, "square": True, **axes("client", x="client")}, run=m.place))
    yield group


def _form(p: tuple[str, str]) -> str:
    return f"{MODES.get(p[0], p[0])}, {DATA.get(p[1], p[1])}{PAPER.get(p, '')}"


def _range(parts: Sequence[pd.DataFrame], metric: str) -> tuple[float, float, bool]:
    """(low, high, logarithmic) of the colours, the same for all runs and rounds."""
    values = np.concatenate([floats(p["value"]) for p in parts]) if parts else np.zeros(0)
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 1.0, False
    low, high = float(values.min()), float(values.max())
    if metric == "H_N" and low > 0 and high > 100 * low:
        return max(low, high * 1e-4), high, True  # four decades: one odd pair shall not bleach the others
    if metric == "H_N":
        return 0.0, high or 1.0, False
    return min(low, high - 1e-3), high, False


def square(rows: pd.DataFrame, low: float, high: float, log: bool = False) -> dict[str, Any]:
    """Client by client; pairs stand in both halves."""
    ids = sorted({int(c) for column in ("client", "client_b") for c in rows[column].dropna()})
    cells = np.full((len(ids), len(ids)), np.nan)
    for a, b, v in zip(rows["client"], rows["client_b"], floats(rows["value"]), strict=True):
        i, j = ids.index(int(a)), ids.index(int(b))
        cells[i, j] = cells[j, i] = v
    names = [str(c) for c in ids]
    if not log:
        return {"x": names, "y": names, "z": [shorts(r) for r in cells], "range": [short(low), short(high)]}
    shown = np.log10(np.clip(cells, low, high))
    decades = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    return {"x": names, "y": names, "z": [shorts(r) for r in shown], "v": [shorts(r) for r in cells],
            "range": [short(math.log10(low)), short(math.log10(high))],
            "ticks": [[float(d), number(10.0**d, 1).removeprefix("1×")] for d in decades]}


def _curvature(members: Sequence[tuple[Member, pd.DataFrame]], names: dict[str, str]) -> Iterator[Group]:
    """lambda_max and trace of every client in the last round, runs beside each other where model and data agree."""
    groups: dict[tuple[str, str], list[tuple[Member, pd.DataFrame]]] = {}
    for m, f in members:
        last = last_round(only(f, metric=["H_N", "trace"]))
        if last is not None:
            groups.setdefault((m.data, m.model), []).append((m, only(f, round=last, moment="trained", scope="client")))
    for (data, _), part in groups.items():
        eigenvalues = [(m, only(f, metric="eigenvalue", index=1)) for m, f in part]
        traces = [(m, only(f, metric="trace", layer=None)) for m, f in part]
        figures = [*_bars("Largest eigenvalue of a client's Hessian", eigenvalues, "residual"),
                   *_bars("Trace of a client's Hessian", traces, "stderr")]
        if figures:
            yield Group(figures, "Curvature of the clients, last round" + (f", {names[data]}" if len(names) > 1 else ""))


def _bars(text: str, members: Sequence[tuple[Member, pd.DataFrame]], error: str) -> Iterator[Figure]:
    """A bar a client and run, with ``error`` as its error bar. Nothing without values."""
    drawn, ids = [], set()
    for m, f in members:
        rows = f.drop_duplicates("client").dropna(subset=["value"]).sort_values("client")
        if len(rows):
            where = sorted({"own data" if str(s).startswith("client") else "all data" for s in rows["slice"]})
            drawn.append({"name": literal(f"{m.label} ({', '.join(where)})"), "run": m.place, "look": m.place,
                          "x": [str(int(c)) for c in rows["client"]], "y": shorts(rows["value"]), "error": shorts(rows[error])})
            ids |= {int(c) for c in rows["client"]}
    if drawn:
        frame = {"series": drawn, "labels": [str(c) for c in sorted(ids)]}
        yield Figure(text, {"kind": "bars", "controls": [], "frames": {"": frame},
                            **axes(text.split(" of")[0].lower(), x="client")})


def _means(m: Member, frame: pd.DataFrame) -> list[list[str]]:
    rows = only(frame, metric=list(METRICS), scope="global")
    last = last_round(rows)
    if last is None:
        return []
    rows, cells = only(rows, round=last), []
    for p in dict.fromkeys(zip(rows["diag_mode"], rows["data"], strict=True)):
        part = only(rows, diag_mode=p[0], data=p[1])
        values = [number(select.number(part, metric, self_pairs=own)) for own in ((False, "False", None), (True, "True"))
                  for metric in METRICS]
        cells.append([m.label, str(last), MODES.get(p[0], str(p[0])), DATA.get(p[1], str(p[1])), *values])
    return cells


# -- account

TERMS = {"linear": "linear g'd", "quadratic": "quadratic d'Hd/2", "rest": "rest"}


def account(found: Collection) -> Section:
    section = Section("account", "Second-order account", "Why an update changes the global loss: L(w + d) − L(w) = g'd + d'Hd/2 "
                      "+ rest, with gradient g and Hessian H at the received weights. Above zero an update does harm.")
    tables = found.having("account")
    scales = {m.data: _reach([s.frame for other, s in tables if other.data == m.data]) for m, _ in tables}
    section.groups = [group for m, source in tables for group in _of_a_run(m, source.frame, *scales[m.data])]
    section.missing = [absent(m, "forgetting", "--why") for m in found.members if "account" not in m.tables]
    rows = [row for m, s in tables for row in _all(m, s.frame)]
    if rows:
        section.tables.append(Table("The aggregated update, and the mean over the clients' updates, in the last round", (
            "Run", "Round", "Loss of", "Update", "Change", "Linear", "Quadratic", "Rest"), rows))
    section.sources = [s.place for _, s in tables]
    return section


def _of_a_run(m: Member, frame: pd.DataFrame, near: float, reach: float) -> Iterator[Group]:
    """A run's terms by client, eigenvector and layer, and who hurts whom; a slider where there are several rounds."""
    rounds = select.rounds(frame, "change")
    if not rounds:
        return
    slider = Control(f"account-round-{m.place}", "Round", [str(r) for r in rounds], slider=True, start=len(rounds) - 1)
    group = Group(title=m.label, pairs=True, controls=[slider] if len(rounds) > 1 else [])
    controls = [c.id for c in group.controls]
    end = "" if controls else f", round {rounds[0]}"
    parts = {str(r) if controls else "": only(frame, round=r) for r in rounds}
    clients = {k: _terms(part) for k, part in parts.items()}
    vectors = {k: _split(only(part, estimator="eigen", moment="trained"), "index") for k, part in parts.items()}
    layers = {k: _split(only(part, estimator="layer", moment="trained"), "layer") for k, part in parts.items()}
    change = f"change of the {only(frame, metric='change')['slice'].iloc[0]} loss"
    for caption, x, frames in (("Terms of every client's update", "client (all: the aggregated update)", clients),
                               ("Along the Hessian eigenvectors, mean over clients", "eigenvector", vectors),
                               ("By layer, mean over clients", "layer", layers)):
        if any(f["labels"] for f in frames.values()):
            spec = {"kind": "terms", "controls": controls, "frames": frames, **axes(change, x=x)}
            group.figures.append(Figure(caption + end, spec, run=m.place))
    harm = {k: _harm(only(part, metric="harm"), near, reach) for k, part in parts.items()}
    if any(h["x"] for h in harm.values()):
        group.figures.append(Figure(f"Who hurts whom: change of the loss of a client by another's update{end}", {
            "kind": "heatmap", "controls": controls, "frames": harm, "colours": "diverging", "square": True,
            "what": "change of the loss", **axes("update of client", x="its own loss changes")}, run=m.place))
    yield group


def _terms(rows: pd.DataFrame) -> dict[str, Any]:
    exact = only(rows, estimator="exact", metric=["change", *TERMS])
    ids = sorted({int(c) for c in exact["client"].dropna()})
    labels = [*(str(c) for c in ids), "all"]

    def values(metric: str) -> list[float | None]:
        part = only(exact, metric=metric)
        return shorts([select.number(part, client=c) for c in (*ids, None)])

    return {"labels": labels if len(exact) else [], "stacked": True, "marks": values("change"),
            "series": [{"name": text, "term": i, "x": labels, "y": values(k)} for i, (k, text) in enumerate(TERMS.items())]}


def _split(rows: pd.DataFrame, by: str) -> dict[str, Any]:
    rows = rows.dropna(subset=[by])
    order = sorted(rows[by].unique(), key=lambda v: (v == 0, v)) if by == "index" else list(dict.fromkeys(rows[by]))
    labels = [literal(v) if by == "layer" else "others" if v == 0 else str(int(v)) for v in order]
    return {"labels": labels, "stacked": False, "series": [
        {"name": TERMS[metric], "term": i, "x": labels,
         "y": shorts([only(rows, metric=metric, **{by: v})["value"].astype(float).mean() for v in order])}
        for i, metric in enumerate(("linear", "quadratic"))]}


def _reach(frames: Sequence[pd.DataFrame]) -> tuple[float, float]:
    """(median, largest) size of what updates do to others, over all runs on the same data."""
    size = np.abs(np.concatenate([floats(only(f, metric="harm")["value"]) for f in frames]))
    size = size[np.isfinite(size)]
    reach = float(size.max()) if len(size) and size.max() > 0 else 1.0
    return min(max(float(np.median(size)) if len(size) else reach, 1e-6 * reach), reach), reach


def _harm(rows: pd.DataFrame, near: float, reach: float) -> dict[str, Any]:
    """Colours on a scale that is linear around zero and logarithmic beyond the median size, as harm spans decades."""
    wide = rows.assign(value=floats(rows["value"])).pivot_table(index="client", columns="client_b", values="value")
    values = wide.to_numpy(dtype=float)

    def place(v: Any) -> Any:
        return np.sign(v) * np.log10(1 + np.abs(v) / near)

    ends = [reach, reach / 10 if reach > 10 * near else None]
    ticks = [(sign * e, sign) for e in ends if e for sign in (-1, 1)] + [(0.0, 0)]
    return {"x": [str(int(c)) for c in wide.columns], "y": [str(int(c)) for c in wide.index],
            "z": [shorts(r) for r in place(values)], "v": [shorts(r) for r in values],
            "range": [-float(place(reach)), float(place(reach))],
            "ticks": [[float(place(v)), number(v, 2)] for v, _ in sorted(ticks)]}


def _all(m: Member, frame: pd.DataFrame) -> list[list[str]]:
    exact = only(frame, estimator="exact", metric=["change", *TERMS])
    last = last_round(exact, "change")
    if last is None:
        return []
    exact, made = only(exact, round=last), []
    for name, rows in (("aggregated", only(exact, client=None)), ("mean over clients", exact[exact["client"].notna()])):
        values = [only(rows, metric=k)["value"].astype(float) for k in ("change", *TERMS)]
        made.append([m.label, str(last), str(exact["slice"].iloc[0]), name, *(plus_minus(v.mean(), None) for v in values)])
    return made
