"""Largest Hessian eigenvalues of several runs side by side, with their residuals; and what single layers add."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.tables import floats, names, need, select
from fldiag.results.select import only

PICTURE = "spectrum"


def draw(table: pd.DataFrame, *, log: bool | None = None, width: float | None = None) -> Figure:
    """Eigenvalues over their index, bars of ± residual, hollow markers where the solver has not converged.

    ``table``: rows ``metric="eigenvalue"`` with ``run, index, value`` and optionally ``residual`` and
    ``converged``. ``log``: logarithmic axis; by default taken when the values span more than a factor of 30,
    symmetric around 0 if some are not positive. Raises FldiagError for an unfit table.
    """
    need(table, ("metric", "run", "index", "value"), PICTURE)
    rows = select(table, "eigenvalue", PICTURE)
    rows = rows[_asked(rows)]
    flat = pd.DataFrame({"run": names(rows["run"]), "index": floats(rows["index"]), "value": floats(rows["value"])})
    flat["residual"] = floats(rows["residual"]) if "residual" in rows.columns else np.nan
    # A solver that does not say whether it converged is not accused of the contrary.
    flat["converged"] = [bool(pd.isna(v) or v) for v in rows["converged"]] if "converged" in rows.columns else True
    if not np.isfinite(flat["index"]).all() or not np.isfinite(flat["value"]).all():
        raise FldiagError("the spectrum has an eigenvalue without index or without a finite value",
                          "drop it or compute it again")
    twice = flat[flat.duplicated(["run", "index"])]
    if len(twice):
        run, index = twice.iloc[0][["run", "index"]]
        raise FldiagError(f"run {run!r} has two eigenvalues of index {index:g}",
                          "give every spectrum (slice, round) its own run label", usage=True)
    runs = list(dict.fromkeys(flat["run"]))
    looks = style.looks(runs)
    indices = sorted(flat["index"].unique())
    if width is None:
        width = style.ONE_COLUMN if len(indices) * len(runs) <= 32 else style.TWO_COLUMNS
    texts = [style.wrap(r, width - 0.5)[0] for r in runs]
    handles = [Line2D([], [], linestyle="none", color=looks[r].color, marker=looks[r].marker, markersize=3.8) for r in runs]
    if not flat["converged"].all():
        texts.append("hollow: not converged")
        handles.append(Line2D([], [], linestyle="none", color="#555555", marker="o", markersize=3.8,
                              markerfacecolor="white"))
    columns = max(1, min(len(texts), int(width / (max(style.text_width(t, 7) for t in texts) + 0.36))))
    with style.paper():
        fig = style.figure(width, 2.2 + 0.15 * -(-len(texts) // columns), layout="constrained")
        ax = fig.subplots()
        for place, run in enumerate(runs):
            shift = (place - (len(runs) - 1) / 2) * min(0.8 / len(runs), 0.22)
            _points(ax, flat[flat["run"] == run], looks[run], shift)
        _scale(ax, flat["value"].to_numpy(), log)
        of = set(rows["matrix"].dropna()) if "matrix" in rows.columns else set()
        ax.set(xlabel="index of the eigenvalue", ylabel="Gauss-Newton eigenvalue" if of == {"ggn"} else "Hessian eigenvalue")
        stride = -(-len(indices) // 20)
        ax.xaxis.set_major_locator(FixedLocator(indices[::stride]))
        ax.set_xlim(indices[0] - 0.6, indices[-1] + 0.6)
        ax.grid(True, axis="y")
        style.legend(fig, handles, texts, loc="outside lower center", ncols=columns, handletextpad=0.3,
                     columnspacing=1.2, borderpad=0.2)
    return fig


def _asked(rows: pd.DataFrame) -> np.ndarray:
    """Which eigenvalues are not those of single layers: every run's first row says which block was asked for."""
    if "layer" not in rows.columns:
        return np.ones(len(rows), dtype=bool)
    layer, runs = ["" if pd.isna(v) else str(v) for v in rows["layer"]], names(rows["run"])
    first = dict(zip(reversed(runs), reversed(layer), strict=True))
    return np.array([of == first[run] for of, run in zip(layer, runs, strict=True)], dtype=bool)


#: What may be known of every layer, and the label of its panel.
_LAYERS = {"eigenvalue": "largest eigenvalue of the layer's block", "trace": "trace of the layer's block",
           "diagonal_norm": "norm of the layer's diagonal"}


