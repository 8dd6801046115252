"""The whole against its parts: weighted means over the clients, the gaps, and their errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fldiag.errors import counted
from fldiag.results.table import Row

MEASURES = ("sharpness", "eigenvalue", "trace")
#: Measured of each client, and summed up by a plain mean.
AVERAGED = ("flatness_distance", "perturbation_misalignment", "gradient_score")


def gaps(rows: Sequence[Row], sizes: Mapping[int, int]) -> list[Row]:
    """``…_parts`` and ``…_gap`` of every measure, at the trained weights and at one point. ``sizes``: examples by client."""
    found: list[Row] = []
    for metric in MEASURES:
        mine = [row for row in rows if row["metric"] == metric]
        whole = next((row for row in mine if row["scope"] == "global"), None)
        for moment in ("trained", "aggregated"):
            parts = [row for row in mine if row["scope"] == "client" and row["moment"] == moment]
            found += _gap(metric, moment, whole, parts, sizes)
    return found


def _gap(
    metric: str, moment: str, whole: Row | None, parts: Sequence[Row], sizes: Mapping[int, int]
) -> list[Row]:
    known = [row for row in parts if row["value"] is not None]
    about: Row = {
        "moment": moment,
        "scope": "global",
        "index": 1 if metric == "eigenvalue" else None,
        "n_clients": len(known),
        "estimator": " and ".join(sorted({str(row["estimator"]) for row in known})) or "exact",
    }
    if not known:
        why = next(
            (row["note"] for row in parts if row.get("note")),
            "no client of this round could be measured",
        )
        return [
            {**about, "metric": f"{metric}_{what}", "value": None, "note": why}
            for what in ("parts", "gap")
        ]
    values = np.array([row["value"] for row in known], dtype=float)
    n = np.array([sizes[row["client"]] for row in known], dtype=float)
    p = n / n.sum()
    mean = math.fsum(p * values)
    about |= {
        "stderr": spread(values, p),
        "n_examples": int(n.sum()),
        "converged": all(row.get("converged", True) for row in known),
    }
    residual = float(p @ np.array([error(row) for row in known]))
    note = (
        f"{counted(len(parts) - len(known), 'client')} without a value are left out"
        if len(known) < len(parts)
        else None
    )
    made = {
        **about,
        "metric": f"{metric}_parts",
        "slice": "client:*/train",
        "value": mean,
        "residual": residual,
        "note": note,
    }
    gap: Row = {**about, "metric": f"{metric}_gap", "slice": "train", "note": note}
    if whole is None or whole["value"] is None:
        missing = "the aggregated model could not be measured" if whole is None else whole["note"]
        return [made, {**gap, "value": None, "stderr": None, "note": missing}]
    gap |= {
        "value": whole["value"] - mean,
        "residual": residual + error(whole),
        "converged": about["converged"] and whole.get("converged", True),
    }
    if (
        moment == "aggregated"
    ):  # the whole is of the same clients at the same weights: other clients would move both
        gap["stderr"] = None
    return [made, gap]


def error(row: Row) -> float:
    """The numerical error of a measure: an eigenvalue's bound, an estimated trace's standard error, rounding of a sharpness."""
    key = {"eigenvalue": "bound", "trace": "stderr"}.get(row["metric"], "residual")
    return float(row.get(key) or 0.0)


def spread(values: np.ndarray, p: np.ndarray) -> float | None:
    """The standard error of the weighted mean sum p_k v_k over clients that are a sample (of a ratio, to first order)."""
    m = len(values)
    return float(np.sqrt(m / (m - 1) * np.sum((p * (values - p @ values)) ** 2))) if m > 1 else None


def means(rows: Sequence[Row]) -> list[Row]:
    """Plain means over the clients."""
    groups: dict[tuple[str, str, str | None], list[Row]] = {}
    for row in rows:
        if row["metric"] in AVERAGED:
            groups.setdefault((row["metric"], row["moment"], row.get("layer")), []).append(row)
    found: list[Row] = []
    for (metric, moment, layer), members in groups.items():
        values = np.array(
            [row["value"] for row in members if row["value"] is not None], dtype=float
        )
        about: Row = {
            "metric": metric,
            "moment": moment,
            "layer": layer,
            "scope": "global",
            "estimator": "exact",
            "slice": members[0]["slice"] if metric == "gradient_score" else "train",
            "n_clients": len(values),
        }
        if not len(values):
            found.append(
                {
                    **about,
                    "value": None,
                    "note": next((row["note"] for row in members if row.get("note")), None),
                }
            )
            continue
        stderr = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
        found.append({**about, "value": float(values.mean()), "stderr": stderr})
    return found
