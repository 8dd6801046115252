"""What single layers add: their blocks' largest eigenvalues, traces and diagonals side by side."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
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
    """Largest eigenvalue, trace and norm of the diagonal of every layer's own block, as far as the table has them; bars
    of ± residual or standard error. None where it says nothing of single layers.

    ``table``: what ``spectrum`` (with ``per_layer``), ``trace`` and ``diagonal`` return.
    """
    need(table, ("metric", "run", "layer", "value"), "layers")
    parts = {metric: _by_layer(table, metric) for metric in _LAYERS}
    parts = {metric: rows for metric, rows in parts.items() if len(rows)}
    if not parts:
        return None
    all_rows = pd.concat(parts.values())
    layers, runs = (list(dict.fromkeys(names(all_rows[c]))) for c in ("layer", "run"))
    looks = style.looks(runs)
    height = 0.75 + max(0.14 * len(layers) * max(1, len(runs) / 2), 0.9)
    with style.paper():
        fig, axes = style.panels(len(parts), height, sharey=True)
        room = style.wide() / min(len(parts), max(int(style.wide() / 2), 1)) - 0.8
        for ax, (metric, rows) in zip(axes, parts.items(), strict=True):
            _bars(ax, rows, "residual" if metric == "eigenvalue" else "stderr", layers, looks)
            ax.set_title("\n".join(style.wrap(_LAYERS[metric], room, 2, 8.0)), fontsize=8)
        keys = [Patch(color=look.color) for look in looks.values()]
        style.legend(fig, keys, runs, ncols=3)
    return fig


def _bars(
    ax: Axes, rows: pd.DataFrame, error: str, layers: list[str], looks: dict[str, style.Look]
) -> None:
    """A bar a layer and run, with its error where that is no speck."""
    width = 0.8 / len(looks)
    largest = np.abs(floats(rows["value"])).max()
    for place, (run, look) in enumerate(looks.items()):
        part = rows[[name == run for name in names(rows["run"])]]
        y = np.array([layers.index(name) for name in names(part["layer"])])
        y = y + width * (place - (len(looks) - 1) / 2)
        bars = np.nan_to_num(floats(part[error])) if error in part.columns else np.zeros(len(part))
        is_speck = not np.any(bars > 5e-3 * largest)
        marks = {"elinewidth": 0.7, "capsize": 1.2, "ecolor": "#888888"}
        ax.barh(
            y,
            floats(part["value"]),
            width,
            color=look.color,
            xerr=None if is_speck else bars,
            error_kw=marks,
        )
    ax.axvline(0, color="black", linewidth=0.5)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.grid(True, axis="x")
    style.names_down(ax, layers)
