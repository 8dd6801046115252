"""The interactive landscape: one HTML file that needs no network, one scene a run, cameras moving together."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.colors import to_hex

from fldiag.diagnostics.landscape.surfaces import Scale, Surface, scale, surfaces
from fldiag.plotting import pages, style
from fldiag.plotting.sections import literal


def page(
    table: pd.DataFrame,
    *,
    title: str = "Loss landscape",
    clip: float | Literal["auto"] | None = "auto",
    height: Literal["linear", "log", "auto"] = "auto",
    names: tuple[str, str] = ("direction 1", "direction 2"),
) -> str:
    """The landscapes of ``table`` (see ``picture.draw``) as the text of a self-contained page.

    plotly is inside the file. Hovering tells x, y, loss and its standard error, also where the surface is
    clipped. Text from the table reaches the page only escaped. Raises FldiagError for an unfit table.
    """
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    grids = surfaces(table)
    shared = scale(grids, clip, height)
    home = resources.files("fldiag.diagnostics.landscape")
    plotly, script = get_plotlyjs(), pages.unpacking() + (home / "landscape.js").read_text("utf-8")
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string((home / "landscape.html").read_text("utf-8"))
    data = {
        "scenes": [scene(g, shared) for g in grids],
        "marks": [marks(g, shared) for g in grids],
        "layout": layout(grids, shared, names),
    }
    return template.render(
        title=title,
        grids=grids,
        number=style.number,
        notes=shared.notes(),
        policy=pages.policy(plotly, script),
        plotly=pages.packed_plotly(),
        script=script,
        data=_inert(data),
        stops=", ".join(
            to_hex(c) for c in matplotlib.colormaps[style.COLORMAP](np.linspace(0, 1, 17))
        ),
        ticks=[
            (100 * (t - shared.low) / (shared.high - shared.low), shared.label(t))
            for t in shared.ticks(5)
        ],
    )


def scene(grid: Surface, shared: Scale) -> dict[str, Any]:
    """One plotly surface trace, coloured by its height; its hover text holds numbers only."""
    import plotly.graph_objects as go

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
    trace = go.Surface(
        x=grid.x.tolist(),
        y=grid.y.tolist(),
        z=heights,
        cmin=shared.low,
        cmax=shared.high,
        hoverinfo="text",
        showscale=False,
        colorscale=colours,
        opacity=1.0,
        # Little shading, or the colours would no longer be those of the bar.
        lighting={"ambient": 0.85, "diffuse": 0.25, "specular": 0.02, "roughness": 0.9},
        contours={"z": {"highlightcolor": "#ffffff"}},
    ).to_plotly_json()
    return {
        **trace,
        "text": hover,
    }  # plotly's Python side would turn each row of texts into one text


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
        "autosize": True,
        "dragmode": "turntable",
    }


def _inert(data: Any):
    """JSON that cannot end the script element it stands in, marked as safe for the template."""
    from markupsafe import Markup

    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
