"""The small tables of drift that a person reads first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.results.select import WHOLE, last_round, number, only, spread_rounds
from fldiag.results.summary import Item, Say, Small, missing_notes
from fldiag.results.table import Row

COLUMNS = {
    "round": "round",
    "global_local": "global–local",
    "local_local": "local–local",
    "updates": "cos updates",
    "snr": "SNR updates",
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
    "snr": ("update_snr", "trained"),
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
    yield from _agreement(frame)
    yield from _uploads(frame)
    recorded = [row for r in rounds if (row := _recorded(frame, r))]
    if recorded:
        yield Say("means over the local steps that training recorded:")
        yield Small(recorded, RECORDED)
    else:
        yield Say(
            "cos g_u g_p and proximal loss are those of the stored weights, not of the local steps: these only "
            "fldiag train records, with --set metrics.steps=true --set metrics.proximal=kl"
        )
    yield from map(Say, orders(frame))
    yield from missing_notes(frame)


def _agreement(frame: pd.DataFrame) -> Iterator[Item]:
    """The interval of the last round's signal-to-noise ratio, or why it has none."""
    last = last_round(frame, "update_snr")
    if last is None:
        return
    (row,) = only(frame, metric="update_snr", round=last, **WHOLE).to_dict("records")
    about = f"signal-to-noise ratio of the updates of round {last}"
    if pd.isna(row["value"]):
        yield Say(f"{about}: none, as {row['note']}")
    elif pd.isna(row.get("low")):
        yield Say(f"{about}: {row['value']:.3g}, without interval (it needs three clients)")
    else:
        yield Say(
            f"{about}: {row['value']:.3g} (95 %: {row['low']:.3g} to {row['high']:.3g}, jackknife over {int(row['n_clients'])} "
            "clients)"
        )


def _uploads(frame: pd.DataFrame) -> Iterator[Item]:
    """What uploads would lose in the last round in which that was measured."""
    last = last_round(frame, "upload_error")
    if last is None:
        return
    rows = only(frame, metric="upload_error", round=last, **WHOLE)
    kinds = list(dict.fromkeys(rows["upload"]))
    yield Say(f"what uploads of round {last} would lose:")
    yield Small(
        [
            {
                "upload": kind,
                "error": number(rows, upload=kind),
                "loss": number(frame, "upload_loss", round=last, upload=kind),
                "stderr": number(frame, "upload_loss", column="stderr", round=last, upload=kind),
            }
            for kind in kinds
        ],
        {"upload": "upload", "error": "relative error", "loss": "added loss", "stderr": "±"},
    )


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


def orders(frame: pd.DataFrame) -> list[str]:
    """The measured orders of the propositions' errors (medians over the clients) beside the predicted ones."""
    texts = []
    for i in (1, 2):
        powers = []
        for kind, symbol in (("step", "eta"), ("perturbation", "rho")):
            rows = only(frame, metric=f"proposition_{i}_{kind}_order")
            values = rows["value"].dropna()
            if len(values):
                powers.append(
                    f"{symbol}^{values.median():.2f} (predicted {rows['predicted'].iloc[0]:g})"
                )
        if powers:
            texts.append(
                f"proposition {i}: error falls as {', '.join(powers)}; median over the clients of the last round"
            )
    return texts
