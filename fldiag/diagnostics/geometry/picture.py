"""Neural collapse, effective rank and similarity of the clients' layers over the rounds."""

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

PICTURE = "picture of geometry"
TITLES = {
    "nc1": "NC1: within classes",
    "nc2_norms": "NC2: lengths",
    "nc2_cosines": "NC2: angles",
    "nc3": "NC3: head and means",
    "nc4": "NC4: not nearest mean",
    "effective_rank": "effective rank",
}
LOOKS = {
    "received": style.look(0),
    "aggregated": style.look(1),
    "trained": style.look(2),
    "own": style.look(3),
}
TEXTS = {
    "received": "received model",
    "aggregated": "aggregated model",
    "trained": "clients' models, all examples",
    "own": "clients' models, own examples",
}


def draw(table: pd.DataFrame) -> Figure:
    """A panel a number that has values, over the rounds (clients: mean with standard error, and a dot each), and the mean CKA of
    two clients by layer. ``table``: what the diagnostic ``geometry`` returns. Raises FldiagError for another table."""
    need(table, ("metric", "round", "moment", "scope", "slice", "value", "stderr"), PICTURE)
    select(table, "effective_rank", PICTURE)
    titles = {m: t for m, t in TITLES.items() if only(table, metric=m)["value"].notna().any()}
    with style.paper():
        fig, (*panels, similarity) = style.panels(len(titles) + 1, 2.0, across=4, least=1.6)
        for ax, (metric, title) in zip(panels, titles.items(), strict=True):
            rows = only(table, metric=metric)
            is_own = rows["slice"].str.startswith("client:").fillna(False).astype(bool)
            dots(ax, rows[~is_own & (rows["scope"] == "client")], LOOKS["trained"].color)
            for name, look in LOOKS.items():
                moment = "trained" if name == "own" else name
                of_name = rows[is_own] if name == "own" else rows[~is_own]
                mean_line(ax, only(of_name, scope="global", moment=moment), look)
            values = floats(rows["value"])
            values = values[np.isfinite(values) & (values > 0)]
            if metric == "nc1":
                wide_range(ax, values)
            ax.set_title(title)
            rounds_axis(ax)
            ax.grid(True, axis="y")
        draw_similarity(similarity, only(table, metric="cka", scope="global"))
        if titles:
            handles = [Line2D([], [], **look.line) for look in LOOKS.values()]
            style.legend(fig, handles, list(TEXTS.values()), ncols=4, handlelength=2.4)
    return fig


def draw_similarity(ax: Axes, rows: pd.DataFrame) -> None:
    """The mean CKA of two clients in the first and the last round, layer by layer."""
    ax.set_title("CKA of two clients")
    rows = rows.dropna(subset=["value", "layer"])
    if rows.empty:
        style.empty(ax, "needs two clients")
        return
    layers = list(dict.fromkeys(rows["layer"]))
    rounds = sorted({int(r) for r in rows["round"].dropna()})
    for place, r in enumerate(sorted({rounds[0], rounds[-1]})):
        part = only(rows, round=r).set_index("layer").reindex(layers)
        look = style.look(4 + place)
        ax.errorbar(
            range(len(layers)),
            floats(part["value"]),
            np.nan_to_num(floats(part["stderr"])),
            label=f"round {r}",
            **look.line,
        )
    ax.set_xticks(
        range(len(layers)),
        [style.plain(style.shorten(v, 14)) for v in layers],
        rotation=45,
        ha="right",
    )
    ax.legend(loc="best")
    ax.grid(True, axis="y")
