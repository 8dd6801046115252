"""What matching shows in a report: clients beside each other by their Hessians, and their curvature."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fldiag.plotting.collected import Collected, Member, absent, worlds
from fldiag.plotting.sections import (
    Control,
    Figure,
    Group,
    Section,
    Table,
    axes,
    literal,
    short,
    shorts,
)
from fldiag.plotting.style import number
from fldiag.plotting.tables import MANY, floats, percentiles
from fldiag.results import select
from fldiag.results.select import last_round, only

MODES = {"diag": "diagonals", "tensor_trace": "tensor traces"}
DATA = {"client": "own data", "global": "all clients' data"}
PAPER = {
    ("diag", "client"): " (as in the paper)",
    ("tensor_trace", "global"): " (as in the released code)",
}
METRICS = {"H_N": "H_N: squared difference of norms", "H_D": "H_D: cosine"}


def section(found: Collected) -> Section:
    made = Section(
        "matching",
        "Hessian matching",
        "How similar the clients' loss surfaces are at their trained weights: H_N is "
        "small and H_D near 1 where two clients' Hessians agree. Blank: a client compared with itself, and undefined "
        "values.",
    )
    members = [(m, s.frame) for m, s in found.having("matching")]
    made.groups = [*_matrices(members), *_curvature(members, worlds(found.members))]
    made.missing = [
        absent(m, "matching", clients=True) for m in found.members if "matching" not in m.tables
    ]
    cells = [row for m, f in members for row in _means(m, f)]
    if cells:
        made.tables.append(
            Table(
                "Means over the pairs of different clients",
                (
                    "Run",
                    "Round",
                    "D",
                    "Hessians on",
                    "H_N",
                    "H_D",
                    "H_N with self pairs",
                    "H_D with self pairs",
                ),
                cells,
            )
        )
    made.sources = [s.place for _, s in found.having("matching")]
    return made


def _matrices(members: Sequence[tuple[Member, pd.DataFrame]]) -> Iterator[Group]:
    """H_N and H_D of every run, client by client; one choice of the form and of the round for all. Nothing without pairs."""
    pairs = [(m, only(f, metric=list(METRICS), scope="pair")) for m, f in members]
    forms = list(
        dict.fromkeys(
            p for _, rows in pairs for p in zip(rows["diag_mode"], rows["data"], strict=True)
        )
    )
    forms.sort(key=lambda p: p not in PAPER)
    rounds = sorted({int(r) for _, rows in pairs for r in rows["round"].dropna()})
    if not forms or not rounds:
        return
    group = Group(
        pairs=True,
        controls=[Control("matching-form", "Hessians compared by", [_form(p) for p in forms])],
    )
    if len(rounds) > 1:
        group.controls.append(
            Control(
                "matching-round",
                "Round",
                [str(r) for r in rounds],
                slider=True,
                start=len(rounds) - 1,
            )
        )
    ranges = {
        (metric, p): _range(
            [only(rows, metric=metric, diag_mode=p[0], data=p[1]) for _, rows in pairs], metric
        )
        for metric in METRICS
        for p in forms
    }
    for m, rows in pairs:
        for metric, text in METRICS.items():
            frames = {}
            for p in forms:
                part = only(rows, metric=metric, diag_mode=p[0], data=p[1])
                for r in rounds:
                    key = _form(p) + (f"|{r}" if len(rounds) > 1 else "")
                    frames[key] = square(only(part, round=r), *ranges[metric, p])
            group.figures.append(
                Figure(
                    f"{m.label}: {text}",
                    {
                        "kind": "heatmap",
                        "controls": [c.id for c in group.controls],
                        "frames": frames,
                        "colours": "sequential",
                        "what": metric,
                        "square": True,
                        **axes("client", x="client"),
                    },
                    run=m.place,
                )
            )
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
        return (
            max(low, high * 1e-4),
            high,
            True,
        )  # four decades: one odd pair shall not bleach the others
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
        return {
            "x": names,
            "y": names,
            "z": [shorts(r) for r in cells],
            "range": [short(low), short(high)],
        }
    shown = np.log10(np.clip(cells, low, high))
    decades = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    return {
        "x": names,
        "y": names,
        "z": [shorts(r) for r in shown],
        "v": [shorts(r) for r in cells],
        "range": [short(math.log10(low)), short(math.log10(high))],
        "ticks": [[float(d), number(10.0**d, 1).removeprefix("1×")] for d in decades],
    }


def _curvature(
    members: Sequence[tuple[Member, pd.DataFrame]], names: dict[str, str]
) -> Iterator[Group]:
    """lambda_max and trace of every client in the last round, runs beside each other where model and data agree."""
    groups: dict[tuple[str, str], list[tuple[Member, pd.DataFrame]]] = {}
    for m, f in members:
        last = last_round(only(f, metric=["H_N", "trace"]))
        if last is not None:
            groups.setdefault((m.data, m.model), []).append(
                (m, only(f, round=last, moment="trained", scope="client"))
            )
    for (data, _), part in groups.items():
        eigenvalues = [(m, only(f, metric="eigenvalue", index=1)) for m, f in part]
        traces = [(m, only(f, metric="trace", layer=None)) for m, f in part]
        figures = [
            *_bars("Largest eigenvalue of a client's Hessian", eigenvalues, "residual"),
            *_bars("Trace of a client's Hessian", traces, "stderr"),
        ]
        if figures:
            yield Group(
                figures,
                "Curvature of the clients, last round"
                + (f", {names[data]}" if len(names) > 1 else ""),
            )


def _bars(
    text: str, members: Sequence[tuple[Member, pd.DataFrame]], error: str
) -> Iterator[Figure]:
    """A bar a client and run, with ``error`` as its error bar; of many clients, percentiles. Nothing without values."""
    drawn, ids = [], set()
    many = max((f["client"].nunique() for _, f in members), default=0) > MANY
    for m, f in members:
        rows = f.drop_duplicates("client").dropna(subset=["value"]).sort_values("client")
        if many and len(rows):
            spread = percentiles(rows[["value"]].astype(float))["value"]
            rows = pd.DataFrame(
                {
                    "client": spread.index,
                    "value": spread.to_numpy(),
                    error: np.nan,
                    "slice": rows["slice"].iloc[0],
                }
            )
        if len(rows):
            where = sorted(
                {"own data" if str(s).startswith("client") else "all data" for s in rows["slice"]}
            )
            drawn.append(
                {
                    "name": literal(f"{m.label} ({', '.join(where)})"),
                    "run": m.place,
                    "look": m.place,
                    "x": [str(int(c)) for c in rows["client"]],
                    "y": shorts(rows["value"]),
                    "error": shorts(rows[error]),
                }
            )
            ids |= {int(c) for c in rows["client"]}
    if drawn:
        frame = {"series": drawn, "labels": [str(c) for c in sorted(ids)]}
        yield Figure(
            text,
            {
                "kind": "bars",
                "controls": [],
                "frames": {"": frame},
                **axes(
                    text.split(" of")[0].lower(),
                    x="percentile of the clients" if many else "client",
                ),
            },
        )


def _means(m: Member, frame: pd.DataFrame) -> list[list[str]]:
    rows = only(frame, metric=list(METRICS), scope="global")
    last = last_round(rows)
    if last is None:
        return []
    rows, cells = only(rows, round=last), []
    for p in dict.fromkeys(zip(rows["diag_mode"], rows["data"], strict=True)):
        part = only(rows, diag_mode=p[0], data=p[1])
        values = [
            number(select.number(part, metric, self_pairs=own))
            for own in ((False, "False", None), (True, "True"))
            for metric in METRICS
        ]
        cells.append(
            [m.label, str(last), MODES.get(p[0], str(p[0])), DATA.get(p[1], str(p[1])), *values]
        )
    return cells
