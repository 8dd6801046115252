"""The clients' ways to their own optima."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fldiag.plotting import style
from fldiag.plotting.tables import floats, need, select
from fldiag.results.select import number, only

PICTURE = "picture of the client floor"


def draw(table: pd.DataFrame) -> Figure:
    """Distance from the final model and the gradient's fall over the epochs: a line a client; a mark where it has reached its
    optimum; dashed: the radius of the late oscillation. ``table``: what ``client-floor`` returns. Raises FldiagError for another
    table."""
    need(table, ("metric", "run", "scope", "client", "index", "value", "converged"), PICTURE)
    select(table, "floor_distance", PICTURE)
    runs = list(dict.fromkeys(table["run"]))
    looks = style.looks(runs)
    with style.paper():
        fig, (left, right) = style.panels(2, 2.7, least=2.5)
        for run in runs:
            rows, look = only(table, run=run), looks[run]
            for ax, metric in ((left, "floor_distance"), (right, "floor_gradient")):
                for _, part in only(rows, metric=metric).dropna(subset="value").groupby("client"):
                    ax.plot(floats(part["index"]), floats(part["value"]), color=look.color, linewidth=0.7, alpha=0.5)
            reached = only(rows, metric="client_floor", scope="client", converged=True)
            left.plot(floats(reached["index"]), floats(reached["value"]), linestyle="none", marker=look.marker, markersize=4,
                      color=look.color)
            if (radius := number(rows, "oscillation")) is not None:
                left.axhline(radius, color=look.color, linestyle=(0, (4, 2)), linewidth=1)
        left.set(xscale="log", ylim=(0, None), ylabel="distance from the final model")
        right.set(xscale="log", yscale="log", ylabel="gradient norm / at the start")
        for ax in (left, right):
            ax.set_xlabel("epochs of the client alone")
            ax.grid(True, axis="y")
        handles = [Line2D([], [], color=looks[r].color, marker=looks[r].marker, markersize=4) for r in runs]
        handles.append(Line2D([], [], color="#555555", linestyle=(0, (4, 2))))
        half = style.wide() / 2
        texts = [*(style.wrap(f"{r}: a client, mark: at its optimum", half)[0] for r in runs), "radius of late oscillation"]
        style.legend(fig, handles, texts, loc="outside lower center", ncols=2, borderpad=0.2)
    return fig
