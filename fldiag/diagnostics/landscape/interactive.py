"""The landscape to turn and to hover over: a surface and its map for every run, on one scale."""

from __future__ import annotations

import math
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.colors import to_hex

from fldiag.diagnostics.landscape.surfaces import Scale, Surface, scale, surfaces
from fldiag.plotting import style
from fldiag.plotting.pages import Chart, Interactive, Table, literal


def charts(
    table: pd.DataFrame,
    *,
    title: str = "Loss landscape",
    names: tuple[str, str] = ("direction 1", "direction 2"),
) -> Interactive:
    """The landscapes of ``table`` (see ``picture.draw``) to turn, and as contours.

    Hovering tells x, y, loss and its standard error, also where the surface is clipped. Raises FldiagError for an unfit table.
    """
    grids = surfaces(table)
    shared = scale(grids)
    about = layout(grids, shared, names)
    panels = []
    for grid in grids:
        surface, points = scene(grid, shared), marks(grid, shared)
        panels.append(Chart(grid.run, "scene", [surface, *points], about))
        flat = [_contours(surface, shared), *map(_flat, points)]
        panels.append(Chart(f"{grid.run}, as contours", "map", flat, _flat_layout(about)))
    lead = "Drag to turn, scroll or pinch to zoom: all surfaces move together. Height and colour scale are shared."
    return Interactive(title, lead, panels, shared.notes(), _numbers(grids))


def _numbers(grids: list[Surface]) -> Table:
    head = (
        "Run",
        "Slice",
        "Examples",
        "λ₁",
        "± residual",
        "Ratio",
        "Loss at the centre",
        "Lowest",
        "Highest",
        "Grid",
        "How",
    )
    rows = [
        [
            grid.run,
            grid.slice or "–",
            "–" if grid.n is None else f"{grid.n:,}",
            style.number(grid.sharpness) + ("" if grid.converged else " (not converged)"),
            style.number(grid.residual, 2),
            "–" if grid.ratio is None else f"{grid.ratio_name} = {style.number(grid.ratio)}",
            style.number(grid.centre),
            style.number(grid.lowest),
            style.number(grid.highest),
            f"{len(grid.x)} × {len(grid.y)}",
            " ".join(grid.interpolation()) or "all points evaluated",
        ]
        for grid in grids
    ]
    caption = (
        "λ₁: largest Hessian eigenvalue ± residual. Loss at the centre: the weights themselves."
    )
    return Table(caption, head, rows)


def _contours(surface: dict[str, Any], shared: Scale) -> dict[str, Any]:
    """The numbers and colours of a surface, seen from above."""
    ticks = shared.ticks(5)
    same = {k: surface[k] for k in ("x", "y", "z", "colorscale", "text")}
    return {
        **same,
        "type": "contour",
        "zmin": shared.low,
        "zmax": shared.high,
        "hoverinfo": "text",
        "line": {"color": "rgba(255, 255, 255, 0.5)", "width": 0.5},
        "contours": {
            "coloring": "fill",
            "start": shared.low,
            "end": shared.high,
            "size": (shared.high - shared.low) / 20,
        },
        "colorbar": {
            "title": {"text": "loss"},
            "thickness": 12,
            "outlinewidth": 0,
            "tickvals": ticks,
            "ticktext": [shared.label(t) for t in ticks],
        },
    }


def _flat(points: dict[str, Any]) -> dict[str, Any]:
    return {
        **{k: points[k] for k in ("mode", "x", "y", "text", "hoverinfo", "showlegend")},
        "type": "scatter",
        "line": {"color": "#000000"},
        "marker": {"color": "#ffffff", "line": {"color": "#000000", "width": 1}},
    }


def _flat_layout(about: dict[str, Any]) -> dict[str, Any]:
    axes = {
        name: {
            "title": about["scene"][name]["title"],
            "range": about["scene"][name]["range"],
            "zeroline": False,
            "automargin": True,
        }
        for name in ("xaxis", "yaxis")
    }
    return {**axes, "margin": {"l": 48, "r": 8, "t": 30, "b": 44}, "showlegend": False}


