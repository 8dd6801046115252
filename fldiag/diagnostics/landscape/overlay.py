"""Several loss surfaces one over the other: on the same axes and levels, each in its colour, dashes and marker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox
from mpl_toolkits.mplot3d.art3d import Poly3DCollection

from fldiag.diagnostics.landscape.surfaces import Scale, Surface, scale, surfaces
from fldiag.plotting import style
from fldiag.plotting.style import number

LEVELS = 9
#: Of the first surface, the second, ...: methods that look alike in other pictures differ here.
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1, 1.5, 1)))


def draw(table: pd.DataFrame, *, clip: float | Literal["auto"] | None = "auto",
         height: Literal["linear", "log", "auto"] = "linear",
         names: tuple[str, str] = ("direction 1", "direction 2")) -> Figure:
    """The surfaces in one space, and beside them their contours at the same levels, with each one's lowest grid point.

    ``table``, ``clip``, ``height`` and ``names`` as for ``fldiag.diagnostics.landscape.picture.draw``.
    """
    grids = surfaces(table)
    shared = scale(grids, clip, height)
    looks = {run: replace(look, dash=DASHES[i % len(DASHES)]) for i, (run, look) in
             enumerate(style.looks(g.run for g in grids).items())}
    with style.paper():
        width, foot = style.wide(), 0.1 + 0.17 * (len(grids) + len(shared.notes()))
        beside = width > 4.5  # else the surfaces stand above the contours
        side = (0.42 if beside else 0.8) * width
        panel = side + 0.62  # inches: names below the contours, a title above
        whole = foot + panel + (0 if beside else 0.9 * width)
        fig = style.figure(width, whole)
        low = foot if beside else foot + panel
        space = fig.add_axes((0.0, low / whole, 0.48 if beside else 1.0, 1 - low / whole), projection="3d", label="surfaces")
        flat = fig.add_axes((0.97 - side / width, (foot + 0.4) / whole, side / width, side / whole), label="contours")
        _surfaces(space, grids, shared, looks, names)
        _contours(flat, grids, shared, looks, names)
        handles = [Line2D([], [], color=looks[g.run].color, linestyle=looks[g.run].dash, marker=looks[g.run].marker, markersize=4,
                          markerfacecolor="white" if g is not grids[-1] else looks[g.run].color) for g in grids]
        texts = [f"{style.shorten(g.run, 40 if beside else 12)}: loss {number(g.centre)} at the weights, "
                 f"lowest {number(g.lowest)} (marker)"
                 + ("" if g.smad is None else f", SMAD {number(g.smad, 3)}") for g in grids]
        style.legend(fig, handles, texts, loc="lower center", bbox_to_anchor=(0.5, 0.15 * len(shared.notes()) / whole),
                     handlelength=3.6)
        fig.text(0.5, 0.03, " ".join(map(style.plain, shared.notes())), ha="center", va="bottom", fontsize=7, color="#444444")
    return fig


def _surfaces(ax, grids: list[Surface], shared: Scale, looks: dict[str, style.Look], names: tuple[str, str]) -> None:
    """All polygons in one collection: only then is what lies behind drawn first where surfaces cross."""
    quads, colours = [], []
    for grid in grids:
        z, base = shared.height(grid.loss), np.array(to_rgb(looks[grid.run].color))
        for j in range(len(grid.y) - 1):
            for i in range(len(grid.x) - 1):
                cell = z[[j, j, j + 1, j + 1], [i, i + 1, i + 1, i]]
                if np.isfinite(cell).all():
                    quads.append(np.column_stack([grid.x[[i, i + 1, i + 1, i]], grid.y[[j, j, j + 1, j + 1]], cell]))
                    light = 0.15 + 0.5 * float((cell.mean() - shared.low) / (shared.high - shared.low))
                    colours.append((*(base + (1 - base) * light), 0.8))
    drawn = Poly3DCollection(quads, facecolors=colours, edgecolors=[(1, 1, 1, 0.25)], linewidths=0.15)
    drawn.set_rasterized(True)  # thousands of polygons weigh much as vectors
    ax.add_collection3d(drawn)
    limits = _limits(grids)
    ax.set(xlim=limits[0], ylim=limits[1], zlim=(shared.low, shared.high))
    ax.set_box_aspect((1, 1, 0.8), zoom=0.95)
    ax.view_init(elev=24, azim=-57)
    ax.patch.set_alpha(0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(4, prune="both"))
    ax.set_zticks(shared.ticks(5))
    ax.zaxis.set_major_formatter(FuncFormatter(lambda v, _: shared.label(v)))
    for axis in (ax.xaxis, ax.yaxis, ax.zaxis):
        axis.set_pane_color((0.97, 0.97, 0.97, 1.0))
        axis._axinfo["grid"].update(linewidth=0.3, color="#cccccc")
    ax.tick_params(axis="both", labelsize=6, pad=-3)
    for text, put, pad in zip(names, (ax.set_xlabel, ax.set_ylabel), (-9, -6), strict=True):
        put(style.plain(text.partition(" (")[0]), fontsize=6, labelpad=pad)
    ax.set_title("loss", fontsize=7, y=0.97)


def _contours(ax: Axes, grids: list[Surface], shared: Scale, looks: dict[str, style.Look], names: tuple[str, str]) -> None:
    levels = shared.low + (shared.high - shared.low) * (np.arange(1, LEVELS + 1) / (LEVELS + 1)) ** 2  # closer in the valley
    taken: list[Bbox] = []
    for place, grid in enumerate(grids):
        look = looks[grid.run]
        drawn = ax.contour(*grid.finely(shared), levels=levels, colors=look.color, linestyles=[look.dash], linewidths=0.9)
        for text in ax.clabel(drawn, levels[::2], fontsize=6, fmt=shared.label):
            box = text.get_window_extent()
            text.set_visible(not any(box.overlaps(other) for other in taken))  # not on another surface's
            taken.append(box)
        if np.isfinite(grid.loss).any():
            j, i = np.unravel_index(int(np.nanargmin(grid.loss)), grid.loss.shape)
            # of two at one place, both are seen
            ax.plot(grid.x[i], grid.y[j], look.marker, color=look.color, markersize=4 + 2.5 * (len(grids) - 1 - place),
                    markerfacecolor="white" if place < len(grids) - 1 else look.color, markeredgewidth=1.0, zorder=3 + place)
    limits = _limits(grids)
    ax.plot(0, 0, "+", color="#555555", markersize=9, markeredgewidth=1.2)
    ax.set(xlim=limits[0], ylim=limits[1], xlabel=style.plain(names[0]), ylabel=style.plain(names[1]), aspect="auto",
           title="same levels; + each one's own weights")
    ax.title.set_fontsize(7)
    ax.spines[:].set_visible(True)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))


def _limits(grids: list[Surface]) -> list[tuple[float, float]]:
    return [(min(getattr(g, a)[0] for g in grids), max(getattr(g, a)[-1] for g in grids)) for a in "xy"]
