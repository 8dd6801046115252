"""Cross-client Hessian matching: heatmaps of pairs of clients, bars of their curvature."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from fldiag.plotting import style
from fldiag.plotting.curves import legend_of_runs
from fldiag.plotting.heatmap import draw_cells, of_pairs
from fldiag.plotting.tables import compares_runs, floats, names, need, select
from fldiag.results.select import number, only

PICTURE = "picture of matching"
COLUMNS = ("metric", "round", "moment", "scope", "client", "client_b", "value", "diag_mode", "data")
_MODES = {"diag": "diagonals", "tensor_trace": "tensor traces"}
_DATA = {"client": "own data", "global": "all clients' data"}
_FROM = {"diag": "as in the paper", "tensor_trace": "as in the released code"}


@compares_runs
def draw(table: pd.DataFrame) -> Figure | None:
    """H_N and H_D of every pair, in the paper's form and in the released code's; of several runs beside each other, on the
    same colours.

    ``table``: what the diagnostic ``matching`` returns, of which each run's last round is drawn. Blank cells: the pairs of a
    client with itself, and what is not defined. None without pairs. Raises FldiagError for an unfit table.
    """
    runs = _last_rounds(table)
    data = [
        d for d in _DATA if any((only(r, metric="H_N")["data"] == d).any() for r in runs.values())
    ]
    # the paper compares diagonals on own data, the released code tensor traces on everybody's
    forms = [("diag", data[0]), ("tensor_trace", data[-1])]
    kinds = [
        (metric, {"diag_mode": mode, "data": d}, f"{_MODES[mode]}, {_DATA[d]}\n({_FROM[mode]})")
        for mode, d in forms
        for metric in ("H_N", "H_D")
    ]
    panels = []
    for metric, columns, text in kinds:
        parts = {run: only(rows, metric=metric, **columns) for run, rows in runs.items()}
        panels += [(metric, parts, run, text) for run in runs if _pairs(parts[run])]
    if not panels:
        return None
    with style.paper():
        across = 4 if len(runs) in (1, 2, 4) else 3
        fig, axes = style.panels(len(panels), 2.1, 0.25, across=across, least=1.6)
        for ax, (metric, parts, run, text) in zip(axes, panels, strict=True):
            norm = _norm(
                metric, np.concatenate([floats(_pair_rows(p)["value"]) for p in parts.values()])
            )
            label = text if len(runs) == 1 else f"{text}\n{style.shorten(run, 26)}"
            _matrix(fig, ax, metric, parts[run], label, norm)
        fig.suptitle(_when(runs), fontsize=8.5)
    return fig


@compares_runs
def curvature(table: pd.DataFrame) -> Figure | None:
    """The overlap of the clients' eigenspaces; lambda_max and trace with residuals or standard errors; hollow: not converged.
    None where none of these was computed."""
    runs = _last_rounds(table)
    space = {run: only(rows, metric="eigenspace_overlap") for run, rows in runs.items()}
    bars = [k for k in ("lambda_max", "trace") if any(len(_bar(r, k)) for r in runs.values())]
    matrices = [run for run in runs if _pairs(space[run])]
    if not bars and not matrices:
        return None
    with style.paper():
        count = len(matrices) + len(bars)
        fig, axes = style.panels(count, 2.15, 0.25, across=4 if count == 4 else 3, least=1.6)
        overlaps = np.concatenate([floats(_pair_rows(p)["value"]) for p in space.values()])
        for ax, run in zip(axes, matrices, strict=False):
            text = "eigenspaces"
            label = text if len(runs) == 1 else f"{text}\n{style.shorten(run, 26)}"
            _matrix(fig, ax, "overlap", space[run], label, _norm("overlap", overlaps))
        looks = style.looks(runs) if len(runs) > 1 else {run: style.look(2) for run in runs}
        for ax, kind in zip(axes[len(matrices) :], bars, strict=True):
            _bars(ax, kind, {run: _bar(rows, kind) for run, rows in runs.items()}, looks)
        parts = [_bar(rows, kind) for rows in runs.values() for kind in bars]
        hollow = any((~_converged(part)).any() for part in parts)
        fig.suptitle(_when(runs) + ("; hollow: not converged" if hollow else ""), fontsize=8.5)
        if len(runs) > 1:
            legend_of_runs(fig, looks)
    return fig


def _last_rounds(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Run -> its rows of its last round. Raises FldiagError for an unfit table."""
    need(table, COLUMNS, PICTURE)
    select(table, "H_N", PICTURE)
    labels = names(table["run"]) if "run" in table.columns else [""] * len(table)
    runs = {}
    for run in dict.fromkeys(labels):
        rows = table[[label == run for label in labels]]
        runs[run] = only(rows, round=int(select(rows, "H_N", PICTURE)["round"].max()))
    return runs


