"""Cross-client Hessian matching: heatmaps of pairs of clients, bars of their curvature."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.tables import floats, need, select
from fldiag.results.select import number, only

PICTURE = "picture of matching"
_MODES = {"diag": "diagonals", "tensor_trace": "tensor traces"}
_DATA = {"client": "own data", "global": "all clients' data"}


def draw(table: pd.DataFrame, *, round: int | None = None) -> Figure:
    """H_N and H_D of every pair in the paper's form and in the released code's, the overlap of the clients' eigenspaces;
    bars of lambda_max, trace, and of the clients' shares of the global model's largest eigenvalue.

    ``table``: what the diagnostic ``matching`` returns; ``round``: which of its rounds (default: the last). Blank cells:
    the pairs of a client with itself, and what is not defined. Hollow bars: not converged.
    Raises FldiagError for an unfit table.
    """
    need(
        table,
        ("metric", "round", "moment", "scope", "client", "client_b", "value", "diag_mode", "data"),
        PICTURE,
    )
    rounds = select(table, "H_N", PICTURE)["round"]
    round = int(rounds.max()) if round is None else round
    rows = only(table, round=round)
    if rows.empty:
        raise FldiagError(
            f"the table for the {PICTURE} has no round {round}",
            f"its rounds: {sorted(set(rounds))}",
            usage=True,
        )
    there = only(rows, metric="H_N", scope="global")
    data = [d for d in _DATA if (there["data"] == d).any()]
    # the paper compares diagonals on own data, the released code tensor traces on everybody's
    forms = [("diag", data[0]), ("tensor_trace", data[-1])]
    panels = [
        (metric, only(rows, metric=metric, diag_mode=mode, data=d), f"{_MODES[mode]}, {_DATA[d]}")
        for mode, d in forms
        for metric in ("H_N", "H_D")
    ]
    space = only(rows, metric="eigenspace_overlap")
    if len(space):
        panels.insert(
            2,
            (
                "overlap",
                space,
                f"top-{int(only(rows, metric='principal_angle')['index'].max() or 0)} eigenspaces"
                if (rows["metric"] == "principal_angle").any()
                else "eigenspaces",
            ),
        )
    panels = [p for p in panels if (p[1]["scope"] == "pair").any()]
    bars = [kind for kind in ("lambda_max", "trace", "share") if len(_bar(rows, kind))]
    clients = sorted(
        {int(c) for c in only(rows, moment="trained", scope="client")["client"].dropna()}
    )
    with style.paper():
        fig, axes = style.panels(len(panels) + len(bars), 2.15, 0.25)
        for ax, (metric, part, text) in zip(axes, panels, strict=False):
            _pairs(fig, ax, metric, part, text, clients)
        for ax, kind in zip(axes[len(panels) :], bars, strict=False):
            _bars(ax, kind, _bar(rows, kind))
        hollow = any((~_converged(_bar(rows, kind))).any() for kind in bars)
        fig.suptitle(f"round {round}" + ("; hollow: not converged" if hollow else ""), fontsize=8.5)
    return fig


def draw_last(table: pd.DataFrame) -> Figure:
    """``draw`` of the last round."""
    return draw(table, round=int(table["round"].dropna().max()))


def _pairs(fig, ax, metric: str, rows: pd.DataFrame, text: str, clients: list[int]) -> None:
    """A matrix of clients, its colour bar, its mean, and the numbers where there is room for them."""
    cells = _cells(rows, clients)
    norm = _norm(metric, cells[np.isfinite(cells)])
    image = ax.imshow(
        cells, cmap=style.COLORMAP, norm=norm, interpolation="nearest", aspect="equal"
    )
    _colour_bar(fig.colorbar(image, ax=ax, fraction=0.046, pad=0.03), norm)
    stride = -(-len(clients) // (10 if max(clients) < 10 else 6))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks(range(0, len(clients), stride), [str(c) for c in clients[::stride]])
    if len(clients) <= 5:
        for (i, j), value in np.ndenumerate(cells):
            if np.isfinite(value):
                dark = float(norm(value)) < 0.6
                ax.text(
                    j,
                    i,
                    style.number(value, 2),
                    ha="center",
                    va="center",
                    fontsize=6,
                    color="white" if dark else "black",
                )
    mean = number(rows, scope="global", self_pairs=[False, None])
    name = {"H_N": "$H_N$", "H_D": "$H_D$", "overlap": "overlap"}[metric]
    ax.set_title(
        f"{name}, mean {style.plain(style.number(mean, 3))}\n{style.plain(text)}", fontsize=7.5
    )
    ax.set_xlabel("client")
    ax.spines[["top", "right"]].set_visible(True)


def _cells(rows: pd.DataFrame, clients: list[int]) -> np.ndarray:
    """Client by client, each pair in both halves; nan for a client with itself."""
    where = {c: i for i, c in enumerate(clients)}
    cells = np.full((len(clients), len(clients)), np.nan)
    pairs = only(rows, scope="pair")
    for a, b, value in zip(pairs["client"], pairs["client_b"], floats(pairs["value"]), strict=True):
        cells[where[int(a)], where[int(b)]] = cells[where[int(b)], where[int(a)]] = value
    return cells


def _norm(metric: str, known: np.ndarray) -> Normalize:
    """The colours of the finite values: H_N from 0, or logarithmic where it spans decades; others from low to high."""
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
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
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: style.number(v, 3)))


def _bar(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The rows of one panel of bars: every client (on the first slice it has) and the aggregated model."""
    if kind == "share":
        return only(rows, metric="curvature_share", index=1)
    found = (
        only(rows, metric="eigenvalue", index=1)
        if kind == "lambda_max"
        else only(rows, metric="trace")
    )
    return only(found, layer=None).drop_duplicates(["moment", "client"])


