"""What a person reads first of a landscape: sharpness at the centre, and how far the surface can be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.landscape.grid import COVERAGE
from fldiag.results.select import number, only
from fldiag.results.summary import Item, Note, Say, Small
from fldiag.results.table import Row

SUMMARY = {
    "run": "checkpoint",
    "slice": "slice",
    "n": "n",
    "loss": "loss",
    "lambda_1": "λ1",
    "residual": "± (residual)",
    "converged": "converged",
}


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    parts = {str(run): rows for run, rows in frame.groupby("run", sort=False)}
    rows = [_row(part, name) for name, part in parts.items()]
    ratios = {key: f"λ1/λ{key[6:]}" for row in rows for key in row if key.startswith("ratio_")}
    yield Small(rows, {**SUMMARY, **ratios})
    for name, part in parts.items():
        yield from _trust(part, f"{name}: " if len(parts) > 1 else "")


def _row(part: pd.DataFrame, run: str) -> Row:
    """Loss at the centre, λ1 with its residual, λ1/λk as ``ratio_k``."""
    centre = only(part, metric="loss", x=0, y=0)
    row: Row = {
        "run": run,
        "slice": centre["slice"].iloc[0],
        "n": int(centre["n_examples"].iloc[0]),
        "loss": number(centre),
    }
    top = number(part, "eigenvalue", index=1)
    if top is not None:
        row |= {
            "lambda_1": top,
            "residual": number(part, "eigenvalue", column="residual", index=1),
            "converged": bool(only(part, metric="eigenvalue")["converged"].all()),
        }
    ratio, k = (number(part, "eigenvalue_ratio", column=c) for c in ("value", "index"))
    return row if ratio is None or k is None else row | {f"ratio_{k:.0f}": ratio}


def _trust(part: pd.DataFrame, lead: str) -> Iterator[Item]:
    """How the surface was found and how far it can be trusted."""
    total = int((part["metric"] == "loss").sum())
    if (error := number(part, "interpolation_error")) is not None:
        share, surfaces = COVERAGE
        yield Say(
            f"{lead}interpolated from {number(part, 'evaluated'):,.0f} of {total:,} points, error ≤ about "
            f"{100 * error:.2g} % of the loss range (an estimate; it held on {share:.3g} % of {surfaces} test surfaces)"
        )
    values = only(part, metric="eigenvalue").sort_values("index")
    flat = values["value"].abs() <= values["residual"].clip(
        lower=1e-6 * values["value"].abs().max()
    )
    if len(values) and flat.iloc[:2].any():
        yield Note(
            f"{lead}eigenvalue {1 if flat.iloc[0] else 2} is zero within its error: the direction shown for it is "
            "arbitrary"
        )
    shares = only(part, metric="explained_variance")["value"]
    if len(shares):
        away = only(part, metric="projection_error")["value"]
        yield Note(f"{lead}trajectory of {(part['metric'] == 'trajectory').sum():,} checkpoints")
        yield Say(
            f"{lead}the plane explains {100 * float(shares.sum()):.1f} % of the trajectory's variance; farthest "
            f"checkpoint from it: {float(away.max()):.3g}"
        )
