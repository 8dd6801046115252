"""Client drift over the rounds: divergence, cosines, proximal loss, representations, and Lambda by layer.

Panels as in Lee et al., "FedSOL" (CVPR 2024), figures 3, 5b and 6.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fldiag.plotting import style
from fldiag.plotting.forgetting import key, line, only, rounds
from fldiag.plotting.tables import floats, need, select

PICTURE = "picture of drift"


def draw(table: pd.DataFrame, *, width: float = style.TWO_COLUMNS) -> Figure:
    """Means over the clients of every round in panels; what was not computed has none. ``table``: what the diagnostic
    ``drift`` returns. Bands: standard error over the clients. Raises FldiagError for another table."""
    need(table, ("metric", "round", "scope", "moment", "layer", "value", "estimator"), PICTURE)
    select(table, "global_local_divergence", PICTURE)
    rows = only(table, scope="global", estimator="exact")
    whole = rows[rows["layer"].isna()]
    panels = [("distance of weights", [(whole, m, t) for m, t in (
        ("global_local_divergence", "global–local"), ("local_local_divergence", "local–local"))], None),
              ("cosine", [(whole, m, t) for m, t in (
                  ("update_cosine", "update, update"), ("server_cosine", "update, server"),
                  ("gradient_cosine", "gradient, global gradient"))], 0.0)]
    if (whole["metric"] == "proximal_loss").any():
        panels.append(("mean proximal loss", [(whole, "proximal_loss", "trained models")], None))
    angles = only(whole, metric="cos_gu_gp")
    if len(angles):
        radii = sorted(angles["rho"].dropna().astype(float).unique())
        panels.append(("cosine of g_u and g_p", [(only(angles, rho=r), "cos_gu_gp", f"ρ = {r:g}") for r in radii], 0.0))
    if (whole["metric"] == "cka").any():
        panels.append(("CKA with the received model", [(whole, "cka", "trained models")], None))
    strong = only(rows, metric="lambda_mean")
    count = len(panels) + bool(len(strong))
    down = -(-count // 3)
    with style.paper():
        fig = style.figure(width, 2.35 * down, layout="constrained")
        axes = list(fig.subplots(down, 3, squeeze=False).flat)
        for ax, (label, lines, zero) in zip(axes, panels, strict=False):
            _panel(ax, label, lines, zero)
        if len(strong):
            _layers(axes[len(panels)], strong)
        for ax in axes[count:]:
            ax.remove()
    return fig


def _panel(ax, label: str, lines: Sequence[tuple[pd.DataFrame, str, str]], zero: float | None) -> None:
    keys = []
    for place, (rows, metric, text) in enumerate(lines):
        found = only(rows, metric=metric).dropna(subset=["value", "round"])
        found = found[~found["moment"].isin(["aggregated"])]
        if found.empty:
            continue
        found, look = found.set_index("round").sort_index(), style.look(place + 1)
        error = floats(found["stderr"]) if "stderr" in found.columns else np.full(len(found), np.nan)
        middle = floats(found["value"])
        crowded = len(lines) > 3  # bands on bands say nothing
        line(ax, found, look, (middle - error, middle + error) if np.isfinite(error).any() and not crowded else None)
        keys.append((key(look), text))
    rounds(ax)
    if zero is not None:
        ax.axhline(zero, color="black", linewidth=0.5)
    ax.set(xlabel="round", ylabel=label)
    ax.grid(True)
    if len(lines) > 1 and keys:
        style.legend(ax, [k for k, _ in keys], [t for _, t in keys], loc="upper center", bbox_to_anchor=(0.5, -0.24),
                     ncols=1 if max(len(t) for _, t in keys) > 10 else 2, handlelength=2.4, borderpad=0.1, labelspacing=0.3)


def _layers(ax, rows: pd.DataFrame) -> None:
    """Lambda of every layer in the last round, times the root of its size: 1 where all entries moved alike."""
    last = rows[rows["round"] == rows["round"].max()]
    names = [str(v) for v in last["layer"]]
    values = floats(last["scaled"]) if "scaled" in last.columns else floats(last["value"])
    ax.bar(range(len(names)), values, 0.7, color=style.look(2).color)
    every = max(1, -(-len(names) // 12))
    texts = [style.plain(style.shorten(n, 14)) for n in names[::every]]
    ax.set_xticks(range(0, len(names), every), texts, rotation=40, ha="right")
    ax.set(ylabel="mean Λ × √size", title=f"Λ by layer, round {int(last['round'].iloc[0])}")
    ax.set_ylim(0, max(1.0, float(np.nanmax(values)) * 1.05 if np.isfinite(values).any() else 1.0))
    ax.axhline(1, color="black", linewidth=0.5, linestyle=(0, (2, 2)))
    ax.grid(True, axis="y")