def scene(grid: Surface, shared: Scale) -> dict[str, Any]:
    """One plotly surface trace, coloured by its height; its hover text holds numbers only."""
    hover = [
        [
            f"x {x:.4g}<br>y {y:.4g}<br>loss {loss:.6g}<br>stderr {'unknown' if math.isnan(err) else f'{err:.2g}'}"
            for x, loss, err in zip(grid.x, losses, errors, strict=True)
        ]
        for y, losses, errors in zip(grid.y, grid.loss, grid.stderr, strict=True)
    ]
    heights = [
        [None if math.isnan(v) else v for v in row] for row in shared.height(grid.loss).tolist()
    ]
    colours = [
        [i / 32, to_hex(c)]
        for i, c in enumerate(matplotlib.colormaps[style.COLORMAP](np.linspace(0, 1, 33)))
    ]
    return {
        "type": "surface",
        "x": grid.x.tolist(),
        "y": grid.y.tolist(),
        "z": heights,
        "cmin": shared.low,
        "cmax": shared.high,
        "text": hover,
        "hoverinfo": "text",
        "showscale": False,
        "colorscale": colours,
        "opacity": 1.0,
        # Little shading, or the colours would no longer be those of the bar.
        "lighting": {"ambient": 0.85, "diffuse": 0.25, "specular": 0.02, "roughness": 0.9},
        "contours": {"z": {"highlightcolor": "#ffffff"}},
    }


def marks(grid: Surface, shared: Scale) -> list[dict[str, Any]]:
    """The trajectory and single weight sets as plotly traces that lie on the surface."""
    traces = []
    for places, mode, texts in (
        (grid.marks.trajectory, "lines+markers", grid.marks.texts),
        (grid.marks.points, "markers", ["checkpoint"] * len(grid.marks.points)),
    ):
        heights = shared.height(grid.height_at(places)) + 0.004 * (shared.high - shared.low)
        if not np.isfinite(heights).any():
            continue
        traces.append(
            {
                "type": "scatter3d",
                "mode": mode,
                "hoverinfo": "text",
                "text": list(texts),
                "showlegend": False,
                "x": [float(v) for v in places[:, 0]],
                "y": [float(v) for v in places[:, 1]],
                "z": [float(v) if math.isfinite(v) else None for v in heights],
                "line": {"color": "#000000", "width": 5},
                "marker": {
                    "color": "#ffffff",
                    "size": 3.5,
                    "line": {"color": "#000000", "width": 1},
                },
            }
        )
    return traces


def layout(grids: list[Surface], shared: Scale, names: tuple[str, str]) -> dict[str, Any]:
    ticks = shared.ticks(5)
    span = [
        [min(getattr(g, a)[0] for g in grids), max(getattr(g, a)[-1] for g in grids)] for a in "xy"
    ]
    return {
        "scene": {
            "xaxis": {
                "title": {"text": literal(names[0])},
                "range": [float(v) for v in span[0]],
                "nticks": 5,
            },
            "yaxis": {
                "title": {"text": literal(names[1])},
                "range": [float(v) for v in span[1]],
                "nticks": 5,
            },
            "zaxis": {
                "title": {"text": "loss"},
                "range": [shared.low, shared.high],
                "tickvals": ticks,
                "ticktext": [shared.label(t) for t in ticks],
            },
            "aspectmode": "manual",
            "aspectratio": {"x": 1, "y": 1, "z": 0.8},
            "camera": {
                "eye": {"x": 1.25, "y": -1.75, "z": 1.0},
                "center": {"x": 0, "y": 0, "z": -0.12},
            },
        },
        "margin": {"l": 0, "r": 0, "t": 0, "b": 0},
        "dragmode": "turntable",
    }
