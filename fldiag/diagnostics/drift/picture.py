"""Client drift over the rounds: divergence, cosines, proximal loss, representations, and Lambda by layer.

Panels as in Lee et al., "FedSOL" (CVPR 2024), figures 3, 5b and 6.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fldiag.diagnostics.forgetting.picture import key, line, rounds
from fldiag.plotting import style
from fldiag.plotting.tables import floats, need, select
from fldiag.results.select import only

PICTURE = "picture of drift"


def draw(table: pd.DataFrame) -> Figure:
    """Means over the clients of every round in panels; what was not computed has none. ``table``: what the diagnostic
    ``drift`` returns. Bands: standard error over the clients. Means over the local steps, where training recorded them,
    have panels of their own, and bars beside those at the trained weights. Raises FldiagError for another table."""
    need(table, ("metric", "round", "scope", "moment", "layer", "value", "estimator"), PICTURE)
    select(table, "global_local_divergence", PICTURE)
    rows, steps = (only(table, scope="global", estimator=how) for how in ("exact", "steps"))
    whole = only(rows, layer=None)
    panels = [
        (
            "distance of weights",
            [
                (whole, m, t)
                for m, t in (
                    ("global_local_divergence", "global–local"),
                    ("local_local_divergence", "local–local"),
                )
            ],
            None,
        ),
        (
            "cosine",
            [
                (whole, m, t)
                for m, t in (
                    ("update_cosine", "update, update"),
                    ("server_cosine", "update, server"),
                    ("gradient_cosine", "gradient, global gradient"),
                )
            ],
            0.0,
        ),
    ]
    if (whole["metric"] == "cka").any():
        panels.append(("CKA with the\nreceived model", [(whole, "cka", "trained models")], None))
    if (whole["metric"] == "proximal_loss").any():
        panels.append(("mean proximal loss", [(whole, "proximal_loss", "trained models")], None))
    losses = only(steps, metric="proximal_loss")
    if len(losses):
        panels.append(
            (
                f"proximal loss, {_kind(losses)}\n(mean over local steps)",
                [(losses, "proximal_loss", "")],
                None,
            )
        )
    angles = only(whole, metric="cos_gu_gp")
    if len(angles):
        radii = sorted(angles["rho"].dropna().astype(float).unique())
        panels.append(
            (
                "cosine of $g_u$ and $g_p$",
                [(only(angles, rho=r), "cos_gu_gp", f"ρ = {r:g}") for r in radii],
                0.0,
            )
        )
    angles = only(steps, metric="cos_gu_gp")
    if len(angles):
        parts = [
            (only(angles, layer=None), "all parameters"),
            (only(angles, layer="part:head"), "head"),
        ]
        panels.append(
            (
                "cosine of $g_u$ and $g_p$\n(mean over local steps)",
                [
                    (rows, "cos_gu_gp", f"{text}, {_kind(rows)}")
                    for rows, text in parts
                    if len(rows)
                ],
                0.0,
            )
        )
    strong, recorded = only(rows, metric="lambda_mean"), only(steps, metric="lambda_mean")
    count = len(panels) + bool(len(strong))
    with style.paper():
        fig, axes = style.panels(count, 2.35)
        for ax, (label, lines, zero) in zip(axes, panels, strict=False):
            _panel(ax, label, lines, zero)
        if len(strong):
            _layers(axes[len(panels)], strong, recorded)
    return fig


def _panel(
    ax, label: str, lines: Sequence[tuple[pd.DataFrame, str, str]], zero: float | None
) -> None:
    keys = []
    for place, (rows, metric, text) in enumerate(lines):
        found = only(rows, metric=metric).dropna(subset=["value", "round"])
        found = found[~found["moment"].isin(["aggregated"])]
        if found.empty:
            continue
        found, look = found.set_index("round").sort_index(), style.look(place + 1)
        error = (
            floats(found["stderr"]) if "stderr" in found.columns else np.full(len(found), np.nan)
        )
        middle = floats(found["value"])
        crowded = len(lines) > 3  # bands on bands say nothing
        line(
            ax,
            found,
            look,
            (middle - error, middle + error) if np.isfinite(error).any() and not crowded else None,
        )
        keys.append((key(look), text))
    rounds(ax)
    if zero is not None:
        ax.axhline(zero, color="black", linewidth=0.5)
    ax.set(xlabel="round", ylabel=label)
    ax.grid(True)
    if len(lines) > 1 and keys:
        style.legend(
            ax,
            [k for k, _ in keys],
            [t for _, t in keys],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.24),
            ncols=1 if max(len(t) for _, t in keys) > 10 else 2,
            handlelength=2.4,
            borderpad=0.1,
            labelspacing=0.3,
        )


def _kind(rows: pd.DataFrame) -> str:
    """Which proximal loss was recorded: ``kl:3`` as KL at its temperature."""
    found = rows["proximal"].dropna().unique() if "proximal" in rows.columns else []
    name, _, tau = str(found[0] if len(found) else "").partition(":")
    return {"kl": f"KL, τ = {tau}", "l2": "L2"}.get(name, "the method's own")


def _layers(ax, rows: pd.DataFrame, recorded: pd.DataFrame) -> None:
    """Lambda of every layer in the last round, times the root of its size where that says something: 1 where all entries
    moved alike; at the trained weights, and where training recorded it (only of the layers that the method perturbs) over
    the local steps."""
    last = rows[rows["round"] == rows["round"].max()]
    recorded = recorded[recorded["round"] == last["round"].iloc[0]]
    names = [str(v) for v in last["layer"]]
    scaled = "scaled" in last.columns and bool(last["scaled"].notna().any())
    column = "scaled" if scaled else "value"
    values = floats(last[column])
    both = column in recorded.columns and bool(recorded[column].notna().any())
    if both:
        steps = dict(zip(map(str, recorded["layer"]), floats(recorded[column]), strict=True))
        names += [
            n for n in steps if n not in names
        ]  # tensors, where Lambda is one of tensors and not of layers
        values = np.concatenate([values, np.full(len(names) - len(values), np.nan)])
        beside = np.array([steps.get(n, np.nan) for n in names])
        ax.bar(
            np.arange(len(names)) + 0.2,
            beside,
            0.4,
            color=style.look(1).color,
            label="mean over local steps",
        )
    ax.bar(
        np.arange(len(names)) - 0.2 * both,
        values,
        0.4 if both else 0.7,
        color=style.look(2).color,
        label="trained models",
    )
    every = max(1, -(-len(names) // 12))
    texts = [style.plain(style.shorten(n, 14)) for n in names[::every]]
    ax.set_xticks(range(0, len(names), every), texts, rotation=40, ha="right")
    ax.set(
        ylabel="mean Λ × √size" if scaled else "mean Λ",
        title=f"Λ by layer, round {int(last['round'].iloc[0])}",
    )
    tallest = max(
        [1.0, *(1.05 * v for v in (*values, *(beside if both else ())) if np.isfinite(v))]
    )
    ax.set_ylim(0, tallest * (1.3 if both else 1))
    if scaled:
        ax.axhline(1, color="black", linewidth=0.5, linestyle=(0, (2, 2)))
    ax.grid(True, axis="y")
    if both:
        handles, texts = ax.get_legend_handles_labels()
        style.legend(ax, handles[::-1], texts[::-1], loc="upper right")
