"""The loss over a plane in weight space, around a checkpoint: L(w + x d1 + y d2).

Directions: the top two Hessian eigenvectors (Mendieta et al., CVPR 2022), filter-normalised random ones or the principal axes of
a trajectory (both Li et al., NeurIPS 2018), or the plane through three models (Garipov et al., NeurIPS 2018). The picture is that
of Lee et al., "FedSOL" (CVPR 2024), figure 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from fldiag.diagnostics.spectrum import eigenvalue_rows
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.landscape.directions import offsets, plane_axes, principal_axes, random_direction
from fldiag.plotting import style
from fldiag.plotting.style import is_wide
from fldiag.problem.hessian import eigenpairs
from fldiag.problem.problem import Problem
from fldiag.registry import diagnostic
from fldiag.results.table import (
    Note,
    Options,
    Row,
    SmallTable,
    Summary,
    format_number,
    number,
    only,
    table,
)
from fldiag.sections import Products, Seed, Tol

#: Points along an axis. Every fourth line is evaluated first, then every second, then all.
POINTS, STEPS = 41, (4, 2, 1)
#: More lines are evaluated only if the bicubic spline through those before misses one of ``CHECKS`` points between them by more
#: than ``RTOL`` of the range; where splines of first and second order differ most.
CHECKS, RTOL = 16, 0.01
#: Points of the drawn surface along an axis; checkpoints of a run that a trajectory shows at most.
FINE, LONGEST = 81, 50
#: The head of the page, whose policy lets nothing be fetched.
HEAD = (
    '<html lang="en"><head><meta charset="utf-8"><title>Loss landscape</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'\"></head>"
)
#: Directions -> what an axis is.
AXES = {"eigen": "eigenvector", "random": "random direction", "pca": "principal axis"}

# -- what is measured


def loss_at(shared: tuple[Problem, Tensor], place: tuple[float, float]) -> Row:
    """The row of the loss at w + x d1 + y d2; of many points computed side by side."""
    problem, axes = shared
    offset = torch.tensor(place, dtype=torch.float64).to(problem.device) @ axes
    value, stderr = problem.loss(problem.w.double() + offset)
    row: Row = {"metric": "loss", "estimator": "exact", "value": value, "stderr": stderr}
    return row | dict(zip("xy", place, strict=True))


def height_of(losses: np.ndarray, is_log: bool) -> np.ndarray:
    """Losses as they are drawn: themselves or their logarithms."""
    return np.log10(np.maximum(losses, 1e-300)) if is_log else losses


def spline(
    axis: np.ndarray, losses: np.ndarray, fine: np.ndarray, is_log: bool, degree: int = 3
) -> np.ndarray:
    """The heights at other places of a spline through losses.

    Where logarithms are drawn it goes through roots: near its minimum a loss is quadratic, and its logarithm is not.
    """
    from scipy.interpolate import RectBivariateSpline  # half a second

    values = np.sqrt(losses) if is_log else losses
    z = RectBivariateSpline(axis, axis, values, kx=degree, ky=degree)(fine, fine)
    return height_of(z**2, True) if is_log else z


def surface_rows(problem: Problem, axes: Tensor, axis: np.ndarray) -> list[Row]:
    """The losses where some lines of the grid cross, and how far the spline through them misses others."""
    known: dict[tuple[int, int], Row] = {}

    def evaluate(places: Sequence[tuple[int, int]]) -> np.ndarray:
        """The losses at places (index of x, of y)."""
        new = [place for place in places if place not in known]
        points = [(float(axis[i]), float(axis[j])) for i, j in new]
        name = "point {0[0]:g}, {0[1]:g}".format
        known.update(
            zip(new, workspace().map(loss_at, (problem, axes), points, name=name), strict=True)
        )
        return np.array([known[place]["value"] for place in places])

    rows: list[Row] = []
    for step in STEPS:
        lines = range(0, POINTS, step)
        places = [(i, j) for j in lines for i in lines]
        losses = evaluate(places).reshape(len(lines), -1)
        if step == 1 or not np.isfinite(losses).all():
            continue
        grid, is_log = (axis[::step], losses, axis[:: step // 2]), is_wide(losses)
        linear, square, cubic = (spline(*grid, is_log, degree) for degree in (1, 2, 3))
        at = np.unravel_index(np.argsort(-np.abs(square - linear), None)[:CHECKS], cubic.shape)
        checks = evaluate([(i * step // 2, j * step // 2) for j, i in zip(*at, strict=True)])
        misses = np.abs(height_of(checks, is_log) - cubic[at])
        miss = float(misses.max() / (np.ptp(height_of(losses, is_log)) or 1.0))
        if miss <= RTOL:
            about: Row = {"metric": "interpolation_error", "estimator": "spline", "index": CHECKS}
            rows.append({**about, "value": miss})
            break
    return rows + [known[place] for place in places]


def at_centre(rows: Sequence[Row], scored: Sequence[Row], **place: float) -> list[Row]:
    """Rows of losses at many weights; ``scored`` holds loss and accuracy of those at ``place``."""
    loss, *accuracy = scored
    centre = {"metric": "loss", **place}.items()
    return [
        *({**row, "inputs": loss["inputs"]} if centre <= row.items() else row for row in rows),
        *({**row, **place} for row in accuracy),
    ]


def trajectory(problems: Sequence[Problem]) -> list[Problem]:
    """The checkpoints of the run that a problem was opened from, or several problems, in the order of their rounds."""
    last, *others = problems
    if others or last.run is None:
        return sorted(problems, key=lambda p: p.labels.get("round") or 0)
    rounds = last.run.rounds
    places = np.linspace(0, len(rounds) - 1, min(len(rounds), LONGEST)).round().astype(int)
    stored = [last.run.checkpoint(rounds[i]) for i in places]
    return [last.at(c.state, labels={**last.labels, "round": c.round}) for c in stored]


def through(problems: Sequence[Problem], is_plane: bool) -> tuple[Problem, Tensor, list[Row]]:
    """Of the plane through models: the one at the origin, the axes, and rows of the models' places."""
    if len(problems) < 3 or (is_plane and len(problems) > 3):
        raise FldiagError(
            f"a trajectory needs at least three checkpoints, a plane three, and there are {len(problems)}",
            "give three files, or of a trajectory a run folder with more rounds (checkpoint.every)",
            usage=True,
        )
    origin, rows = problems[0 if is_plane else -1], list[Row]()
    points = offsets(problems, origin)
    if is_plane:
        axes = plane_axes(points[1:])
    else:
        axes, shares = principal_axes(points)
        about: Row = {"metric": "explained_variance", "estimator": "exact"}
        rows += [{**about, "index": i, "value": s} for i, s in enumerate(shares.tolist(), 1)]
    for i, (p, point) in enumerate(zip(problems, points, strict=True)):
        x, y = (axes @ point).tolist()
        value, stderr = p.loss() if is_plane else origin.loss(p.w)
        row: Row = {"index": i, "x": x, "y": y, "estimator": "exact"}
        row |= {"metric": "point" if is_plane else "trajectory", "round": p.labels.get("round")}
        rows.append({**row, "value": value, "stderr": stderr})
        away = float((point - (axes @ point) @ axes).norm())
        rows += [] if is_plane else [{**row, "metric": "projection_error", "value": away}]
    return origin, axes, rows


