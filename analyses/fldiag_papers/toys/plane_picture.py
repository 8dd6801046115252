"""The toy in the plane: where FedSOL and FedProx come to rest between the global and the local optimum.

The picture of Lee et al., "FedSOL" (CVPR 2024), appendix H, figure 12. Client k has the loss
1/2 [a_k (x - x*)^2 + (y - y*)^2] around w_l* = (x*, y*); all start from the global weights w_g.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from fldiag.errors import FldiagError
from fldiag.plotting import style, words
from fldiag.plotting.tables import floats, names, need
from fldiag.results.select import only

PICTURE = "plane toy"
_MARKERS = ("o", "s", "^", "v", "P", "X", "d")


def draw(table: pd.DataFrame, geometry: Mapping[str, Any]) -> Figure:
    """One panel a method: the clients' loss contours, their trajectories, end points and closed forms.

    ``table``: rows with ``metric`` in trajectory, end_point, closed_form and ``x, y, method, a``, trajectories
    ordered by ``index``. ``geometry``: ``w_g`` and ``w_l`` (two numbers each) and ``a`` (the curvatures).
    Raises FldiagError for missing columns or geometry.
    """
    need(table, ("metric", "method", "a", "x", "y", "index"), PICTURE)
    start, goal, curvatures = _geometry(geometry)
    flat = pd.DataFrame(
        {
            "metric": names(table["metric"]),
            "method": names(table["method"]),
            **{c: floats(table[c]) for c in ("a", "x", "y", "index")},
        }
    )
    flat = flat[flat["metric"].isin(("trajectory", "end_point", "closed_form"))]
    if flat.empty:
        raise FldiagError(
            f"the table for the {PICTURE} has no rows of metric trajectory, end_point or closed_form",
            "build it with the plane toy",
            usage=True,
        )
    strange = sorted(set(flat["a"].dropna()) - set(curvatures))
    if strange or flat["a"].isna().any():
        raise FldiagError(
            f"the plane toy's table has clients with a = {strange or 'none'}, its geometry "
            f"{curvatures}",
            "give the geometry of the same clients",
            usage=True,
        )
    methods = list(dict.fromkeys(flat["method"]))
    looks = style.looks(methods)
    low, high = _window(np.vstack([flat[["x", "y"]].to_numpy(), start, goal]))
    reach = 0.25 * float(np.min(high - low))  # of the outer contours, which are whole
    low, high = np.minimum(low, goal - 1.1 * reach), np.maximum(high, goal + 1.1 * reach)
    width = style.wide(style.ONE_COLUMN if len(methods) == 1 else style.TWO_COLUMNS)
    side = min((width - 0.55) / len(methods) - 0.15, 3.0)
    tall = side * float(np.clip((high - low)[1] / (high - low)[0], 0.5, 1.4))
    texts = [f"client with a = {style.number(a)}" for a in curvatures] + ["line", "closed form"]
    columns = style.columns(texts, width - 0.2, 0.65)
    with style.paper():
        fig = style.figure(
            width,
            tall + 1.0 + 0.18 * -(-len(texts) // columns),
            layout=ConstrainedLayoutEngine(h_pad=0.1),
        )
        axes = fig.subplots(1, len(methods), sharex=True, sharey=True, squeeze=False)[0]
        for ax, method in zip(axes, methods, strict=True):
            _contours(ax, goal, curvatures, low, high, reach)
            ax.plot(
                *np.stack([start, goal]).T,
                color="#777777",
                linewidth=0.8,
                dashes=(5, 3),
                label="line",
            )
            for place, a in enumerate(curvatures):
                part = flat[(flat["method"] == method) & (flat["a"] == a)]
                # Later markers are smaller: those that share a place still show.
                size = 6.5 + 2.5 * min(len(curvatures) - 1 - place, 4)
                _client(ax, part, looks[method].color, _MARKERS[place % len(_MARKERS)], size)
            _mark(ax, start, goal)
            ax.set(
                title=style.plain(words.method(method)),
                xlabel="x",
                xlim=(low[0], high[0]),
                ylim=(low[1], high[1]),
                aspect="equal",
            )
            ax.spines[:].set_visible(True)
        axes[0].set_ylabel("y")
        _key(fig, texts, columns)
    return fig


def _geometry(geometry: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, list[float]]:
    missing = [k for k in ("w_g", "w_l", "a") if k not in geometry]
    if missing:
        raise FldiagError(
            f"the plane toy's geometry lacks {', '.join(missing)}",
            "give w_g, w_l (two numbers each) and the list a",
            usage=True,
        )
    points = [np.asarray(geometry[k], dtype=float) for k in ("w_g", "w_l")]
    curvatures = [float(v) for v in np.atleast_1d(np.asarray(geometry["a"], dtype=float))]
    if any(p.shape != (2,) for p in points) or not curvatures or min(curvatures) <= 0:
        raise FldiagError(
            f"the plane toy's geometry is not two points and positive curvatures: {dict(geometry)}",
            "give w_g, w_l (two numbers each) and a > 0",
            usage=True,
        )
    return points[0], points[1], curvatures


def _window(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Corners of a window around all finite points, with room for labels."""
    points = points[np.isfinite(points).all(1)]
    low, high = points.min(0), points.max(0)
    room = 0.17 * max((high - low).max(), 1e-9)
    return low - room, high + room


