"""What single layers add: their blocks' largest eigenvalues, traces and diagonals side by side."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.tables import floats, names, need
from fldiag.results.select import only


def is_main_block(rows: pd.DataFrame) -> np.ndarray:
    """A mask of the eigenvalues of the block that the whole table is about: that of each run's first row."""
    if "layer" not in rows.columns:
        return np.ones(len(rows), dtype=bool)
    layer, runs = ["" if pd.isna(v) else str(v) for v in rows["layer"]], names(rows["run"])
    first = dict(zip(reversed(runs), reversed(layer), strict=True))
    return np.array([of == first[run] for of, run in zip(layer, runs, strict=True)], dtype=bool)


#: What may be known of every layer, and the label of its panel.
_LAYERS = {
    "eigenvalue": "largest eigenvalue of the layer's block",
    "trace": "trace of the layer's block",
    "diagonal_norm": "norm of the layer's diagonal",
}


def _by_layer(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    rows = only(table, metric=metric)
    return rows[~is_main_block(rows)] if metric == "eigenvalue" else rows[rows["layer"].notna()]


def has(table: pd.DataFrame) -> bool:
    """Whether the table says something of single layers."""
    return any(len(_by_layer(table, metric)) for metric in _LAYERS)


def draw_if_any(table: pd.DataFrame) -> Figure | None:
    """``draw``, where single layers were asked about."""
    return draw(table) if has(table) else None


def draw(table: pd.DataFrame) -> Figure:
    """Largest eigenvalue, trace and norm of the diagonal of every layer's own block, as far as the table has them; bars
    of ± residual or standard error. ``table``: what ``spectrum`` (with ``per_layer``), ``trace`` and ``diagonal`` return.

    Raises FldiagError for a table without layers.
    """
    need(table, ("metric", "run", "layer", "value"), "layers")
    parts = {metric: _by_layer(table, metric) for metric in _LAYERS}
    parts = {metric: rows for metric, rows in parts.items() if len(rows)}
    if not parts:
        raise FldiagError(
            "the table says nothing of single layers", "ask for the trace, or per layer", usage=True
        )
    table_rows = pd.concat(parts.values())
    labels, runs = (
        list(dict.fromkeys(map(str, table_rows["layer"]))),
        list(dict.fromkeys(names(table_rows["run"]))),
    )
    looks, width = style.looks(runs), style.wide()
    with style.paper():
        fig, axes = style.panels(
            len(parts),
            0.75 + max(0.14 * len(labels) * max(1, len(runs) / 2), 0.9),
            0.15 * len(runs),
            sharey=True,
        )
        across = width / max(1, min(len(parts), int(width / 2)))
        for ax, (metric, rows) in zip(axes, parts.items(), strict=True):
            for place, run in enumerate(runs):
                mine = rows[[n == run for n in names(rows["run"])]]
                if mine.empty:
                    continue
                at = np.array([labels.index(str(v)) for v in mine["layer"]]) + 0.8 * (
                    (place + 0.5) / len(runs) - 0.5
                )
                column = "residual" if metric == "eigenvalue" else "stderr"
                values, error = (
                    floats(mine["value"]),
                    np.nan_to_num(floats(mine[column])) if column in mine.columns else 0,
                )
                ax.barh(at, values, 0.8 / len(runs), color=looks[run].color)
                if np.any(error > 5e-3 * np.abs(values).max()):  # smaller ones would be specks
                    ax.errorbar(
                        values,
                        at,
                        xerr=error,
                        fmt="none",
                        elinewidth=0.7,
                        capsize=1.2,
                        ecolor="#888888",
                    )
            ax.set_title("\n".join(style.wrap(_LAYERS[metric], across - 0.8, 2, 8.0)), fontsize=8)
            ax.axvline(0, color="black", linewidth=0.5)
            ax.xaxis.set_major_locator(MaxNLocator(4))
            ax.grid(True, axis="x")
            ax.set_yticks(range(len(labels)), [style.plain(style.shorten(v, 24)) for v in labels])
            ax.set_ylim(len(labels) - 0.4, -0.6)
        keys = [Patch(color=looks[r].color) for r in runs]
        style.legend(
            fig,
            keys,
            [style.wrap(r, width - 0.6)[0] for r in runs],
            loc="outside lower center",
            ncols=1 if max(map(len, runs)) > 40 else min(len(runs), 3),
            borderpad=0.2,
            labelspacing=0.3,
        )
    return fig
