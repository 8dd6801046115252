"""The small tables of flatness that a person reads first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.results.select import number, only, spread_rounds
from fldiag.results.summary import Item, Note, Say, Small, missing_notes
from fldiag.results.table import Row

FLATNESS = {
    "round": "round",
    "measure": "measure",
    "whole": "F at w",
    "parts": "F_k at w_k",
    "gap": "gap",
    "stderr": "± stderr",
    "point": "F_k at w",
    "point_gap": "gap at w",
}
NAMES = {
    "sharpness": "sharpness",
    "adaptive_sharpness": "adaptive sharpness",
    "eigenvalue": "λ1",
    "trace": "trace",
}
STABILITY = {"round": "round", "stability": "lr λ1 / 2"}
#: Rounds shown.
MOST = 6


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    global_rows = only(frame, scope="global", layer=None)
    rounds = spread_rounds(global_rows, "trace_gap", MOST)
    yield Say(
        f"F: all clients' training loss, F_k: client k's; w: aggregated, w_k: trained weights; sharpness with rho = "
        f"{options['rho']:g}, adaptive with {options.get('adaptive_rho', 0.5):g}"
    )
    yield Small(
        [_gap(only(global_rows, round=r), r, metric) for r in rounds for metric in NAMES], FLATNESS
    )
    stability = [
        {"round": r, "stability": number(global_rows, "stability", round=r)} for r in rounds
    ]
    if any(row["stability"] is not None for row in stability):
        yield Small(stability, STABILITY)
    masked = only(frame, masked=True)
    masked = masked[masked["metric"] != "missing"]
    if len(masked):
        reasons = masked["note"].dropna().unique()
        yield Note(
            f"{len(masked)} numbers are masked"
            + (f", such as: {reasons[0]}" if len(reasons) else "")
        )
    yield from missing_notes(frame)


def _gap(rows: pd.DataFrame, r: int, metric: str) -> Row:
    return {
        "round": r,
        "measure": NAMES[metric],
        "whole": number(rows, metric, moment="aggregated"),
        "parts": number(rows, f"{metric}_parts", moment="trained"),
        "gap": number(rows, f"{metric}_gap", moment="trained"),
        "stderr": number(rows, f"{metric}_gap", column="stderr", moment="trained"),
        "point": number(rows, f"{metric}_parts", moment="aggregated"),
        "point_gap": number(rows, f"{metric}_gap", moment="aggregated"),
    }
