"""A trajectory of weights and single weight sets, on the contours of a landscape."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.patheffects import Stroke, withStroke

from fldiag.diagnostics.landscape.surfaces import Marks

_HALO = [Stroke(linewidth=2.4, foreground="black"), Stroke(linewidth=1.2, foreground="white")]


def trajectory(ax: Any, marks: Marks) -> None:
    """The way as a white line in a black halo, dots at its checkpoints, the first one large; squares for points."""
    way = marks.trajectory
    if len(way):
        ax.plot(
            way[:, 0],
            way[:, 1],
            color="white",
            path_effects=_HALO,
            solid_joinstyle="round",
            label="trajectory",
        )
        few = way[np.unique(np.linspace(0, len(way) - 1, min(len(way), 12)).round().astype(int))]
        ax.plot(
            few[:, 0],
            few[:, 1],
            "o",
            color="white",
            markersize=2.6,
            markeredgecolor="black",
            markeredgewidth=0.5,
            label="_checkpoints",
        )
        ax.plot(
            *way[0],
            "o",
            color="white",
            markersize=5,
            markeredgecolor="black",
            markeredgewidth=0.9,
            label="first",
        )
        for place, text in ((0, "start"), (-1, "end")):
            _name(
                ax,
                way[place],
                marks.texts[place].partition(",")[0] if marks.texts else text,
                up=place == 0,
            )
    for number, place in enumerate(marks.points):
        ax.plot(
            *place,
            "s",
            color="white",
            markersize=4.2,
            markeredgecolor="black",
            markeredgewidth=0.9,
            label="point",
        )
        _name(ax, place, f"checkpoint {number + 2}", up=True)


def _name(ax: Any, place: np.ndarray, text: str, up: bool) -> None:
    """A name beside a place, on the side of it where there is room."""
    (low, high), right = ax.get_xlim(), 0.0
    right = (place[0] - low) / ((high - low) or 1.0)
    side = "left" if right < 0.3 else "right" if right > 0.7 else "center"
    ax.annotate(
        text,
        place,
        xytext=(0, 5 if up else -5),
        textcoords="offset points",
        ha=side,
        va="bottom" if up else "top",
        fontsize=6,
        color="white",
        path_effects=[withStroke(linewidth=1.6, foreground="black")],
        zorder=6,
    )