def _converged(rows: pd.DataFrame) -> np.ndarray:
    if "converged" not in rows.columns:
        return np.ones(len(rows), dtype=bool)
    return np.array([bool(pd.isna(v) or v) for v in rows["converged"]], dtype=bool)


def _bars(ax, kind: str, rows: pd.DataFrame) -> None:
    values, done = floats(rows["value"]), _converged(rows)
    labels = ["global" if pd.isna(c) else str(int(c)) for c in rows["client"]]
    column = "residual" if kind == "lambda_max" else "stderr"
    error = np.nan_to_num(floats(rows[column])) if column in rows.columns else np.zeros(len(rows))
    for i, (value, fine, label) in enumerate(zip(values, done, labels, strict=True)):
        color = style.look(1 if label == "global" else 2).color
        ax.bar(i, value, 0.72, color=color if fine else "white", edgecolor=color, linewidth=0.8)
    if error.max() > 5e-3 * np.abs(values).max():  # smaller ones would be specks
        ax.errorbar(
            range(len(values)),
            values,
            yerr=error,
            fmt="none",
            ecolor="#444444",
            elinewidth=0.7,
            capsize=1.2,
        )
    stride = -(-len(labels) // 8)
    shown = [
        i
        for i, label in enumerate(labels)
        if label == "global"
        or (i % stride == 0 and not (stride > 1 and "global" in labels[i : i + stride]))
    ]
    ax.set_xticks(shown, [labels[i] for i in shown], rotation=90 if "global" in labels else 0)
    ax.axhline(0, color="black", linewidth=0.5)
    names = {"lambda_max": r"$\lambda_1$", "trace": "trace $H_T$"}
    if kind == "share":
        total = values.sum()
        ax.set_title(
            "clients' shares of the global model's\n"
            + rf"$\lambda_1$ = {style.number(float(total), 3)}",
            fontsize=7.5,
        )
        ax.axhline(total / len(values), color="#444444", linewidth=0.7, linestyle=(0, (2, 2)))
    else:
        slices = rows.loc[rows["client"].notna(), "slice"] if "slice" in rows.columns else []
        own = any(str(s).startswith("client") for s in slices)
        ax.set_title(
            f"{names[kind]}\nclients on {_DATA['client' if own else 'global']}", fontsize=7.5
        )
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: style.number(v, 3)))
    ax.set_xlabel("client\n(dashed: equal shares)" if kind == "share" else "client")
    ax.grid(True, axis="y")