def _contours(
    ax, goal: np.ndarray, curvatures: list[float], low: np.ndarray, high: np.ndarray, reach: float
) -> None:
    """A level line a client, its longer half axis ``reach``, with the client's curvature where the line is alone."""
    x, y = np.meshgrid(*(np.linspace(low[i], high[i], 401) for i in (0, 1)))
    for a in curvatures:
        loss = 0.5 * (a * (x - goal[0]) ** 2 + (y - goal[1]) ** 2)
        ax.contour(
            x, y, loss, levels=[0.5 * min(a, 1.0) * reach**2], colors="#9a9a9a", linewidths=0.7
        )
        at = goal - ((0, reach * a**0.5) if a <= 1 else (reach / a**0.5, 0))
        ax.annotate(
            f"$a$ = {style.number(a)}",
            at,
            ha="center",
            va="center",
            fontsize=6,
            color="#444444",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
        )


def _client(ax, part: pd.DataFrame, color: str, marker: str, size: float) -> None:
    path = only(part, metric="trajectory").sort_values("index", kind="stable")
    ax.plot(path["x"], path["y"], color=color, linewidth=0.9, alpha=0.75, label="trajectory")
    end, exact = only(part, metric="end_point"), only(part, metric="closed_form")
    ax.plot(
        end["x"],
        end["y"],
        linestyle="none",
        marker=marker,
        markersize=size,
        markerfacecolor="none",
        markeredgecolor=color,
        markeredgewidth=1.1,
        zorder=4,
        label="end point",
    )
    ax.plot(
        exact["x"],
        exact["y"],
        linestyle="none",
        marker="x",
        markersize=3.2,
        color="black",
        markeredgewidth=0.8,
        zorder=5,
        label="closed form",
    )


def _mark(ax, start: np.ndarray, goal: np.ndarray) -> None:
    # Each name stands beyond its end of the line, away from the paths between the two.
    along = (goal - start) / max(float(np.linalg.norm(goal - start)), 1e-12)
    for point, name, sign in ((start, r"$w_g$", -1), (goal, r"$w_l^*$", 1)):
        ax.plot(
            *point,
            marker="*",
            markersize=9,
            color="black",
            markeredgecolor="white",
            markeredgewidth=0.5,
            zorder=6,
            linestyle="none",
            label=name,
        )
        ax.annotate(
            name,
            point,
            xytext=sign * 11 * along,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=9,
            zorder=7,
        )


def _key(fig: Figure, texts: list[str], columns: int) -> None:
    clients = [
        Line2D(
            [],
            [],
            linestyle="none",
            markersize=6,
            marker=_MARKERS[i % len(_MARKERS)],
            markerfacecolor="white",
            markeredgecolor="#333333",
        )
        for i in range(len(texts) - 2)
    ]
    marks = [
        Line2D([], [], color="#777777", linewidth=0.8, dashes=(5, 3)),
        Line2D(
            [], [], linestyle="none", marker="x", markersize=3.5, color="black", markeredgewidth=0.8
        ),
    ]
    legend = style.legend(
        fig,
        clients + marks,
        texts,
        loc="outside lower center",
        handlelength=3.2,
        columnspacing=1.4,
        ncols=columns,
        borderpad=0.2,
    )
    legend.get_texts()[-2].set_text(r"line $w_g$ to $w_l^*$")