# -- what a person reads first


def summary(frame: pd.DataFrame, options: Options) -> Summary:
    """Sharpness at the centre, and how far the surface can be trusted."""
    rows: list[Row] = []
    for grid in surfaces(frame):
        about, miss = only(grid.rows, x=0, y=0), number(grid.rows, "interpolation_error")
        row: Row = {"checkpoint": grid.run, "loss": number(about, "loss"), **grid.numbers}
        row |= {f"of {POINTS**2:,} points": grid.losses.size}
        rows.append({**row, "largest miss, % of the range": None if miss is None else 100 * miss})
    yield SmallTable(rows, {name: name for name in rows[0]})
    if only(frame, metric="eigenvalue")["converged"].eq(False).any():
        yield Note("not all eigenvalues converged: raise --max-products")


# -- what is drawn


@dataclass(frozen=True)
class Surface:
    """A run's losses where its grid was evaluated: ``axis`` [m], ``losses`` [m, m] with rows y; and all rows of the run."""

    run: str
    axis: np.ndarray
    losses: np.ndarray
    rows: pd.DataFrame

    @property
    def numbers(self) -> dict[str, float]:
        """λ1 and its ratio, under the index that it has."""
        index = number(self.rows, "eigenvalue_ratio", column="index")
        ratio = f"λ₁/λ{chr(0x2080 + int(index or 0))}"
        metrics = {"λ₁": "eigenvalue", ratio: "eigenvalue_ratio"}
        found = {name: number(self.rows, metric) for name, metric in metrics.items()}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def caption(self) -> str:
        return ", ".join(f"{name} = {format_number(v, 3)}" for name, v in self.numbers.items())


