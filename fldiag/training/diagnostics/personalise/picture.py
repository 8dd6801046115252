"""How the accuracy of the clients' own models is spread, before and after fine-tuning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.tables import compares_runs, floats, names, need, select

PICTURE = "picture of personal accuracy"
MEAN, MEDIAN = 0.9, 1.8  # widths of the two lines in a box
DASH: Any = (0, (2, 1))


@compares_runs
def draw(table: pd.DataFrame) -> Figure:
    """A dot a client over the number of fine-tuning epochs, boxes of their quartiles, a thick line at their median, a dashed
    one at their mean.

    ``table``: rows ``metric="personal_accuracy"`` with ``run, scope, client, index`` (epochs) and ``value`` (share in
    [0, 1]); only those of scope client are drawn. Several runs stand side by side. Raises FldiagError for an unfit
    table.
    """
    need(table, ("metric", "run", "scope", "client", "index", "value"), PICTURE)
    rows = select(table, "personal_accuracy", PICTURE)
    rows = rows[(rows["scope"] == "client").fillna(False).astype(bool)]
    flat = pd.DataFrame(
        {
            "run": names(rows["run"]),
            "client": floats(rows["client"]),
            "epochs": floats(rows["index"]),
            "value": floats(rows["value"]),
        }
    ).dropna(subset=["value"])
    if flat.empty:
        raise FldiagError(
            "no client has a personal accuracy",
            "clients need test examples of their classes",
            usage=True,
        )
    wrong = flat[~flat["value"].between(0, 1) | flat["epochs"].isna() | flat["client"].isna()]
    if len(wrong):
        raise FldiagError(
            f"personal accuracy {wrong['value'].iloc[0]:g} of client {wrong['client'].iloc[0]:g} after "
            f"{wrong['epochs'].iloc[0]:g} epochs",
            "give shares in [0, 1] with their client and epochs",
            usage=True,
        )
    twice = flat[flat.duplicated(["run", "client", "epochs"])]
    if len(twice):
        raise FldiagError(
            f"run {twice['run'].iloc[0]!r} has two accuracies of client {twice['client'].iloc[0]:g} after "
            f"{twice['epochs'].iloc[0]:g} epochs",
            "give every run its own label",
            usage=True,
        )
    runs, epochs = list(dict.fromkeys(flat["run"])), sorted(flat["epochs"].unique())
    looks = style.looks(runs)
    width = style.wide(style.ONE_COLUMN if len(runs) * len(epochs) <= 8 else style.TWO_COLUMNS)
    ticks = [f"{e:g}" for e in epochs]
    if len(runs) == 1:
        spread = [flat.loc[flat["epochs"] == e, "value"] * 100 for e in epochs]
        ticks = [
            f"{tick}\n{v.mean():.1f} ± {v.std(ddof=0):.1f} %"
            for tick, v in zip(ticks, spread, strict=True)
        ]
    handles = [
        Line2D(
            [], [], linestyle="none", color=looks[r].color, marker=looks[r].marker, markersize=3.8
        )
        for r in runs
    ]
    handles += [
        Line2D([], [], color="#555555", linewidth=size, linestyle=dash)
        for size, dash in ((MEAN, DASH), (MEDIAN, (0, ())))
    ]
    texts = [*(style.wrap(r, width - 0.5)[0] for r in runs), "mean", "median"]
    if len(runs) == 1:
        handles, texts = handles[1:], texts[1:]
    columns = style.columns(texts, width, 0.45)
    with style.paper():
        fig = style.figure(width, 2.3 + 0.15 * -(-len(texts) // columns), layout="constrained")
        ax = fig.subplots()
        room = 0.8 / len(runs)
        for place, run in enumerate(runs):
            for at, e in enumerate(epochs):
                values = (
                    flat[(flat["run"] == run) & (flat["epochs"] == e)]
                    .sort_values("client")["value"]
                    .to_numpy()
                )
                _strip(
                    ax, at + (place - (len(runs) - 1) / 2) * room, values, 0.75 * room, looks[run]
                )
        ax.set(
            xlabel="epochs of fine-tuning",
            ylabel="personal accuracy",
            xlim=(-0.6, len(epochs) - 0.4),
        )
        ax.set_xticks(range(len(epochs)), ticks)
        low = min(float(flat["value"].min()), 0.95)
        ax.set_ylim(max(-0.02, low - 0.05), 1.02)
        style.percents(ax.yaxis)
        ax.grid(True, axis="y")
        style.legend(
            fig,
            handles,
            texts,
            loc="outside lower center",
            ncols=columns,
            handletextpad=0.4,
            columnspacing=1.2,
            borderpad=0.2,
        )
    return fig


def _strip(ax, x: float, values: np.ndarray, room: float, look: style.Look) -> None:
    if not len(values):
        return
    # Spread evenly by client number: no chance, and the same client keeps its place from box to box.
    across = (
        x + (np.linspace(-0.5, 0.5, len(values)) if len(values) > 1 else np.zeros(1)) * room * 0.8
    )
    ax.plot(
        across,
        values,
        linestyle="none",
        marker=look.marker,
        markersize=2.2,
        color=look.color,
        alpha=0.55,
        markeredgewidth=0,
        zorder=2,
    )
    ax.boxplot(
        [values],
        positions=[x],
        widths=room,
        showfliers=False,
        manage_ticks=False,
        zorder=3,
        **{
            f"{part}props": {"color": look.color, "linewidth": MEDIAN if part == "median" else 0.8}
            for part in ("box", "whisker", "cap", "median")
        },
    )
    mean = float(values.mean())
    ax.plot(
        [x - room / 2, x + room / 2],
        [mean, mean],
        color=look.color,
        linewidth=MEAN,
        linestyle=DASH,
        zorder=4,
    )
