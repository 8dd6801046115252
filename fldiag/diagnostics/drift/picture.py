"""Client drift over the rounds: distances and cosines, the conflict of local and proximal loss, and Lambda by layer.

Panels as in Lee et al., "FedSOL" (CVPR 2024), figures 3, 5b and 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

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


@compares_runs
def layers_if_any(table: pd.DataFrame) -> Figure | None:
    """Mean Lambda of every layer in each run's last round, times the root of its size where that is known (then it is 1 where
    all entries moved alike): dots at the trained weights, rings over the local steps where training recorded it. None
    where it was not computed."""
    need(table, COLUMNS, PICTURE)
    rows = only(table, scope="global", metric="lambda_mean", estimator=("exact", "steps"))
    rows = rows[rows["layer"].notna()]
    if not (rows["estimator"] == "exact").any():
        return None
    rows = rows.assign(run=names(rows["run"]) if "run" in rows.columns else "")
    runs, layers = (list(dict.fromkeys(map(str, rows[c]))) for c in ("run", "layer"))
    scaled = "scaled" in rows.columns and bool(rows["scaled"].notna().any())
    looks = style.looks(runs) if len(runs) > 1 else {runs[0]: style.look(2)}
    with style.paper():
        width = style.wide(style.ONE_COLUMN)
        fig = style.figure(width, 0.9 + 0.17 * len(layers), layout="constrained")
        ax = fig.subplots()
        for place, run in enumerate(runs):
            run_rows = rows[rows["run"] == run]
            last = run_rows[run_rows["round"] == only(run_rows, estimator="exact")["round"].max()]
            shift = 0.5 * (place - (len(runs) - 1) / 2) / len(runs)
            for how, face in (("exact", looks[run].color), ("steps", "white")):
                part = only(last, estimator=how)
                x = floats(part["scaled" if scaled else "value"])
                y = [layers.index(str(layer)) + shift for layer in part["layer"]]
                ax.plot(x, y, **looks[run].point, markerfacecolor=face, label=how)
        style.names_down(ax, layers)
        ax.set_xlim(left=0)
        text = "mean Λ × √size\n(1: all entries of a layer moved alike)" if scaled else "mean Λ"
        ax.set_xlabel(text)
        if scaled:
            ax.axvline(1, color="black", linewidth=0.5, linestyle=(0, (2, 2)))
        ax.grid(True)
        rings = (rows["estimator"] == "steps").any()
        ax.set_title(
            f"Λ by layer, round {int(rows['round'].max())}"
            + ("; rings: local steps" if rings else ""),
            fontsize=8,
        )
        if len(runs) > 1:
            curves.legend_of_runs(fig, looks)
    return fig


@compares_runs
def agreement_if_any(table: pd.DataFrame) -> Figure | None:
    """Signal-to-noise ratio of the clients' updates, with its interval, and their consensus over the rounds, and the ratio of
    each layer in the last round. None where no round has two clients."""
    need(table, COLUMNS, PICTURE)
    ratios, consensus = (
        only(table, metric=metric).dropna(subset=["value"])
        for metric in ("update_snr", "update_consensus")
    )
    if ratios.empty or not {"low", "high"} <= set(ratios.columns):
        return None
    runs = list(dict.fromkeys(names(ratios["run"])))
    looks = style.looks(runs) if len(runs) > 1 else {runs[0]: style.look(2)}
    of_layers = ratios[ratios["layer"].notna()]
    layers = list(dict.fromkeys(map(str, of_layers["layer"])))
    with style.paper():
        fig, axes = style.panels(3, max(2.2, 0.7 + 0.17 * len(layers)))
        labels = ("signal-to-noise ratio of updates", "consensus of updates")
        for ax, rows, label in zip(axes, (ratios, consensus), labels, strict=False):
            for run, look in looks.items():
                part = rows[[name == run for name in names(rows["run"])]]
                part = only(part, layer=None).set_index("round").sort_index()
                is_ratio = rows is ratios
                band = (floats(part["low"]), floats(part["high"])) if is_ratio else None
                curves.line(ax, part, look, band)
            curves.rounds_axis(ax)
            ax.set_ylabel(label)
            ax.grid(True)
        axes[0].axhline(0, color="black", linewidth=0.5)
        axes[1].set_ylim(0, 1)
        for run, look in looks.items():
            part = of_layers[[name == run for name in names(of_layers["run"])]]
            part = part[part["round"] == part["round"].max()]
            places = [layers.index(str(layer)) for layer in part["layer"]]
            value, low, high = (floats(part[c]) for c in ("value", "low", "high"))
            axes[2].hlines(places, low, high, color=look.color, linewidth=0.8)
            axes[2].plot(value, places, **look.point)
        axes[2].axvline(0, color="black", linewidth=0.5)
        style.names_down(axes[2], layers, 18)
        axes[2].set_xlabel(f"the ratio by layer, round {int(ratios['round'].max())}")
        axes[2].grid(True)
        if len(runs) > 1:
            curves.legend_of_runs(fig, looks)
    return fig


def upload_if_any(table: pd.DataFrame) -> Figure | None:
    """What an upload would lose in the last round: the relative error of each layer, mean over the clients, and what the altered
    mean adds to the loss, with two standard errors. None where it was not computed."""
    need(table, COLUMNS, PICTURE)
    rows = only(table, scope="global", metric=("upload_error", "upload_loss"))
    if rows["value"].dropna().empty:
        return None
    rows = rows[rows["round"] == rows["round"].max()].dropna(subset=["value"])
    errors, losses = (only(rows, metric=metric) for metric in ("upload_error", "upload_loss"))
    layers = ["all" if pd.isna(v) else str(v) for v in errors["layer"].drop_duplicates()]
    kinds = list(dict.fromkeys(errors["upload"]))
    looks = {kind: style.look(i + 1) for i, kind in enumerate(kinds)}
    with style.paper():
        fig, axes = style.panels(2 if len(losses) else 1, max(2.0, 0.8 + 0.17 * len(layers)))
        for kind, look in looks.items():
            part = only(errors, upload=kind)
            places = [layers.index("all" if pd.isna(v) else str(v)) for v in part["layer"]]
            axes[0].plot(floats(part["value"]), places, **look.point)
        style.names_down(axes[0], layers, 18)
        axes[0].set_xlabel("relative error of an upload")
        axes[0].set_xlim(left=0)
        axes[0].grid(True)
        for place, (_, row) in enumerate(losses.iterrows()):
            error = 0.0 if pd.isna(row["stderr"]) else 2 * float(row["stderr"])
            axes[1].errorbar(place, row["value"], error, **looks[str(row["upload"])].point)
        if len(losses):
            axes[1].axhline(0, color="black", linewidth=0.5)
            axes[1].set_xticks(range(len(losses)), list(losses["upload"]))
            axes[1].set_xlim(-0.5, len(losses) - 0.5)
            axes[1].set_ylabel("added to the loss")
            axes[1].grid(True)
        handles = [Line2D([], [], **look.point) for look in looks.values()]
        style.legend(fig, handles, [f"{kind}" for kind in kinds])
    return fig
