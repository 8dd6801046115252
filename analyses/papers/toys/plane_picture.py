"""The toy in the plane: where FedSOL and FedProx come to rest between the global and the local optimum.

The picture of Lee et al., "FedSOL" (CVPR 2024), appendix H, figure 12.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from fldiag.plotting import style, words
from fldiag.results.select import only

MARKERS = ("o", "s", "^", "v", "P", "X", "d")


def draw(table: pd.DataFrame, geometry: Mapping[str, Any]) -> Figure:
    """One panel a method: the clients' loss contours, their trajectories, end points and closed forms.

    ``table``: of :func:`fldiag_papers.toys.plane.run`; ``geometry``: ``w_g``, ``w_l`` and the curvatures ``a``.
    """
    start, goal = np.asarray(geometry["w_g"], float), np.asarray(geometry["w_l"], float)
    curvatures: list[float] = list(geometry["a"])
    rows = only(table, metric=("trajectory", "end_point", "closed_form"))
    rows = rows.astype({"x": float, "y": float, "a": float})
    methods = list(dict.fromkeys(rows["method"]))
    looks = style.looks(methods)
    points = np.vstack([rows[["x", "y"]].to_numpy(), start, goal])
    points = points[np.isfinite(points).all(1)]
    low, high = points.min(0), points.max(0)
    room = 0.17 * max((high - low).max(), 1e-9)  # for labels
    low, high = low - room, high + room
    reach = 0.25 * float(np.min(high - low))  # of the outer contours, which are whole
    low, high = np.minimum(low, goal - 1.1 * reach), np.maximum(high, goal + 1.1 * reach)
    width = style.wide()
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
                # Later markers are smaller: those that share a place still show.
                size = 6.5 + 2.5 * min(len(curvatures) - 1 - place, 4)
                marker = MARKERS[place % len(MARKERS)]
                _client(ax, only(rows, method=method, a=a), looks[method].color, marker, size)
            _mark_optima(ax, start, goal)
            ax.set(
                title=style.plain(words.method(method)),
                xlabel="x",
                xlim=(low[0], high[0]),
                ylim=(low[1], high[1]),
                aspect="equal",
            )
            ax.spines[:].set_visible(True)
        axes[0].set_ylabel("y")
        hollow: dict[str, Any] = {
            "linestyle": "none",
            "markerfacecolor": "white",
            "markeredgecolor": "#333333",
        }
        handles = [
            Line2D([], [], markersize=6, marker=MARKERS[i % len(MARKERS)], **hollow)
            for i in range(len(curvatures))
        ]
        cross: dict[str, Any] = {"marker": "x", "markersize": 3.5, "markeredgewidth": 0.8}
        handles += [
            Line2D([], [], color="#777777", linewidth=0.8, dashes=(5, 3)),
            Line2D([], [], linestyle="none", color="black", **cross),
        ]
        legend = style.legend(
            fig,
            handles,
            texts,
            loc="outside lower center",
            handlelength=3.2,
            columnspacing=1.4,
            ncols=columns,
            borderpad=0.2,
        )
        legend.get_texts()[-2].set_text(r"line $w_g$ to $w_l^*$")
    return fig


def _contours(
    ax: Axes,
    goal: np.ndarray,
    curvatures: list[float],
    low: np.ndarray,
    high: np.ndarray,
    reach: float,
) -> None:
    """A level line a client, its longer half axis ``reach``, with the client's curvature where the line is alone."""
    x, y = np.meshgrid(*(np.linspace(low[i], high[i], 401) for i in (0, 1)))
    for a in curvatures:
        loss = 0.5 * (a * (x - goal[0]) ** 2 + (y - goal[1]) ** 2)
        level = 0.5 * min(a, 1.0) * reach**2
        ax.contour(x, y, loss, levels=[level], colors="#9a9a9a", linewidths=0.7)
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


def _client(ax: Axes, rows: pd.DataFrame, color: str, marker: str, size: float) -> None:
    path = only(rows, metric="trajectory").sort_values("index", kind="stable")
    end, exact = only(rows, metric="end_point"), only(rows, metric="closed_form")
    ax.plot(path["x"], path["y"], color=color, linewidth=0.9, alpha=0.75, label="trajectory")
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


def _mark_optima(ax: Axes, start: np.ndarray, goal: np.ndarray) -> None:
    """Each name stands beyond its end of the line, away from the paths between the two."""
    along = (goal - start) / float(np.linalg.norm(goal - start))
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
            tuple(point),
            xytext=sign * 11 * along,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=9,
            zorder=7,
        )
