"""Predicted against true effects of leaving each client out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from fldiag.plotting import style
from fldiag.plotting.tables import compares_runs, floats, need, select
from fldiag.results.select import number, only

PICTURE = "picture of clients left out"
#: Where a name may stand: (offset in points, horizontal and vertical alignment), the best place first.
_PLACES = (
    ((2.5, 2.5), "left", "bottom"),
    ((-2.5, 2.5), "right", "bottom"),
    ((2.5, -2.5), "left", "top"),
    ((-2.5, -2.5), "right", "top"),
)
#: Half the size of a mark, in points.
_MARK = 2.0


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
        _place_names(fig)
    return fig


def _panel(ax, pairs: pd.DataFrame, looks: dict[str, style.Look], numbers: bool) -> None:
    if pairs.empty:
        style.empty(ax, "no prediction")
        return
    for run, part in pairs.groupby("run", sort=False):
        x, y = floats(part["value"]), floats(part["value_true"])
        ax.plot(x, y, **looks[run].point, alpha=0.7)
        if numbers:
            _names_beside(ax, [str(int(k)) for k in part["client"]], x, y)
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


def _names_beside(
    ax: Axes, texts: Sequence[str], x: np.ndarray, y: np.ndarray, size: float = 6.0
) -> None:
    """Names of points; ``_place_names`` finds a place for each when the figure is laid out."""
    for text, at in zip(texts, zip(x, y, strict=True), strict=True):
        ax.annotate(
            text, at, xytext=(0, 0), textcoords="offset points", fontsize=size, gid="beside"
        )


def _place_names(fig: Figure) -> None:
    """Put the names beside points where they lie on no point and no other name; a name without such a place is not drawn. Those
    of the points that are farthest from the others choose first."""
    fig.draw_without_rendering()
    renderer, scale = fig.canvas.get_renderer(), fig.dpi / 72  # type: ignore[attr-defined]
    for ax in fig.axes:
        names = [t for t in ax.texts if t.get_gid() == "beside" and isinstance(t, Annotation)]
        if not names:
            continue
        points = ax.transData.transform([t.xy for t in names])
        apart = np.sort(np.hypot(*(points[:, None] - points[None]).transpose(2, 0, 1)), axis=1)[
            :, min(1, len(points) - 1)
        ]
        boxes = [Bbox.from_extents(*(p - _MARK * scale), *(p + _MARK * scale)) for p in points]
        for i in np.argsort(-apart, kind="stable"):
            for offset, across, up in _PLACES:
                names[i].set(position=offset, ha=across, va=up, visible=True)
                box = names[i].get_window_extent(renderer)
                inside = (
                    fig.bbox.x0 <= box.x0
                    and box.x1 <= fig.bbox.x1
                    and ax.bbox.y0 - 2 <= box.y0
                    and box.y1 <= ax.bbox.y1 + 2
                )
                if inside and not any(box.overlaps(other) for other in boxes):
                    boxes.append(box)
                    break
            else:
                names[i].set_visible(False)
