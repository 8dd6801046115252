"""What local training forgets: accuracy before and after it over the rounds, and a heatmap of client and class.

The first picture is that of Lee et al., "FedSOL" (CVPR 2024), figure 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.curves import legend_below, legend_of_runs, line, rounds_axis
from fldiag.plotting.heatmap import draw_cells
from fldiag.plotting.tables import (
    MANY,
    compares_runs,
    floats,
    names,
    need,
    percentiles,
    select,
)
from fldiag.results.select import SPLITS, only, split_of

PICTURE = "picture of forgetting"
COLUMNS = ("metric", "round", "moment", "scope", "slice", "value")
_MOMENTS = {
    "received": "received by the clients",
    "trained": "after local training (mean ± std)",
    "aggregated": "after averaging",
}
_SHARES = {
    "forgotten": "forgotten by local training",
    "learned": "learned by local training",
    "restored": "restored by averaging, of the forgotten",
}


def _global(table: pd.DataFrame, metric: str, moment: str) -> pd.DataFrame:
    """Rows of one metric on the split by which models are judged, all clients together, by round."""
    rows = only(
        table, metric=metric, moment=moment, scope="global", slice=split_of(table), index=None
    )
    return rows.dropna(subset=["round"]).set_index("round").sort_index()


@compares_runs
def curves(table: pd.DataFrame) -> Figure:
    """Test accuracy of the received, trained and aggregated models over the rounds, and what is forgotten and restored; of
    several runs a panel each, a line a run.

    ``table``: what the diagnostic ``forgetting`` returns. Bands: Wilson's interval of one model, one standard deviation
    over the clients of the trained ones. Raises FldiagError for a table without accuracies (regression).
    """
    need(table, COLUMNS, PICTURE)
    select(table, "accuracy", PICTURE)
    runs = list(dict.fromkeys(names(table["run"]))) if "run" in table.columns else []
    return _of_runs(table, runs) if len(runs) > 1 else _of_one_run(table)


def _of_one_run(table: pd.DataFrame) -> Figure:
    with style.paper():
        fig, (left, right) = style.panels(2, 2.75, least=2.5)
        looks: dict[str, style.Look] = {}
        for place, (moment, text) in enumerate(_MOMENTS.items()):
            rows, look = _global(table, "accuracy", moment), style.look(place)
            if rows["value"].notna().any():
                line(left, rows, look, _band(table, rows, moment))
                looks[text] = look
        _finish(left, f"{SPLITS[split_of(table)]} accuracy")
        legend_below(left, looks)
        _references(left, table)
        looks = {}
        for place, (metric, text) in enumerate(_SHARES.items()):
            rows, look = _global(table, metric, "trained"), style.look(place + 3)
            if rows["value"].notna().any():
                line(right, rows, look, None)
                looks[text] = look
        _finish(right, "share of the examples")
        legend_below(right, looks)
    return fig


def _of_runs(table: pd.DataFrame, runs: Sequence[str]) -> Figure:
    looks = style.looks(runs)
    parts = {run: table[[name == run for name in names(table["run"])]] for run in runs}
    panels = [("accuracy", moment, text) for moment, text in _MOMENTS.items()]
    panels += [(metric, "trained", text) for metric, text in _SHARES.items()]
    with style.paper():
        fig, axes = style.panels(len(panels), 1.95, 0.1, least=1.6)
        for ax, (metric, moment, text) in zip(axes, panels, strict=True):
            for run, part in parts.items():
                rows = _global(part, metric, moment)
                if rows["value"].notna().any():
                    band = _band(part, rows, moment) if metric == "accuracy" else None
                    line(ax, rows, looks[run], band if len(runs) <= 3 else None)
            ax.set_title("\n".join(style.wrap(text, 2.0, 2, 8.0)), fontsize=8)
            accuracy = f"{SPLITS[split_of(table)]} accuracy"
            _finish(ax, accuracy if metric == "accuracy" else "share of the examples")
        ends = [ax.get_ylim() for ax in axes[: len(_MOMENTS)]]
        for ax in axes[: len(_MOMENTS)]:  # these are compared with each other
            ax.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
            _references(ax, table)
        legend_of_runs(fig, looks)
    return fig


def _references(ax: Axes, table: pd.DataFrame) -> None:
    """The accuracy of guessing, and that of models that know their client's classes only."""
    if (most := ceiling(table)) is not None:
        style.ceiling(ax, most)
    classes = only(table, metric="class_examples")["index"].nunique()
    if classes > 1:
        style.chance(ax, 1 / classes)


def ceiling(table: pd.DataFrame) -> float | None:
    """The accuracy of models that are always right on their client's own classes and never on others, mean over the clients,
    where test classes are equally frequent; None where every client has every class, or nobody knows."""
    counts = only(table, metric="class_examples").dropna(subset=["value"])
    share = float((floats(counts["value"]) > 0).mean()) if len(counts) else 1.0
    return share if share < 1 else None


@compares_runs
def curves_if_any(table: pd.DataFrame) -> Figure | None:
    """``curves``, where there are accuracies: regression has losses only."""
    return curves(table) if (table["metric"] == "accuracy").any() else None


@compares_runs
def heatmap_if_any(table: pd.DataFrame) -> Figure | None:
    """``heatmap``, where classes were told apart."""
    has_classes = (table["metric"] == "accuracy").any() and (
        table["metric"] == "class_forgetting"
    ).any()
    return heatmap(table) if has_classes else None