def _by_layer(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    rows = only(table, metric=metric)
    return rows[~_asked(rows)] if metric == "eigenvalue" else rows[rows["layer"].notna()]


def has_layers(table: pd.DataFrame) -> bool:
    """Whether the table says something of single layers."""
    return any(len(_by_layer(table, metric)) for metric in _LAYERS)


def layers(table: pd.DataFrame, *, width: float = style.TWO_COLUMNS) -> Figure:
    """Largest eigenvalue, trace and norm of the diagonal of every layer's own block, as far as the table has them; bars
    of ± residual or standard error. ``table``: what ``spectrum`` (with ``per_layer``), ``trace`` and ``diagonal`` return.

    Raises FldiagError for a table without layers.
    """
    need(table, ("metric", "run", "layer", "value"), PICTURE)
    parts = {metric: _by_layer(table, metric) for metric in _LAYERS}
    parts = {metric: rows for metric, rows in parts.items() if len(rows)}
    if not parts:
        raise FldiagError("the table says nothing of single layers", "ask for the trace, or per layer", usage=True)
    every = pd.concat(parts.values())
    labels, runs = list(dict.fromkeys(map(str, every["layer"]))), list(dict.fromkeys(names(every["run"])))
    looks, across = style.looks(runs), width / len(parts)
    with style.paper():
        fig = style.figure(width, 0.75 + 0.15 * len(runs) + max(0.14 * len(labels) * max(1, len(runs) / 2), 0.9),
                           layout="constrained")
        for ax, (metric, rows) in zip(fig.subplots(1, len(parts), squeeze=False, sharey=True).flat, parts.items(), strict=True):
            for place, run in enumerate(runs):
                mine = rows[[n == run for n in names(rows["run"])]]
                if mine.empty:
                    continue
                at = np.array([labels.index(str(v)) for v in mine["layer"]]) + 0.8 * ((place + 0.5) / len(runs) - 0.5)
                column = "residual" if metric == "eigenvalue" else "stderr"
                values, error = floats(mine["value"]), np.nan_to_num(floats(mine[column])) if column in mine.columns else 0
                ax.barh(at, values, 0.8 / len(runs), color=looks[run].color)
                if np.any(error > 5e-3 * np.abs(values).max()):  # smaller ones would be specks
                    ax.errorbar(values, at, xerr=error, fmt="none", elinewidth=0.7, capsize=1.2, ecolor="#888888")
            ax.set_title("\n".join(style.wrap(_LAYERS[metric], across - 0.8, 2, 8.0)), fontsize=8)
            ax.axvline(0, color="black", linewidth=0.5)
            ax.xaxis.set_major_locator(MaxNLocator(4))
            ax.grid(True, axis="x")
            ax.set_yticks(range(len(labels)), [style.plain(style.shorten(v, 24)) for v in labels])
            ax.set_ylim(len(labels) - 0.4, -0.6)
        keys = [Patch(color=looks[r].color) for r in runs]
        style.legend(fig, keys, [style.wrap(r, width - 0.6)[0] for r in runs], loc="outside lower center",
                     ncols=1 if max(map(len, runs)) > 40 else min(len(runs), 3), borderpad=0.2, labelspacing=0.3)
    return fig


def _points(ax, part: pd.DataFrame, look: style.Look, shift: float) -> None:
    at, value = part["index"].to_numpy() + shift, part["value"].to_numpy()
    known = np.isfinite(part["residual"])
    ax.errorbar(at[known], value[known], yerr=part["residual"].abs()[known], fmt="none", ecolor=look.color,
                elinewidth=0.8)
    for done, face in ((True, look.color), (False, "white")):
        kind = (part["converged"] == done).to_numpy()
        if kind.any():
            ax.plot(at[kind], value[kind], linestyle="none", marker=look.marker, color=look.color,
                    markersize=3.4, markerfacecolor=face, label="converged" if done else "not converged")


def _scale(ax, values: np.ndarray, log: bool | None) -> None:
    sizes = np.abs(values[values != 0])
    if log is None:
        log = bool(len(sizes) > 1 and sizes.max() > 30 * sizes.min())
    if log and (values > 0).all():
        ax.set_yscale("log", nonpositive="clip")
        # Fewer than two decades would otherwise show a single label.
        if values.max() < 100 * values.min():
            ax.yaxis.set_minor_formatter(lambda v, _: style.number(v) if f"{v:.0e}"[0] in "25" else "")
            ax.tick_params(axis="y", which="minor", labelsize=6)
        ax.yaxis.set_major_formatter(lambda v, _: style.number(v))
    elif log and len(sizes):
        ax.set_yscale("symlog", linthresh=max(float(sizes.min()), 1e-4 * float(sizes.max())))
        ax.axhline(0, color="#888888", linewidth=0.6)
    elif (values < 0).any():
        ax.axhline(0, color="#888888", linewidth=0.6)