def surfaces(frame: pd.DataFrame) -> list[Surface]:
    """The surfaces of a table, in their order."""
    result = []
    for run in dict.fromkeys(frame["run"]):
        rows = only(frame, run=run)
        points = only(rows, metric="loss").dropna(subset=["x", "y"])
        grid = points.pivot(index="y", columns="x", values="value")
        axis, losses = grid.columns.to_numpy(float), grid.to_numpy(float, na_value=np.nan)
        result.append(Surface(str(run), axis, losses, rows))
    return result


class Scale:
    """The heights that all surfaces share, from ``low`` to ``high``: losses or, where they span much, their logarithms.

    ``splines``: of each surface an axis of its own [f], and the spline through its losses there [f, f]. ``high`` is the largest
    height or, where a few corners explode, 1.5 times the 95th percentile, above the lowest.
    """

    def __init__(self, grids: Sequence[Surface]):
        losses = np.concatenate([grid.losses.ravel() for grid in grids])
        losses = losses[np.isfinite(losses)]
        if not len(losses):
            raise FldiagError("no loss of the landscape is finite", "choose a smaller --span")
        self.is_log = is_wide(losses)
        heights = height_of(losses, self.is_log)
        self.low, most, top = np.quantile(heights, (0, 0.95, 1)).tolist()
        self.high = self.low + (min(1.5 * (most - self.low), top - self.low) or 1.0)
        self.splines = []
        # a spline through higher losses would swing
        end = 2 * self.high - self.low
        for grid in grids:
            fine = np.linspace(grid.axis[0], grid.axis[-1], FINE)
            values = np.fmin(grid.losses, 10 ** min(end, 300) if self.is_log else end)
            z = spline(grid.axis, values, fine, self.is_log)
            self.splines.append((fine, np.clip(z, self.low, top)))

    def number(self, height: float, _: Any = None) -> str:
        """The loss of a height, as an axis shows it."""
        return f"{10**height if self.is_log else height:.2g}"


def names_of(frame: pd.DataFrame) -> list[str]:
    """What the two axes are."""
    name = AXES.get(frame.attrs.get("options", {}).get("directions"), "direction")
    return [f"{name} 1", f"{name} 2"]


def draw(frame: pd.DataFrame) -> style.Figure:
    """A column a run: its surface above its contours, the weights marked +, models as dots; one scale of heights and colours.

    Where a few corners explode, surface and contours end along a level line.
    """
    from matplotlib.ticker import MaxNLocator

    grids, names = surfaces(frame), names_of(frame)
    scale, count = Scale(grids), len(grids)
    side = min(2.2, (style.wide() - 1.2) / count - 0.2)
    with style.paper():
        width, height = count * (side + 0.2) + 1.2, 2 * side + 1.1
        fig = style.figure(width, height)
        fig.subplots_adjust(
            0.55 / width, 0.6 / height, 1 - 0.95 / width, 1 - 0.3 / height, 0.1, 0.2
        )
        for i, (grid, (fine, z)) in enumerate(zip(grids, scale.splines, strict=True)):
            above = fig.add_subplot(2, count, i + 1, projection="3d", zorder=-i)
            title = style.plain(style.shorten(grid.run, int(14 * side)))
            above.set_title(title, fontsize=8.5, weight="bold")
            _draw_surface(above, fine, z, scale, [*names, "loss" if i == count - 1 else ""])
            below = fig.add_subplot(2, count, count + i + 1)
            filled = _draw_contours(below, grid, fine, z, scale)
            below.set(xlabel=f"{names[0]}\n{grid.caption}", ylabel="" if i else names[1])
            below.tick_params(labelleft=not i)
        box = below.get_position()
        beside = fig.add_axes((1 - 0.82 / width, box.y0, 0.09 / width, box.height))
        look: dict[str, Any] = {"ticks": MaxNLocator(5), "format": scale.number}
        fig.colorbar(filled, beside, label="loss", **look)
    return fig


