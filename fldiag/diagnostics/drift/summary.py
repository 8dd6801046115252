"""The small tables of drift that a person reads first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.results.select import WHOLE, number, only, spread_rounds
from fldiag.results.summary import Item, Say, Small, missing_notes
from fldiag.results.table import Row

COLUMNS = {
    "round": "round",
    "global_local": "global–local",
    "local_local": "local–local",
    "updates": "cos updates",
    "consensus": "consensus",
    "gradients": "cos gradients",
    "angle": "cos g_u g_p",
    "proximal": "proximal loss",
    "cka": "CKA",
}
RECORDED = {
    "round": "round",
    "angle": "cos g_u g_p",
    "head": "in the head",
    "proximal": "proximal loss",
    "which": "which",
    "steps": "steps",
}
_SOURCES = {
    "global_local": ("global_local_divergence", "trained"),
    "local_local": ("local_local_divergence", "trained"),
    "updates": ("update_cosine", "trained"),
    "consensus": ("update_consensus", "trained"),
    "gradients": ("gradient_cosine", "received"),
    "proximal": ("proximal_loss", "trained"),
    "cka": ("cka", "trained"),
}


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    lowest = min(options["rho"], default=None)
    rows, rounds = [], spread_rounds(frame, "global_local_divergence")
    for r in rounds:
        row: Row = {"round": r} | {
            k: number(frame, m, round=r, moment=moment, **WHOLE)
            for k, (m, moment) in _SOURCES.items()
        }
        angle = (
            None
            if lowest is None
            else number(frame, "cos_gu_gp", round=r, moment="trained", rho=lowest, **WHOLE)
        )
        rows.append(row | {"angle": angle})
    yield Small(rows, COLUMNS)
    if lowest is not None:
        yield Say(
            f"cos g_u g_p at rho = {lowest:g}; the table has {', '.join(f'{v:g}' for v in options['rho'])}"
        )
    recorded = [row for r in rounds if (row := _recorded(frame, r))]
    if recorded:
        yield Say("means over the local steps that training recorded:")
        yield Small(recorded, RECORDED)
    else:
        yield Say(
            "cos g_u g_p and proximal loss are those of the stored weights, not of the local steps: these only "
            "fldiag train records, with --set metrics.steps=true --set metrics.proximal=kl"
        )
    yield from missing_notes(frame)


def _recorded(frame: pd.DataFrame, r: int) -> Row:
    """What was recorded of the steps of a round; empty when nothing."""
    rows = only(
        frame, estimator="steps", scope="global", round=r, metric=("cos_gu_gp", "proximal_loss")
    )
    row: Row = {}
    for key, metric, layer in (
        ("angle", "cos_gu_gp", None),
        ("head", "cos_gu_gp", "part:head"),
        ("proximal", "proximal_loss", None),
    ):
        metric_rows = only(rows, metric=metric, layer=layer)
        if len(metric_rows):
            row |= {
                key: metric_rows["value"].iloc[0],
                "which": metric_rows["proximal"].iloc[0],
                "steps": int(metric_rows["n_steps"].iloc[0]),
            }
    return {"round": r, "estimator": "steps", **row} if row else {}
