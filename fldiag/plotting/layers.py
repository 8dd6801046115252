"""What single layers add: their blocks' largest eigenvalues, traces and diagonals side by side."""

from __future__ import annotations

import textwrap

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

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


def draw(table: pd.DataFrame) -> Figure | None:
    """Largest eigenvalue, trace and norm of the diagonal of every layer's own block, as far as the table has them.

    Args:
        table: What ``spectrum`` returns, with ``per_layer`` or ``trace``.

    Returns:
        The figure, with bars of ± residual or standard error. None where the table says nothing of single layers.
    """
    need(table, ("metric", "run", "layer", "value"), "layers")
    table = table.assign(run=names(table["run"]), value=floats(table["value"]))
    parts = {metric: _by_layer(table, metric) for metric in _LAYERS}
    parts = {metric: rows for metric, rows in parts.items() if len(rows)}
    if not parts:
        return None
    rows = pd.concat(parts.values())
    layers, looks = list(dict.fromkeys(rows["layer"])), style.looks(rows["run"])
    height = 0.75 + max(0.14 * len(layers) * max(1, len(looks) / 2), 0.9)
    with style.paper():
        fig, axes = style.panels(len(parts), height, sharey=True)
        for ax, (metric, rows) in zip(axes, parts.items(), strict=True):
            error = "residual" if metric == "eigenvalue" else "stderr"
            errors = rows[error] if error in rows else pd.Series(0.0, rows.index)
            wide, bars = (
                rows.assign(value=floats(column))
                .pivot(index="layer", columns="run", values="value")
                .reindex(index=layers, columns=list(looks))
                for column in (rows["value"], errors)
            )
            colors = [look.color for look in looks.values()]
            marks = {"elinewidth": 0.7, "capsize": 1.2, "ecolor": "#888888"}
            bars = bars.where(bars > 5e-3 * wide.abs().max(axis=None), 0.0)  # others are specks
            wide.plot.barh(ax=ax, xerr=bars, color=colors, width=0.8, legend=False, error_kw=marks)
            ax.set_title("\n".join(textwrap.wrap(_LAYERS[metric], 24)), fontsize=8)
            ax.set_ylabel("")
            ax.axvline(0, color="black", linewidth=0.5)
            ax.xaxis.set_major_locator(MaxNLocator(4))
            ax.grid(True, axis="x")
            style.names_down(ax, layers)
        style.legend(fig, [Patch(color=look.color) for look in looks.values()], list(looks))
    return fig
