"""Loss landscapes of one or several runs: a surface over a contour plot a run, all on one scale.

The picture of Lee et al., "FedSOL" (CVPR 2024), figure 8, and Mendieta et al., "Local Learning Matters"
(CVPR 2022), figure 3.
"""

from __future__ import annotations

import math

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patheffects import Stroke, withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from fldiag.diagnostics.landscape.surfaces import Marks, Scale, Surface, scale, surfaces
from fldiag.plotting import sheet, style

PER_ROW = 4
_LEFT = 0.50  # inches
_XLABEL = 0.40  # inches for tick labels and name of the x axis
_LINE = 0.135  # inches a line of caption
BOLD = 9.5  # points of a text as wide as one of 8.5 in bold
_HALO = [Stroke(linewidth=2.4, foreground="black"), Stroke(linewidth=1.2, foreground="white")]


def draw(
    table: pd.DataFrame,
    names: tuple[str, str] = ("direction 1", "direction 2"),
) -> Figure:
    """The figure: one column a run with its surface, its contours (the weights marked +), lambda_1 and lambda_1 / lambda_k.

    ``table``: rows ``metric="loss"`` with ``run, x, y, value`` over a full grid; optionally ``slice``,
    ``n_examples`` and rows ``metric="eigenvalue"`` (``index``, ``residual``, ``converged``),
    ``"eigenvalue_ratio"``, ``"trajectory"`` and ``"point"`` (``x, y``: drawn on the contours). What is above the clip of
    ``fldiag.diagnostics.landscape.surfaces.scale`` is left blank.
    ``names``: of the two directions; more runs than ``PER_ROW``, or than fit, continue in a further row. Raises FldiagError for
    an unfit table.
    """
    grids = surfaces(table)
    shared = scale(grids)
    width = style.wide()
    longest = max(len(shared.label(t)) for t in (*shared.ticks(4), *shared.ticks(6)))
    right, gap = (
        0.30 + 0.065 * longest,
        0.20 + 0.085 * max(longest - 3, 0),
    )  # room for tick labels of the loss
    columns = min(len(grids), PER_ROW, max(int((width - _LEFT - right + gap) / (1.25 + gap)), 1))
    blocks = math.ceil(len(grids) / columns)
    most = 2.15 if sheet.current().width is None else 2.6  # a journal's column is filled
    side = min(most, (width - _LEFT - right - (columns - 1) * gap) / columns)
    titles = [style.wrap(style.plain(g.run), side, 2, BOLD) for g in grids]
    captions = [[line for part in g.numbers() for line in style.wrap(part, side, 2)] for g in grids]
    title = 0.17 * max(map(len, titles)) + 0.02
    caption = _LINE * max(map(len, captions))
    peak = 0.88 * (side + 0.16)
    under = 0.06 + 0.14 * max(2.15 - side, 0)  # names of a small surface's axes reach below it
    block = title + peak + under + side + _XLABEL + caption
    figure_width = _LEFT + right + columns * side + (columns - 1) * gap
    figure_height = blocks * block + (blocks - 1) * 0.22 + 0.14
    with style.paper():
        fig = style.figure(figure_width, figure_height)
        limits = [
            (min(getattr(g, a)[0] for g in grids), max(getattr(g, a)[-1] for g in grids))
            for a in "xy"
        ]
        for number, grid in enumerate(grids):
            row, column = divmod(number, columns)
            left = _LEFT + column * (side + gap)
            top = figure_height - 0.04 - row * (block + 0.22)
            middle = left + side / 2

            def place(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
                return x / figure_width, y / figure_height, w / figure_width, h / figure_height

            fig.text(
                middle / figure_width,
                (top - title + 0.02) / figure_height,
                "\n".join(titles[number]),
                ha="center",
                va="bottom",
                fontsize=8.5,
                weight="bold",
                linespacing=1.1,
            )
            fine = grid.finely(shared)
            peak_at = top - title - peak
            # A 3-D axes leaves its upper edge empty: it may reach behind the title.
            above = fig.add_axes(
                place(left - 0.08, peak_at, side + 0.16, peak + 0.07 * side),
                projection="3d",
                label=f"surface {number}",
            )
            above.set_zorder(
                -column
            )  # tick labels at its right lie over the next one's empty edge, not under it
            _surface(above, fine, shared, limits, names)
            flat_at = peak_at - under - side
            below = fig.add_axes(place(left, flat_at, side, side), label=f"contours {number}")
            _contours(below, grid, fine, shared, limits, names, first=column == 0)
            fig.text(
                middle / figure_width,
                (flat_at - _XLABEL) / figure_height,
                "\n".join(map(style.plain, captions[number])),
                ha="center",
                va="top",
                fontsize=7,
                linespacing=1.25,
            )
            if column == 0:
                _bar(fig, place(figure_width - right + 0.10, flat_at, 0.09, side), shared)
    return fig


Fine = tuple[np.ndarray, np.ndarray, np.ndarray]


def _surface(
    ax, fine: Fine, shared: Scale, limits: list[tuple[float, float]], names: tuple[str, str]
) -> None:
    x, y = np.meshgrid(*fine[:2])
    heights = np.ma.filled(np.ma.masked_greater(fine[2], shared.high), np.nan)
    mesh = ax.plot_surface(
        x,
        y,
        heights,
        rstride=1,
        cstride=1,
        cmap=style.COLORMAP,
        norm=Normalize(shared.low, shared.high),
        linewidth=0,
        antialiased=False,
    )
    mesh.set_rasterized(True)  # thousands of polygons show seams and weigh much as vectors
    ax.set(xlim=limits[0], ylim=limits[1], zlim=(shared.low, shared.high))
    ax.set_box_aspect((1, 1, 0.8), zoom=0.97)
    ax.view_init(elev=26, azim=-57)
    ax.patch.set_alpha(0)
    # Ticks at the ends would meet at the front corner.
    for axis, ticks in (
        (ax.xaxis, _inner(*limits[0])),
        (ax.yaxis, _inner(*limits[1])),
        (ax.zaxis, shared.ticks(4)),
    ):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_pane_color((0.97, 0.97, 0.97, 1.0))
        axis._axinfo["grid"].update(linewidth=0.3, color="#cccccc")
        axis.line.set_linewidth(0.5)
    # Tick labels of the second axis stand beside it, those of the first below.
    for name, set_label, pad in zip(
        names, (ax.set_xlabel, ax.set_ylabel), (-10, -7.5), strict=True
    ):
        set_label(style.plain(name.partition(" (")[0]), fontsize=6, labelpad=pad)
    ax.set_zlabel("loss", fontsize=6, labelpad=-8)
    ax.zaxis.set_major_formatter(FuncFormatter(lambda v, _: shared.label(v)))
    ax.tick_params(axis="both", labelsize=6, pad=-4, width=0.4)
    longest = max((len(shared.label(t)) for t in shared.ticks(4)), default=2)
    ax.tick_params(axis="z", labelsize=6, pad=-2 + 1.1 * max(longest - 2, 0), width=0.4)


def _inner(low: float, high: float) -> list[float]:
    """Round places well inside a range."""
    margin = 0.12 * (high - low)
    return [float(p) for p in _round_places(low, high) if low + margin < p < high - margin]


def _round_places(low: float, high: float) -> list[float]:
    """Round places of a range, its ends among them where they are round."""
    slack = 1e-9 * (high - low)
    return [
        float(p)
        for p in MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low, high)
        if low - slack <= p <= high + slack
    ]