def _when(runs: dict[str, pd.DataFrame]) -> str:
    rounds = sorted({int(rows["round"].iloc[0]) for rows in runs.values()})
    return f"round{'s' * (len(rounds) > 1)} {', '.join(map(str, rounds))}"


def _pair_rows(rows: pd.DataFrame) -> pd.DataFrame:
    return only(rows, scope="pair")


def _pairs(rows: pd.DataFrame) -> bool:
    return bool(len(_pair_rows(rows)))


def _matrix(
    fig: Figure, ax: Axes, metric: str, rows: pd.DataFrame, text: str, norm: Normalize
) -> None:
    """A matrix of clients, its colour bar, its mean, and the numbers where there is room for them."""
    cells = of_pairs(_pair_rows(rows).astype({"client": int, "client_b": int}))
    image = draw_cells(ax, cells, norm, most=10 if cells.index.max() < 10 else 5)
    _colour_bar(fig.colorbar(image, ax=ax, fraction=0.046, pad=0.03), norm)
    _numbers(ax, cells.to_numpy(), norm)
    mean = number(rows, scope="global", self_pairs=[False, None])
    symbol = {"H_N": "$H_N$", "H_D": "$H_D$", "overlap": "overlap"}[metric]
    title = f"{symbol}, mean {style.plain(style.number(mean, 3))}"
    ax.set_title("\n".join([title, *map(style.plain, text.split("\n"))]), fontsize=7)
    ax.set_xlabel("client")
    ax.spines[:].set_visible(True)


def _numbers(ax: Axes, cells: np.ndarray, norm: Normalize) -> None:
    """The numbers of few clients, with as many digits as tell them apart, where all of them fit into their cells."""
    values = cells[np.isfinite(cells)]
    if len(cells) > 5 or not len(values):
        return
    reach, largest = float(np.ptp(values)), float(np.abs(values).max())
    digits = 2 if not 0 < reach < 0.1 * largest else min(2 + int(np.log10(largest / reach)), 5)
    texts = {
        place: style.number(float(cells[place]), digits)
        for place in np.ndindex(cells.shape)
        if np.isfinite(cells[place])
    }
    if max(style.text_width(text, 5.5) for text in texts.values()) > 1.0 / len(cells):
        return
    for (row, column), text in texts.items():
        dark = float(norm(cells[row, column])) < 0.6
        ink = "white" if dark else "black"
        ax.text(column, row, text, ha="center", va="center", fontsize=5.5, color=ink)


