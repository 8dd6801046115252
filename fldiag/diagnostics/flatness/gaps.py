"""The whole against its parts: weighted means over the clients, the gaps, and their errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fldiag.errors import counted
from fldiag.results.means import sample_mean
from fldiag.results.table import Row

MEASURES = ("sharpness", "adaptive_sharpness", "eigenvalue", "trace")


def gaps(rows: Sequence[Row], sizes: Mapping[int, int]) -> list[Row]:
    """``…_parts`` and ``…_gap`` of every measure, at the trained weights and at one point. ``sizes``: examples by client."""
    gap_rows: list[Row] = []
    for metric in MEASURES:
        of_metric = [row for row in rows if row["metric"] == metric]
        global_row = next((row for row in of_metric if row["scope"] == "global"), None)
        for moment in ("trained", "aggregated"):
            parts = [r for r in of_metric if r["scope"] == "client" and r["moment"] == moment]
            gap_rows += _gap(metric, moment, global_row, parts, sizes)
    return gap_rows


def _gap(
    metric: str, moment: str, global_row: Row | None, parts: Sequence[Row], sizes: Mapping[int, int]
) -> list[Row]:
    measured = [row for row in parts if row["value"] is not None]
    about: Row = {
        "moment": moment,
        "scope": "global",
        "index": 1 if metric == "eigenvalue" else None,
        "n_clients": len(measured),
        "estimator": " and ".join(sorted({str(row["estimator"]) for row in measured})) or "exact",
    }
    if not measured:
        reason = next(
            (row["note"] for row in parts if row.get("note")),
            "no client of this round could be measured",
        )
        return [
            {**about, "metric": f"{metric}_{suffix}", "value": None, "note": reason}
            for suffix in ("parts", "gap")
        ]
    values = np.array([row["value"] for row in measured], dtype=float)
    n = np.array([sizes[row["client"]] for row in measured], dtype=float)
    p = n / n.sum()
    mean = math.fsum(p * values)
    about |= {
        "stderr": spread(values, p),
        "n_examples": int(n.sum()),
        "converged": all(row.get("converged", True) for row in measured),
    }
    residual = float(p @ np.array([error(row) for row in measured]))
    note = (
        f"{counted(len(parts) - len(measured), 'client')} without a value are left out"
        if len(measured) < len(parts)
        else None
    )
    mean_row = {
        **about,
        "metric": f"{metric}_parts",
        "slice": "client:*/train",
        "value": mean,
        "residual": residual,
        "note": note,
    }
    gap: Row = {**about, "metric": f"{metric}_gap", "slice": "train", "note": note}
    if global_row is None or global_row["value"] is None:
        reason = (
            "the aggregated model could not be measured"
            if global_row is None
            else global_row["note"]
        )
        return [mean_row, {**gap, "value": None, "stderr": None, "note": reason}]
    gap |= {
        "value": global_row["value"] - mean,
        "residual": residual + error(global_row),
        "converged": about["converged"] and global_row.get("converged", True),
    }
    if moment == "aggregated":
        # the whole is of the same clients at the same weights: other clients would move both
        gap["stderr"] = None
    return [mean_row, gap]


def error(row: Row) -> float:
    """The numerical error of a measure: an eigenvalue's bound, an estimated trace's standard error, rounding of a sharpness."""
    key = {"eigenvalue": "bound", "trace": "stderr"}.get(row["metric"], "residual")
    return float(row.get(key) or 0.0)


def spread(values: np.ndarray, p: np.ndarray) -> float | None:
    """The standard error of the weighted mean sum p_k v_k over clients that are a sample (of a ratio, to first order)."""
    m = len(values)
    return float(np.sqrt(m / (m - 1) * np.sum((p * (values - p @ values)) ** 2))) if m > 1 else None


def means(rows: Sequence[Row]) -> list[Row]:
    """The plain mean of ``stability`` over the clients."""
    values = np.array([row["value"] for row in rows if row["metric"] == "stability"], dtype=float)
    if not len(values):
        return []
    about: Row = {
        "metric": "stability",
        "moment": "trained",
        "scope": "global",
        "estimator": "lanczos",
        "slice": "client:*/train",
        "n_clients": len(values),
    }
    return [{**about, **sample_mean(values)}]