def _contours(
    ax, grid: Surface, fine: Fine, shared: Scale, limits, names: tuple[str, str], first: bool
) -> None:
    x, y, height = fine
    levels = np.linspace(shared.low, shared.high, 21)
    ax.contourf(
        x, y, height, levels=levels, cmap=style.COLORMAP, norm=Normalize(shared.low, shared.high)
    )
    ax.contour(
        x,
        y,
        height,
        levels=levels[1:-1],
        colors="white",
        linestyles="solid",
        linewidths=0.3,
        alpha=0.7,
    )
    ax.set(xlim=limits[0], ylim=limits[1], xlabel=style.plain(names[0]))
    _draw_marks(ax, grid.marks)
    if all(low <= 0 <= high for low, high in limits):
        ax.plot(0, 0, "+", color="black", markersize=9, markeredgewidth=2.6)
        ax.plot(0, 0, "+", color="white", markersize=8, markeredgewidth=1.1, label="weights")
    for axis, (low, high), sides in (
        (ax.xaxis, limits[0], ("left", "right")),
        (ax.yaxis, limits[1], ("bottom", "top")),
    ):
        ticks = _round_places(low, high)
        axis.set_ticks(
            ticks, [style.number(0.0 if abs(t) < 1e-9 * (high - low) else t) for t in ticks]
        )
        # Labels at the ends stay within the frame: outside, they would meet the neighbour's.
        for at, text in zip(ticks, axis.get_ticklabels(), strict=True):
            for end, way in zip((low, high), sides, strict=True):
                if abs(at - end) < 0.05 * (high - low):
                    text.set(**{"ha" if axis is ax.xaxis else "va": way})
    ax.xaxis.labelpad = ax.yaxis.labelpad = 1.5
    ax.spines[:].set_visible(True)
    if first:
        ax.set_ylabel(style.plain(names[1]))
    else:
        ax.tick_params(labelleft=False)


def _draw_marks(ax, marks: Marks) -> None:
    """The trajectory as a white line in a black halo, dots at its checkpoints, the first one large; squares for points."""
    line = marks.trajectory
    if len(line):
        ax.plot(
            line[:, 0],
            line[:, 1],
            color="white",
            path_effects=_HALO,
            solid_joinstyle="round",
            label="trajectory",
        )
        dots = line[
            np.unique(np.linspace(0, len(line) - 1, min(len(line), 12)).round().astype(int))
        ]
        ax.plot(
            dots[:, 0],
            dots[:, 1],
            "o",
            color="white",
            markersize=2.6,
            markeredgecolor="black",
            markeredgewidth=0.5,
            label="_checkpoints",
        )
        ax.plot(
            *line[0],
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
                line[place],
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


def _name(ax, place: np.ndarray, text: str, up: bool) -> None:
    """A name beside a place, on the side of it where there is room."""
    low, high = ax.get_xlim()
    share = (place[0] - low) / ((high - low) or 1.0)
    side = "left" if share < 0.3 else "right" if share > 0.7 else "center"
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


def _bar(fig: Figure, rect: tuple[float, float, float, float], shared: Scale) -> None:
    ax = fig.add_axes(rect, label="colours")
    bar = fig.colorbar(
        ScalarMappable(Normalize(shared.low, shared.high), matplotlib.colormaps[style.COLORMAP]),
        cax=ax,
        ticks=shared.ticks(6),
        extend="max" if shared.clip is not None else "neither",
        extendfrac=0.04,
        format=FuncFormatter(lambda v, _: shared.label(v)),
    )
    bar.outline.set_linewidth(0.5)
    bar.ax.yaxis.set_minor_locator(NullLocator())
    # Above the bar: beside it, the name would need room that long tick labels take.
    bar.ax.set_title(
        "loss",
        fontsize=7.5,
        pad=4 + (0.04 * 72 * 1.2 if shared.clip is not None else 0),
        loc="left",
    )