def _norm(metric: str, values: np.ndarray) -> Normalize:
    """The colours of the finite values: H_N from 0, or logarithmic where it spans decades; others from low to high."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if metric != "H_N":
        return Normalize(min(low, high - 1e-3), max(high, low + 1e-3))
    if low > 0 and high > 100 * low:
        return LogNorm(
            max(low, high * 1e-4), high
        )  # four decades: one odd pair shall not bleach the others
    return Normalize(0, high if high > 0 else 1)


def _colour_bar(bar, norm: Normalize) -> None:
    bar.ax.tick_params(labelsize=6)
    bar.ax.yaxis.set_minor_locator(NullLocator())
    if isinstance(norm, LogNorm):
        low, high = norm.vmin or 1, norm.vmax or 1
        decades = np.floor(np.log10(low)), np.ceil(np.log10(high))
        step = max(1, int((decades[1] - decades[0]) // 4))
        ticks = [t for t in 10.0 ** np.arange(decades[0], decades[1] + 1, step) if low <= t <= high]
        if len(ticks) > 1:
            bar.set_ticks(ticks, labels=[f"$10^{{{np.log10(t):.0f}}}$" for t in ticks])
            return
        bar.set_ticks([low, high])
    else:
        bar.ax.yaxis.set_major_locator(MaxNLocator(4))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _tick(v)))


def _tick(value: float) -> str:
    """A number beside a colour bar, without powers of ten where it is short without them."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 100_000 else style.number(value, 3)


def _bar(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The rows of one panel of bars: every client (on the first slice it has) and the aggregated model."""
    values = (
        only(rows, metric="eigenvalue", index=1)
        if kind == "lambda_max"
        else only(rows, metric="trace")
    )
    return only(values, layer=None).drop_duplicates(["moment", "client"])


def _converged(rows: pd.DataFrame) -> np.ndarray:
    if "converged" not in rows.columns:
        return np.ones(len(rows), dtype=bool)
    return np.array([bool(pd.isna(v) or v) for v in rows["converged"]], dtype=bool)


def _bars(
    ax: Axes, kind: str, parts: dict[str, pd.DataFrame], looks: dict[str, style.Look]
) -> None:
    """A bar a client and run; of one run the aggregated model has a colour of its own."""
    labels = [
        "global" if pd.isna(c) else str(int(c)) for part in parts.values() for c in part["client"]
    ]
    places = sorted(set(labels), key=lambda v: (v == "global", int(v) if v.isdigit() else 0))
    column = "residual" if kind == "lambda_max" else "stderr"
    for turn, (run, rows) in enumerate(parts.items()):
        if rows.empty:
            continue
        run_labels = ["global" if pd.isna(c) else str(int(c)) for c in rows["client"]]
        values, done = floats(rows["value"]), _converged(rows)
        error = (
            np.nan_to_num(floats(rows[column])) if column in rows.columns else np.zeros(len(rows))
        )
        wide = 0.76 / len(parts)
        at = np.array([places.index(v) for v in run_labels]) + wide * (turn - (len(parts) - 1) / 2)
        for x, value, fine, label in zip(at, values, done, run_labels, strict=True):
            is_global = label == "global" and len(parts) == 1
            color = style.look(1).color if is_global else looks[run].color
            ax.bar(x, value, wide, color=color if fine else "white", edgecolor=color, linewidth=0.8)
        if error.max() > 5e-3 * np.abs(values).max():  # smaller ones would be specks
            ax.errorbar(
                at, values, yerr=error, fmt="none", ecolor="#444444", elinewidth=0.7, capsize=1.2
            )
    stride = -(-len(places) // 8)
    crowded = stride > 1 and "global" in places
    ticks = [
        i
        for i, v in enumerate(places)
        if v == "global"
        or (i % stride == 0 and not (crowded and "global" in places[i : i + stride]))
    ]
    ax.set_xticks(ticks, [places[i] for i in ticks], rotation=90 if "global" in places else 0)
    ax.axhline(0, color="black", linewidth=0.5)
    ax.set_title(_heading(kind, parts), fontsize=7.5)
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: style.number(v, 3)))
    ax.set_xlabel("client")
    ax.grid(True, axis="y")


def _heading(kind: str, parts: dict[str, pd.DataFrame]) -> str:
    slices = [
        str(s)
        for p in parts.values()
        if "slice" in p.columns
        for s in p.loc[p["client"].notna(), "slice"]
    ]
    has_own_data = any(s.startswith("client") for s in slices)
    symbol = {"lambda_max": r"$\lambda_1$", "trace": "trace $H_T$"}[kind]
    return f"{symbol}\nclients on {_DATA['client' if has_own_data else 'global']}"
