"""What averaging does to adapters, over the rounds."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from fldiag.plotting import curves, style
from fldiag.plotting.tables import floats, need, select
from fldiag.results.select import only

PICTURE = "picture of adapters"
#: Layers drawn; of more, those with the largest error in the last round, and the mean over all.
MOST = 6
#: Metric, and the column that is drawn.
PANELS = (("aggregation_error", "value"), ("misalignment", "scaled"), ("effective_rank", "value"))


def draw(table: pd.DataFrame) -> Figure:
    """Aggregation error, misalignment (mean over the pairs of clients, as a share of the largest possible) and effective rank of
    the mean update, over the rounds: a line a layer. ``table``: what the diagnostic ``lora`` returns.

    Raises FldiagError for a table without these.
    """
    need(table, ("metric", "round", "layer", "scaled", "value"), PICTURE)
    pieces = []
    for metric, column in PANELS:
        rows = select(table, metric, PICTURE)
        rows = rows.assign(value=floats(rows[column])).dropna(subset=["value"])
        mean = rows.groupby(["layer", "round"], as_index=False, sort=False)["value"].mean()
        pieces.append(mean.assign(metric=metric))
    means = pd.concat(pieces, ignore_index=True)
    layers = list(dict.fromkeys(means["layer"]))
    if len(layers) > MOST:
        last = only(means, metric="aggregation_error", round=means["round"].max())
        top_layers = last.nlargest(MOST, "value")["layer"]
        layer_mean = (
            means.groupby(["metric", "round"], as_index=False)["value"]
            .mean()
            .assign(layer=f"mean of {len(layers)} layers")
        )
        means = pd.concat([means[means["layer"].isin(top_layers)], layer_mean], ignore_index=True)
    looks = style.looks(means["layer"])
    with style.paper():
        fig, axes = style.panels(len(PANELS), 2.15, 0.1)
        for ax, (metric, _) in zip(axes, PANELS, strict=True):
            for layer, look in looks.items():
                rows = only(means, metric=metric, layer=layer).set_index("round")
                curves.line(ax, rows, look, None)
            curves.rounds_axis(ax)
            ax.set_ylabel(metric.replace("_", " "))
            ax.grid(True)
        curves.legend_of_runs(fig, looks)
    return fig
