"""The whole against its parts: flatness of the global model and of the clients' over the rounds."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fldiag.plotting import style
from fldiag.plotting.curves import dots, mean_line, rounds_axis, wide_range
from fldiag.plotting.tables import floats, need, select
from fldiag.results.select import only

PICTURE = "picture of flatness"
#: What stands for the global model, its parts at their own weights, and the parts at the global model's.
_LOOKS = {"whole": style.look(0), "trained": style.look(1), "aggregated": style.look(2)}
_TEXTS = {
    "whole": "whole: F at w",
    "trained": "parts: mean of Fₖ at wₖ",
    "aggregated": "parts at one point: mean of Fₖ at w",
}
_TITLES = {
    "sharpness": "sharpness (one ascent step)",
    "adaptive_sharpness": "adaptive sharpness",
    "eigenvalue": "largest eigenvalue λ₁",
    "trace": "trace",
}


def draw(table: pd.DataFrame) -> Figure:
    """Sharpness, plain and adaptive, lambda_1 and trace of the whole, of its parts at their trained weights (band: standard
    error over the clients; a dot a client) and of its parts at the whole's weights. ``table``: what the diagnostic ``flatness``
    returns. Raises FldiagError for another table."""
    need(
        table,
        ("metric", "round", "moment", "scope", "client", "index", "layer", "value", "stderr"),
        PICTURE,
    )
    select(table, "trace_gap", PICTURE)
    rows = only(table, layer=None)
    with style.paper():
        fig, axes = style.panels(len(_TITLES), 2.1, across=4, least=1.6)
        for ax, (metric, title) in zip(axes, _TITLES.items(), strict=True):
            _parts(ax, rows, metric)
            ax.set_title(title)
        handles = [Line2D([], [], **look.line) for look in _LOOKS.values()]
        handles.append(Line2D([], [], color="#777777", linestyle="none", marker=".", markersize=5))
        texts = [*_TEXTS.values(), "a client"]
        style.legend(fig, handles, texts, ncols=4, handlelength=2.4)
    return fig


def _parts(ax: Axes, rows: pd.DataFrame, metric: str) -> None:
    clients = only(rows, metric=metric, scope="client", moment="trained")
    dots(ax, clients, _LOOKS["trained"].color)
    of_global = only(rows, metric=metric, scope="global", moment="aggregated")
    mean_line(ax, of_global, _LOOKS["whole"], is_banded=False)
    for moment in ("trained", "aggregated"):
        parts = only(rows, metric=f"{metric}_parts", moment=moment)
        mean_line(ax, parts, _LOOKS[moment], is_banded=moment == "trained")
    values = floats(only(rows, metric=(metric, f"{metric}_parts"))["value"])
    wide_range(ax, values[np.isfinite(values)])
    _frame(ax)


def _frame(ax: Axes) -> None:
    rounds_axis(ax)
    ax.grid(True, axis="y")
