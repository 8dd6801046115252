"""Predicted against true effects of leaving each client out."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from fldiag.plotting import labels, style
from fldiag.plotting.tables import compares_runs, floats, need, select
from fldiag.results.select import number, only

PICTURE = "picture of clients left out"


@compares_runs
def draw(table: pd.DataFrame) -> Figure | None:
    """A panel for the aggregate and for every number of last rounds: a point a client (and run), with the client's number where
    there is one run, and Spearman's correlation. Masked clients have none; None where all are. ``table``: what
    ``leave-one-out`` returns. Raises FldiagError for another table."""
    need(table, ("metric", "run", "client", "index", "value", "estimator"), PICTURE)
    keys = ["run", "client", "index"]
    true = select(table, "effect", PICTURE).dropna(subset="value")
    predicted = only(table, metric="predicted_effect", estimator="quadratic").dropna(subset="value")
    pairs = predicted[[*keys, "value"]].merge(
        true[[*keys, "value"]], on=keys, suffixes=("", "_true")
    )
    panels = sorted({int(i) for i in true["index"]})
    runs = list(dict.fromkeys(true["run"]))
    if not runs:
        return None
    looks = style.looks(runs)
    with style.paper():
        fig, axes = style.panels(len(panels), 2.3, 0.3, across=4, least=1.6)
        for ax, index in zip(axes, panels, strict=True):
            _panel(ax, only(pairs, index=index), looks, len(runs) == 1)
            rho = number(only(table, metric="rank_correlation", index=index, estimator="quadratic"))
            title = (
                "last aggregate"
                if index == 0
                else f"last {index} rounds"
                if index > 1
                else "last round"
            )
            ax.set_title(
                title + (f"\nSpearman {style.number(rho, 2)}" if rho is not None else "\n")
            )
        words = "clients left out of the training or the aggregate; dashed: as predicted"
        fig.suptitle("\n".join(style.wrap(words, style.wide() - 0.2, 2, 8.5)), fontsize=8.5)
        fig.supxlabel("predicted change of the loss", fontsize=8)
        fig.supylabel("true change of the loss", fontsize=8)
        labels.settle(fig)
    return fig


def _panel(ax, pairs: pd.DataFrame, looks: dict[str, style.Look], numbers: bool) -> None:
    if pairs.empty:
        ax.text(0.5, 0.5, "no prediction", ha="center", va="center", transform=ax.transAxes)
        ax.set_axis_off()
        return
    for run, part in pairs.groupby("run", sort=False):
        x, y = floats(part["value"]), floats(part["value_true"])
        ax.plot(
            x,
            y,
            linestyle="none",
            marker=looks[run].marker,
            markersize=4,
            color=looks[run].color,
            alpha=0.7,
        )
        if numbers:
            labels.beside(ax, [str(int(k)) for k in part["client"]], x, y)
    for line in (ax.axhline, ax.axvline):
        line(0, color="black", linewidth=0.5, label="_reference")
    limits = {"xlim": ax.get_xlim(), "ylim": ax.get_ylim()}
    ax.axline(
        (0, 0),
        slope=1,
        color="#999999",
        linewidth=0.6,
        linestyle=(0, (4, 2)),
        zorder=0,
        label="_reference",
    )
    ax.locator_params(nbins=4)
    ax.set(**limits)
    ax.grid(True)