def _draw_surface(
    ax: Any, fine: np.ndarray, z: np.ndarray, scale: Scale, names: Sequence[str]
) -> None:
    from matplotlib.ticker import MaxNLocator
    from scipy.ndimage import minimum_filter

    # cells across the edge of the scale stay, cut flat: so the surface ends along a level line
    z = np.where(minimum_filter(z, 3) <= scale.high, np.minimum(z, scale.high), np.nan)
    colours = {"cmap": style.COLORMAP, "vmin": scale.low, "vmax": scale.high}
    # thousands of polygons show seams, and weigh much as vectors
    cells = {"rstride": 1, "cstride": 1, "antialiased": False, "rasterized": True}
    ax.plot_surface(*np.meshgrid(fine, fine), z, **colours, **cells, linewidth=0)
    ax.view_init(elev=26, azim=-57)
    ax.set_box_aspect((1, 1, 0.8), zoom=1.15)
    ax.patch.set_alpha(0)
    # the numbers of x and y stand at the contours
    ax.set(xticklabels=[], yticklabels=[], zlim=(scale.low, scale.high))
    ax.zaxis.set_major_locator(MaxNLocator(4))
    ax.zaxis.set_major_formatter(scale.number)
    ax.tick_params(labelsize=6, pad=-2)
    for axis, label, pad in zip("xyz", names, (-14, -14, -7), strict=True):
        getattr(ax, f"set_{axis}label")(label, fontsize=6, labelpad=pad)


def _draw_contours(
    ax: style.Axes, grid: Surface, fine: np.ndarray, z: np.ndarray, scale: Scale
) -> Any:
    levels = np.linspace(scale.low, scale.high, 21)
    filled = ax.contourf(fine, fine, z, levels=levels, cmap=style.COLORMAP)
    thin: dict[str, Any] = {"colors": "white", "linestyles": "solid", "linewidths": 0.3}
    ax.contour(fine, fine, z, levels=levels[1:], **thin, alpha=0.7)
    way, models = (
        only(grid.rows, metric=metric).sort_values("index")[["x", "y"]].to_numpy(float)
        for metric in ("trajectory", "point")
    )
    for colour, width, mark in (("black", 2.0, 2.6), ("white", 1.0, 1.1)):
        ax.plot(*way.T, color=colour, linewidth=width)
        ax.plot(0, 0, "+", color=colour, markersize=8, markeredgewidth=mark, zorder=3)
    ax.plot(*np.concatenate([way, models]).T, "wo", markeredgecolor="black", markersize=3)
    ax.locator_params(nbins=4, prune="both")
    ax.spines[:].set_visible(True)
    return filled


def page(frame: pd.DataFrame) -> str:
    """A page with the surfaces to turn and to hover over, which share heights and colours; it fetches nothing."""
    # a second, which a table from the store does not need
    from plotly.subplots import make_subplots

    grids = surfaces(frame)
    scale, count = Scale(grids), len(grids)
    titles = [escape(": ".join(filter(None, [grid.run, grid.caption]))) for grid in grids]
    fig = make_subplots(1, count, specs=[[{"type": "scene"}] * count], subplot_titles=titles)
    for column, (fine, z) in enumerate(scale.splines, start=1):
        z = z.clip(max=scale.high)
        fig.add_surface(x=fine, y=fine, z=z, row=1, col=column, coloraxis="coloraxis")
    x, y = names_of(frame)
    loss = "log₁₀ loss" if scale.is_log else "loss"
    heights = {"title_text": loss, "range": [scale.low, scale.high]}
    fig.update_scenes(xaxis_title_text=x, yaxis_title_text=y, zaxis=heights)
    colours = {"cmin": scale.low, "cmax": scale.high, "colorscale": style.COLORMAP.capitalize()}
    fig.update_layout(coloraxis=colours, template="none")
    surface = fig.to_html(full_html=False, div_id="landscape", config={"displaylogo": False})
    return f"<!doctype html>{HEAD}<body>{surface}</body></html>"


