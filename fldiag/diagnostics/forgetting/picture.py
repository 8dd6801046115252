"""What local training forgets: accuracy before and after it over the rounds, and a heatmap of client and class.

The first picture is that of Lee et al., "FedSOL" (CVPR 2024), figure 7.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.tables import MANY, floats, need, percentiles, select
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


def line(
    ax, found: pd.DataFrame, look: style.Look, band: tuple[np.ndarray, np.ndarray] | None
) -> None:
    """The values of a table indexed by round, with a band (low, high)."""
    rounds, values = found.index.to_numpy(float), floats(found["value"])
    # a round that is not there is a gap, not a line across it
    whole = (
        np.arange(rounds.min(), rounds.max() + 1)
        if len(rounds) > 1 and np.diff(rounds).min() == 1
        else rounds
    )

    def spread(v: np.ndarray) -> np.ndarray:
        return np.array([dict(zip(rounds, v, strict=True)).get(r, np.nan) for r in whole])

    if band is not None:
        ax.fill_between(
            whole, spread(band[0]), spread(band[1]), color=look.color, alpha=0.15, linewidth=0
        )
    ax.plot(
        whole,
        spread(values),
        color=look.color,
        linestyle=look.dash,
        marker=look.marker,
        markersize=3.4,
        markevery=max(len(whole) // 8, 1),
        markeredgecolor="white",
        markeredgewidth=0.4,
    )


def key(look: style.Look) -> Line2D:
    """What a legend shows of such a line."""
    return Line2D(
        [],
        [],
        color=look.color,
        linestyle=look.dash,
        marker=look.marker,
        markersize=3.4,
        markeredgecolor="white",
        markeredgewidth=0.4,
    )


def curves(table: pd.DataFrame) -> Figure:
    """Test accuracy of the received, trained and aggregated models over the rounds, and what is forgotten and restored.

    ``table``: what the diagnostic ``forgetting`` returns. Bands: Wilson's interval of one model, one standard deviation
    over the clients of the trained ones. Raises FldiagError for a table without accuracies (regression).
    """
    need(table, COLUMNS, PICTURE)
    select(table, "accuracy", PICTURE)
    with style.paper():
        fig, (left, right) = style.panels(2, 2.75, least=2.5)
        keys = []
        for place, (moment, text) in enumerate(_MOMENTS.items()):
            found, look = _global(table, "accuracy", moment), style.look(place)
            if found["value"].notna().any():
                line(left, found, look, _band(table, found, moment))
                keys.append((key(look), text))
        _finish(left, f"{SPLITS[split_of(table)]} accuracy", keys)
        if (most := ceiling(table)) is not None:
            style.ceiling(left, most)
        classes = only(table, metric="class_examples")["index"].nunique()
        if classes > 1:
            style.chance(left, 1 / classes)
        keys = []
        for place, (metric, text) in enumerate(_SHARES.items()):
            found, look = _global(table, metric, "trained"), style.look(place + 3)
            if found["value"].notna().any():
                line(right, found, look, None)
                keys.append((key(look), text))
        _finish(right, "share of the examples", keys)
    return fig


def ceiling(table: pd.DataFrame) -> float | None:
    """The accuracy of models that are always right on their client's own classes and never on others, mean over the clients,
    where test classes are equally frequent; None where every client has every class, or nobody knows."""
    held = only(table, metric="class_examples").dropna(subset=["value"])
    share = float((floats(held["value"]) > 0).mean()) if len(held) else 1.0
    return share if share < 1 else None


def curves_if_any(table: pd.DataFrame) -> Figure | None:
    """``curves``, where there are accuracies: regression has losses only."""
    return curves(table) if (table["metric"] == "accuracy").any() else None


def heatmap_if_any(table: pd.DataFrame) -> Figure | None:
    """``heatmap``, where classes were told apart."""
    there = (table["metric"] == "accuracy").any() and (table["metric"] == "class_forgetting").any()
    return heatmap(table) if there else None


def _band(
    table: pd.DataFrame, found: pd.DataFrame, moment: str
) -> tuple[np.ndarray, np.ndarray] | None:
    if moment == "trained":
        std = _global(table, "accuracy_std", moment)["value"].reindex(found.index)
        return floats(found["value"]) - floats(std), floats(found["value"]) + floats(std)
    return (floats(found["low"]), floats(found["high"])) if "low" in found.columns else None


def rounds(ax) -> None:
    """Whole rounds along the axis; one alone in the middle."""
    there = {
        x
        for drawn in ax.get_lines()
        for x in np.asarray(drawn.get_xdata(), dtype=float)
        if drawn.get_marker() != "None"
    }
    if len(there) == 1:
        (only_one,) = there
        ax.set_xlim(only_one - 1, only_one + 1)
        ax.set_xticks([only_one], [f"{only_one:g}"])
    else:
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))


def _finish(ax, label: str, keys: list[tuple[Line2D, str]]) -> None:
    ax.set(xlabel="round", ylabel=label)
    rounds(ax)
    style.percents(ax.yaxis)
    low, high = ax.get_ylim()
    ax.set_ylim(max(low, 0), min(high, 1.02))
    ax.grid(True)
    if keys:
        style.legend(
            ax,
            [k for k, _ in keys],
            [t for _, t in keys],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.22),
            ncols=1,
            handlelength=2.6,
            borderpad=0.1,
        )


def heatmap(table: pd.DataFrame, *, round: int | None = None) -> Figure:
    """Client by class: accuracy on the class before minus after the client's training, in one round (default: last).

    Of many clients: percentiles over them, each class by itself. Grey and hatched: too few test examples of the class. A dot: the
    client has no training example of the class.
    Raises FldiagError when the table has no such round.
    """
    need(table, (*COLUMNS, "client", "index"), PICTURE)
    rows = select(table, "class_forgetting", PICTURE)
    there = sorted(int(r) for r in rows["round"].dropna().unique())
    round = there[-1] if round is None else round
    rows = only(rows, round=round)
    if rows.empty:
        raise FldiagError(
            f"the table has no class_forgetting of round {round}",
            f"it has rounds {there[0]}..{there[-1]}",
            usage=True,
        )
    cells = _cells(rows)
    many = len(cells) > MANY
    cells = percentiles(cells) if many else cells
    held = only(table, metric="class_examples")
    counts = _cells(held.iloc[:0] if many else held).reindex(
        index=cells.index, columns=cells.columns
    )
    clients, classes = cells.shape
    width = style.wide(style.ONE_COLUMN if classes <= 12 else style.TWO_COLUMNS)
    values = cells.to_numpy()
    reach = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    with style.paper():
        fig = style.figure(width, min(max(1.35 + 0.17 * clients, 2.3), 8.0), layout="constrained")
        ax = fig.subplots()
        ax.set_facecolor("#bbbbbb")
        for r, c in np.argwhere(~np.isfinite(values)):
            ax.add_patch(_cell_hatch(c, r))
        image = ax.imshow(
            values,
            aspect="auto",
            cmap=style.DIVERGING,
            interpolation="nearest",
            norm=TwoSlopeNorm(0.0, -max(reach, 1e-9), max(reach, 1e-9)),
        )
        unseen = np.argwhere(counts.to_numpy() == 0)
        size = min(3.0, max(1.6, 40 / max(clients, classes)))
        ax.plot(
            unseen[:, 1],
            unseen[:, 0],
            linestyle="none",
            marker="o",
            markersize=size,
            color="#222222",
            markeredgecolor="white",
            markeredgewidth=0.35,
        )
        who = "percentile of the clients" if many else "client"
        ax.set(xlabel="class", ylabel=who, title=f"forgetting by class, round {round}")
        ax.set_xticks(range(classes), [str(c) for c in cells.columns]) if classes <= 30 else None
        every = max(1, -(-clients // 40))
        ax.set_yticks(range(0, clients, every), [str(k) for k in cells.index[::every]])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        bar = fig.colorbar(image, ax=ax, pad=0.02)
        bar.set_label("accuracy received − trained")
        bar.outline.set_visible(False)
        keys = [
            Line2D([], [], linestyle="none", marker="o", markersize=3, color="#222222"),
            Patch(facecolor="#bbbbbb", hatch="////", edgecolor="white"),
        ]
        texts = ["client has no such example", f"too few {SPLITS[split_of(table)]} examples"]
        shown = [len(unseen) > 0, bool((~np.isfinite(values)).any())]
        if any(shown):
            style.legend(
                fig,
                [k for k, s in zip(keys, shown, strict=True) if s],
                [t for t, s in zip(texts, shown, strict=True) if s],
                loc="outside lower center",
                ncols=2,
                columnspacing=1.2,
                borderpad=0.2,
            )
    return fig


def _cell_hatch(x: float, y: float) -> Patch:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (x - 0.5, y - 0.5),
        1,
        1,
        facecolor="#bbbbbb",
        hatch="////",
        edgecolor="white",
        linewidth=0,
        zorder=3,
    )


def _cells(rows: pd.DataFrame) -> pd.DataFrame:
    flat = pd.DataFrame(
        {
            "client": rows["client"].astype(int),
            "index": rows["index"].astype(int),
            "value": floats(rows["value"]),
        }
    )
    return flat.pivot(index="client", columns="index", values="value")