def _band(
    table: pd.DataFrame, rows: pd.DataFrame, moment: str
) -> tuple[np.ndarray, np.ndarray] | None:
    if moment == "trained":
        std = _global(table, "accuracy_std", moment)["value"].reindex(rows.index)
        return floats(rows["value"]) - floats(std), floats(rows["value"]) + floats(std)
    return (floats(rows["low"]), floats(rows["high"])) if "low" in rows.columns else None


def _finish(ax: Axes, label: str) -> None:
    ax.set_ylabel(label)
    rounds_axis(ax)
    style.percents(ax.yaxis)
    low, high = ax.get_ylim()
    ax.set_ylim(max(low, 0), min(high, 1.02))
    ax.grid(True)


@compares_runs
def heatmap(table: pd.DataFrame, *, round: int | None = None) -> Figure:
    """Client by class: accuracy on the class before minus after the client's training, in one round (default: each run's
    last); of several runs beside each other, on one scale.

    Of many clients: percentiles over them, each class by itself. Grey and hatched: too few test examples of the class. A dot: the
    client has no training example of the class.
    Raises FldiagError when the table has no such round.
    """
    need(table, (*COLUMNS, "client", "index"), PICTURE)
    labels = names(table["run"]) if "run" in table.columns else [""] * len(table)
    runs = {run: table[[v == run for v in labels]] for run in dict.fromkeys(labels)}
    losses = {run: _losses(part, round) for run, part in runs.items()}
    clients = {run: _cells(rows) for run, rows in losses.items()}
    cells = {run: percentiles(c) if len(c) > MANY else c for run, c in clients.items()}
    values = np.concatenate([part.to_numpy().ravel() for part in cells.values()])
    reach = float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) or 1.0
    rows, classes = (max(part.shape[axis] for part in cells.values()) for axis in (0, 1))
    width = style.ONE_COLUMN if classes <= 12 and len(runs) == 1 else style.TWO_COLUMNS
    height = min(max(1.2 + 0.17 * rows, 2.15), 8.0)
    marked = set()
    with style.paper():
        across = 3 if classes <= 12 else 1
        fig, axes = style.panels(len(runs), height, across=across, width=width)
        for ax, (run, part) in zip(axes, cells.items(), strict=True):
            examples = only(runs[run], metric="class_examples")
            marked |= _classes(ax, part, examples, reach, is_large=len(clients[run]) > MANY)
            last = int(losses[run]["round"].iloc[0])
            title = f"forgetting by class, round {last}"
            ax.set_title(title if len(runs) == 1 else f"{style.plain(run)}\n{title}", fontsize=8)
        bar = fig.colorbar(axes[0].images[0], ax=axes, pad=0.02)
        bar.set_label("accuracy received − trained")
        bar.outline.set_visible(False)  # type: ignore[operator]
        keys = {
            "client has no such example": Line2D(
                [], [], linestyle="none", marker="o", markersize=3, color="#222222"
            ),
            f"too few {SPLITS[split_of(table)]} examples": Patch(
                facecolor="#bbbbbb", hatch="////", edgecolor="white"
            ),
        }
        texts = [text for text, mark in zip(keys, ("dot", "hatch"), strict=True) if mark in marked]
        if texts:
            style.legend(fig, [keys[text] for text in texts], texts, ncols=2)
    return fig


def _losses(table: pd.DataFrame, round: int | None) -> pd.DataFrame:
    """What each client forgot of each class in the round, or in the last one."""
    rows = select(table, "class_forgetting", PICTURE)
    rounds = sorted(int(r) for r in rows["round"].dropna().unique())
    losses = only(rows, round=rounds[-1] if round is None else round)
    if losses.empty:
        raise FldiagError(
            f"the table has no class_forgetting of round {round}",
            f"it has rounds {rounds[0]}..{rounds[-1]}",
            usage=True,
        )
    return losses


def _classes(
    ax: Axes, cells: pd.DataFrame, examples: pd.DataFrame, reach: float, is_large: bool
) -> set[str]:
    """A run's cells; which marks (dot, hatch) stand in them."""
    counts = _cells(examples.iloc[:0] if is_large else examples).reindex_like(cells)
    values = cells.to_numpy()
    rows, classes = cells.shape
    ax.set_facecolor("#bbbbbb")
    for r, c in np.argwhere(~np.isfinite(values)):
        ax.add_patch(_cell_hatch(c, r))
    norm = TwoSlopeNorm(0.0, -reach, reach)
    draw_cells(ax, cells, norm, colors=style.DIVERGING, most=40, square=False)
    unseen = np.argwhere(counts.to_numpy() == 0)
    ax.plot(
        unseen[:, 1],
        unseen[:, 0],
        linestyle="none",
        marker="o",
        markersize=min(3.0, max(1.6, 40 / max(rows, classes))),
        color="#222222",
        markeredgecolor="white",
        markeredgewidth=0.35,
    )
    ax.set(xlabel="class", ylabel="percentile of the clients" if is_large else "client")
    marks = {"dot": len(unseen) > 0, "hatch": bool((~np.isfinite(values)).any())}
    return {mark for mark, is_there in marks.items() if is_there}


def _cell_hatch(x: float, y: float) -> Patch:
    grey: dict[str, Any] = {
        "facecolor": "#bbbbbb",
        "hatch": "////",
        "edgecolor": "white",
        "linewidth": 0,
    }
    return Rectangle((x - 0.5, y - 0.5), 1, 1, zorder=3, **grey)


def _cells(rows: pd.DataFrame) -> pd.DataFrame:
    flat = rows.assign(value=floats(rows["value"])).astype({"client": int, "index": int})
    return flat.pivot(index="client", columns="index", values="value")