@diagnostic(
    "landscape",
    joint=lambda options: options["directions"] in ("plane", "pca"),
    draw={"": draw, ".html": page},
    summary=summary,
    example="checkpoints/example/fedsol-digits.pt",
)
def landscape(
    problem: Problem | Sequence[Problem],
    *,
    directions: Annotated[
        Literal["eigen", "random", "plane", "pca"],
        Field(
            description="Directions: eigen (top Hessian eigenvectors), random, plane (through three checkpoints) or pca "
            "(principal axes of a run's trajectory).",
        ),
    ] = "eigen",
    span: Annotated[
        float | None,
        Field(
            gt=0,
            le=1e30,
            description="Largest coefficient (default 1; of plane and pca all models and more).",
        ),
    ] = None,
    k: Annotated[int, Field(ge=2, description="Number of eigenvalues, with eigen directions.")] = 5,
    tol: Tol = 1e-3,
    max_products: Products = 100,
    seed: Seed = 0,
) -> pd.DataFrame:
    """Draw the loss surface around checkpoints, with λ1 and λ1/λk: picture, interactive page and table.

    Rows ``loss``: the mean loss at points w + x d1 + y d2 with standard errors over the examples, all of them evaluated;
    ``accuracy`` at the centre. ``directions``: ``eigen`` (unit vectors; adds the rows of the spectrum), ``random``
    (filter-normalised), ``plane`` (of three checkpoints; adds rows ``point``, each loss with its own buffers) or ``pca`` (of the
    checkpoints of a run, or of several; adds rows ``trajectory``, ``projection_error`` and ``explained_variance``). In the
    last two, coordinates are Euclidean distances, and the surface has the buffers of the weights at its centre everywhere.

    The grid has 41 x 41 points from -``span`` to ``span``. Every fourth line is evaluated first (11 x 11 points), then 16 points
    between them, where splines of first and second order differ most. If the bicubic spline misses one of these by more than
    1 % of the range (of the logarithm, where losses span more than a factor of 30), every second line is evaluated (21 x 21
    points), and likewise all. Row ``interpolation_error``: the largest miss of the 16 points as a share of the range; none where
    all points are evaluated.

    Cost: from 137 evaluations of the slice.

    Raises FldiagError for models that span no plane, or a loss at the weights that is not finite.
    """
    problems = [problem] if isinstance(problem, Problem) else list(problem)
    origin, rows, reach = problems[0], list[Row](), 0.8
    if directions == "eigen":
        options: dict[str, Any] = {"tol": tol, "max_products": max_products, "seed": seed}
        pairs = eigenpairs(origin, k, progress=workspace().show, **options)
        axes, rows = pairs.vectors[:2], eigenvalue_rows(origin, pairs, matrix="hessian")
        if len(axes) < 2:
            raise FldiagError("there is one eigenvector, and a landscape needs two", usage=True)
    elif directions == "random":
        axes = torch.stack([random_direction(origin, seed, i) for i in range(2)])
    else:
        is_plane = directions == "plane"
        models = problems if is_plane else trajectory(problems)
        origin, axes, rows = through(models, is_plane)
        reach = max(abs(row[c]) for row in rows for c in ("x", "y") if c in row)
    centre = origin.centre.rows(origin)
    axis = np.linspace(-1, 1, POINTS) * (span or 1.25 * reach or 1.0)
    losses = surface_rows(origin, axes, axis)
    return table([*at_centre(losses, centre, x=0.0, y=0.0), *rows], **origin.common)
