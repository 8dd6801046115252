"""Accuracy over clients, accuracy against size, and the reliability diagram."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fldiag.plotting import style
from fldiag.plotting.tables import MANY, floats, need
from fldiag.results.select import last_round, number, only

PICTURE = "picture of fairness"
WORST, REST = "#D55E00", "#0072B2"


def draw(table: pd.DataFrame) -> Figure | None:
    """Of the last round: clients from worst to best with Wilson's intervals (above MANY clients: their distribution function),
    accuracy against training examples, and accuracy against confidence.

    ``table``: what the diagnostic ``fairness`` returns. None where no model gave numbers. Raises FldiagError for an unfit table.
    """
    need(table, ("metric", "round", "scope", "client", "value", "n_examples"), PICTURE)
    r = last_round(table, "mean_accuracy")
    if r is None:
        return None
    rows = only(table, round=r)
    clients = (
        only(rows, scope="client", metric="accuracy")
        .dropna(subset=["value"])
        .sort_values(["value", "client"])
    )
    totals = only(rows, scope="global")
    with style.paper():
        fig, (order, size, reliable) = style.panels(3, 2.5)
        _order(order, clients, totals)
        _size(size, clients)
        _reliability(reliable, totals)
        fig.suptitle(f"round {r}", fontsize=8.5)
    return fig


def _order(ax: Axes, clients: pd.DataFrame, totals: pd.DataFrame) -> None:
    values, worst = floats(clients["value"]), -(-len(clients) // 10)
    if len(values) > MANY:
        ax.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color=REST)
        ax.fill_betweenx([0, worst / len(values)], 0, 1, color=WORST, alpha=0.15, linewidth=0)
        ax.set(xlabel="accuracy", ylabel="clients with at most this")
        style.percents(ax.xaxis, ax.yaxis)
    else:
        for part, color in ((slice(0, worst), WORST), (slice(worst, None), REST)):
            x = np.arange(len(values))[part]
            ends = [np.abs(values[part] - floats(clients[c])[part]) for c in ("low", "high")]
            ax.errorbar(x, values[part], ends, fmt="o", color=color, elinewidth=0.7, capsize=0)
        mean = number(totals, "mean_accuracy")
        ax.set(
            xlabel="clients, worst first" + ("" if mean is None else "\n(dotted: their mean)"),
            ylabel="accuracy of the global model",
            ylim=(-0.03, 1.03),
        )
        ax.set_xticks([])
        style.percents(ax.yaxis)
        if mean is not None:  # named below: on the line, the name would lie on clients
            ax.axhline(
                mean,
                color="#666666",
                linewidth=0.7,
                linestyle=(0, (1, 2)),
                zorder=1,
                label="_reference",
            )
    low = number(totals, "worst_decile")
    spread = number(totals, "accuracy_gini")
    ax.set_title(f"worst tenth {_percent(low)}, Gini {style.number(spread, 2)}")


def _size(ax: Axes, clients: pd.DataFrame) -> None:
    sizes, values = floats(clients["size"]), floats(clients["value"])
    worst = -(-len(clients) // 10)
    for part, color in ((slice(worst, None), REST), (slice(0, worst), WORST)):
        ax.plot(
            sizes[part], values[part], "o", color=color, alpha=0.8 if len(values) <= MANY else 0.3
        )
    ax.set(
        xlabel="training examples of the client",
        ylabel="accuracy of the global model",
        ylim=(-0.03, 1.03),
    )
    ax.margins(x=0.08)
    style.percents(ax.yaxis)
    ax.set_title("by size")


def _reliability(ax: Axes, totals: pd.DataFrame) -> None:
    right = only(totals, metric="bin_accuracy").set_index("index").sort_index()
    sure = only(totals, metric="bin_confidence").set_index("index").reindex(right.index)
    x, y, n = floats(sure["value"]), floats(right["value"]), floats(right["n_examples"])
    ax.plot(
        [0, 1], [0, 1], color="#555555", linewidth=0.7, linestyle=(0, (1, 2)), label="_reference"
    )
    ax.errorbar(
        x,
        y,
        [np.abs(y - floats(right[c])) for c in ("low", "high")],
        fmt="none",
        color=REST,
        elinewidth=0.7,
        capsize=0,
    )
    ax.scatter(x, y, s=6 + 60 * n / n.sum(), color=REST, linewidth=0)
    ax.set(
        xlabel="confidence\n(dotted: calibrated)",
        ylabel="accuracy (area: examples)",
        xlim=(-0.03, 1.03),
        ylim=(-0.03, 1.03),
    )
    style.percents(ax.xaxis, ax.yaxis)
    error = number(totals, "ece", estimator="bayesian bootstrap")
    ax.set_title(
        f"ECE {style.number(error, 2)} (chance {style.number(number(totals, 'ece_floor'), 2)})"
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.3g} %"
