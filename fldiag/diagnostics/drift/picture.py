"""Client drift over the rounds: distances and cosines, and the conflict of local and proximal loss.

Panels as in Lee et al., "FedSOL" (CVPR 2024), figures 3, 5b and 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fldiag.plotting import curves, style
from fldiag.plotting.tables import compares_runs, floats, names, need, select
from fldiag.results.select import only

PICTURE = "picture of drift"
COLUMNS = ("metric", "round", "scope", "moment", "layer", "value", "estimator")


@dataclass(frozen=True)
class Panel:
    """``lines``: rows of one metric by the name of their line. ``zero``: whether a line stands at 0."""

    label: str
    lines: Sequence[tuple[pd.DataFrame, str]]
    zero: bool = False


@compares_runs
def draw(table: pd.DataFrame) -> Figure:
    """Distances of weights, cosines and similarity of representations: means over the clients of every round, with standard
    errors; what was not computed has no panel. Of several runs a panel a number, a line a run.

    ``table``: what the diagnostic ``drift`` returns. Raises FldiagError for another table.
    """
    need(table, COLUMNS, PICTURE)
    select(table, "global_local_divergence", PICTURE)
    network_rows = only(table, scope="global", estimator="exact", layer=None)
    distances = {"global_local_divergence": "global–local", "local_local_divergence": "local–local"}
    cosines = {
        "update_cosine": "update, update",
        "server_cosine": "update, server",
        "gradient_cosine": "gradient, global gradient",
    }
    panels = [
        Panel(
            "distance of weights", [(only(network_rows, metric=m), t) for m, t in distances.items()]
        ),
        Panel("cosine", [(only(network_rows, metric=m), t) for m, t in cosines.items()], zero=True),
        Panel("CKA with the\nreceived model", [(only(network_rows, metric="cka"), "")]),
    ]
    return _figure(panels, table)


@compares_runs
def conflict_if_any(table: pd.DataFrame) -> Figure | None:
    """Proximal loss and the cosine of g_u and g_p, of the trained models and over the local steps that training recorded;
    None where neither is known."""
    need(table, COLUMNS, PICTURE)
    rows, steps = (
        only(table, scope="global", estimator=how, metric=("proximal_loss", "cos_gu_gp"))
        for how in ("exact", "steps")
    )
    panels = [Panel("mean proximal loss", [(only(rows, metric="proximal_loss", layer=None), "")])]
    losses = only(steps, metric="proximal_loss")
    for kind in _kinds(losses):
        label = f"proximal loss, {kind}\n(mean over local steps)"
        panels.append(Panel(label, [(_of_kind(losses, kind), "")]))
    angles = only(rows, metric="cos_gu_gp", layer=None)
    if "rho" in angles.columns:
        radii = sorted(angles["rho"].dropna().astype(float).unique())
        lines = [(only(angles, rho=r), f"ρ = {r:g}") for r in radii]
        panels.append(Panel("cosine of $g_u$ and $g_p$", lines, zero=True))
    angles = only(steps, metric="cos_gu_gp")
    lines = [
        (only(_of_kind(angles, kind), layer=layer), f"{text}, {kind}")
        for layer, text in ((None, "all parameters"), ("part:head", "head"))
        for kind in _kinds(only(angles, layer=layer))
    ]
    label = "cosine of $g_u$ and $g_p$\n(mean over local steps)"
    panels.append(Panel(label, lines, zero=True))
    return _figure(panels, table) if any(len(r) for p in panels for r, _ in p.lines) else None


def _figure(panels: Sequence[Panel], table: pd.DataFrame) -> Figure:
    """The panels that have values; of several runs each curve has a panel of its own, with a line a run."""
    runs = list(dict.fromkeys(names(table["run"]))) if "run" in table.columns else []
    panels = [
        Panel(p.label, lines, p.zero)
        for p in panels
        if (lines := [(_plotted(rows), text) for rows, text in p.lines if len(_plotted(rows))])
    ]
    with style.paper():
        if len(runs) <= 1:
            fig, axes = style.panels(len(panels), 2.35)
            for ax, panel in zip(axes, panels, strict=True):
                looks = {text: style.look(i + 1) for i, (_, text) in enumerate(panel.lines)}
                _lines(ax, panel, looks)
                if len(looks) > 1:
                    curves.legend_below(ax, looks, ncols=1 if max(map(len, looks)) > 10 else 2)
            return fig
        looks = style.looks(runs)
        single = [(p, rows, text) for p in panels for rows, text in p.lines]
        fig, axes = style.panels(len(single), 1.95, 0.1, least=1.6)
        for ax, (panel, rows, text) in zip(axes, single, strict=True):
            parts = [(rows[[name == run for name in names(rows["run"])]], run) for run in runs]
            lines = [(part, run) for part, run in parts if len(part)]
            _lines(ax, Panel(panel.label, lines, panel.zero), looks)
            ax.set_title(style.plain(text), fontsize=8)
        curves.legend_of_runs(fig, looks)
    return fig


def _plotted(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows.dropna(subset=["value", "round"])
    return rows[~rows["moment"].isin(["aggregated"])]


def _lines(ax: Axes, panel: Panel, looks: dict[str, style.Look]) -> None:
    for rows, text in panel.lines:
        rows = rows.set_index("round").sort_index()
        error = floats(rows["stderr"]) if "stderr" in rows.columns else np.full(len(rows), np.nan)
        middle = floats(rows["value"])
        banded = np.isfinite(error).any() and len(panel.lines) <= 3  # bands on bands say nothing
        curves.line(ax, rows, looks[text], (middle - error, middle + error) if banded else None)
    curves.rounds_axis(ax)
    if panel.zero:
        ax.axhline(0, color="black", linewidth=0.5)
    ax.set_ylabel(panel.label)
    ax.grid(True)


def _kinds(rows: pd.DataFrame) -> list[str]:
    """Which proximal losses were recorded, in words."""
    if "proximal" not in rows.columns:
        return ["the method's own"] if len(rows) else []
    return list(dict.fromkeys(map(_kind, rows["proximal"])))


def _kind(proximal: object) -> str:
    """``kl:3`` is KL at its temperature."""
    name, _, tau = ("" if pd.isna(proximal) else str(proximal)).partition(":")
    return {"kl": f"KL, τ = {tau}", "l2": "L2"}.get(name, "the method's own")


def _of_kind(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    if "proximal" not in rows.columns:
        return rows
    return rows[[_kind(proximal) == kind for proximal in rows["proximal"]]]
