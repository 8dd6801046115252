"""The loss over a plane in weight space, around a checkpoint: L(w + x d1 + y d2).

Directions: the top two Hessian eigenvectors (Mendieta et al., CVPR 2022), filter-normalised random ones or the principal axes of
a trajectory (both Li et al., NeurIPS 2018), or the plane through three models (Garipov et al., NeurIPS 2018). The picture is that
of Lee et al., "FedSOL" (CVPR 2024), figure 8.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from pydantic import Field
from scipy.interpolate import RectBivariateSpline
from scipy.ndimage import minimum_filter
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.landscape.directions import offsets, plane_axes, principal_axes, random_direction
from fldiag.plotting import style
from fldiag.plotting.pages import Chart, Section, literal
from fldiag.problem.eigenpairs import eigenpairs, eigenvalue_rows
from fldiag.problem.problem import Problem
from fldiag.registry import diagnostic
from fldiag.results.select import number, only
from fldiag.results.standing import at_centre
from fldiag.results.summary import Item, Note, Say, Small
from fldiag.results.table import Row, table
from fldiag.seeding import numpy_rng

#: Points along an axis, and every how many of them are evaluated: the next level only if the spline through the one before
#: misses one of ``CHECKS`` points by more than ``RTOL`` of the range.
POINTS, LEVELS, CHECKS, RTOL = 41, (4, 2, 1), 16, 0.005
#: A loss that spans more than this factor is drawn as its logarithm.
WIDE = 30
#: Points of the drawn surface along an axis; checkpoints of a run that a trajectory shows at most; surfaces in a row.
FINE, LONGEST, PER_ROW = 161, 50, 4
#: Directions -> what the two axes are.
AXES = {
    "eigen": ("eigenvector 1", "eigenvector 2"),
    "random": ("random direction 1", "random direction 2"),
    "plane": ("towards checkpoint 2", "at right angles, to checkpoint 3"),
    "pca": ("principal axis 1", "principal axis 2"),
}
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
SUMMARY = {
    "run": "checkpoint",
    "slice": "slice",
    "n": "n",
    "loss": "loss",
    "lambda_1": "λ1",
    "residual": "± (residual)",
    "converged": "converged",
}

# -- what is measured


def loss_at(shared: tuple[Problem, Tensor], place: tuple[float, float]) -> tuple[float, Any]:
    """Loss and standard error at w + x d1 + y d2; of many points computed side by side."""
    problem, axes = shared
    offset = torch.tensor(place, dtype=torch.float64).to(problem.device) @ axes
    scores = problem.scores(problem.w.double() + offset)
    return scores.loss, scores.stderr


def is_wide(losses: np.ndarray) -> bool:
    """Whether losses span so much that their logarithm is drawn."""
    return bool(losses.min() > 0 and losses.max() > WIDE * losses.min())


def surface_rows(problem: Problem, axes: Tensor, axis: np.ndarray, seed: int) -> list[Row]:
    """The losses at a nested subset of the grid, and how far the spline through it misses others."""
    values: dict[tuple[int, int], tuple[float, Any]] = {}
    miss: float | None = None

    def evaluate(places: Sequence[tuple[int, int]]) -> np.ndarray:
        new = [place for place in places if place not in values]
        points = [(float(axis[i]), float(axis[j])) for i, j in new]
        losses = workspace().map(
            loss_at, (problem, axes), points, name="point {0[0]:g}, {0[1]:g}".format
        )
        values.update(zip(new, losses, strict=True))
        return np.array([values[place][0] for place in places])

    for level, finer in zip(LEVELS, [*LEVELS[1:], 0], strict=True):
        index = list(range(0, POINTS, level))
        losses = evaluate([(i, j) for j in index for i in index]).reshape(len(index), -1)
        miss = None
        if not finer or not np.isfinite(losses).all():
            continue
        inner = [(i, j) for j in range(0, POINTS, finer) for i in range(0, POINTS, finer)]
        others = [place for place in inner if place not in values]
        draws = numpy_rng(seed, "points to check a spline at", level).choice(
            len(others), CHECKS, replace=False
        )
        chosen = [others[i] for i in draws]
        height = np.log if is_wide(losses) else np.positive
        expected = RectBivariateSpline(axis[index], axis[index], height(losses)).ev(
            *(axis[[place[k] for place in chosen]] for k in (1, 0))
        )
        errors = np.abs(height(np.maximum(evaluate(chosen), 1e-300)) - expected)
        miss = float(errors.max() / (np.ptp(height(losses)) or 1.0))
        if miss <= RTOL:
            break
    rows: list[Row] = [
        {"x": float(axis[i]), "y": float(axis[j]), "value": value, "stderr": stderr}
        for (i, j), (value, stderr) in values.items()
    ]
    rows = [{"metric": "loss", "estimator": "exact", **row} for row in rows]
    error: Row = {"metric": "interpolation_error", "estimator": "spline", "value": miss}
    return rows if miss is None else [*rows, {**error, "index": CHECKS}]


def trajectory(problems: Sequence[Problem]) -> list[Problem]:
    """The checkpoints of the run that a problem was opened from, or several problems, in the order of their rounds.

    Raises FldiagError for fewer than three, which have no plane of their own.
    """
    problems = list(problems)
    if len(problems) == 1 and problems[0].run is not None:
        (last,), run = problems, problems[0].run
        places = np.linspace(0, len(run.rounds) - 1, min(len(run.rounds), LONGEST)).round()
        stored = [run.checkpoint(run.rounds[int(i)]) for i in places]
        problems = [last.at(c.state, labels={**last.labels, "round": c.round}) for c in stored]
    numbers = [p.labels.get("round") for p in problems]
    if None not in numbers and len(set(numbers)) == len(numbers):
        problems.sort(key=lambda p: p.labels["round"])
    if len(problems) < 3:
        raise FldiagError(
            f"a trajectory needs at least three checkpoints, and there are {len(problems)}",
            "give a run folder with more rounds (checkpoint.every), or more files",
            usage=True,
        )
    return problems


def through(problems: Sequence[Problem], kind: str) -> tuple[Problem, Tensor, list[Row], float]:
    """Of the plane through models: the one at the origin, the axes, rows of the models' places, and the farthest coordinate."""
    is_plane = kind == "plane"
    if is_plane and len(problems) != 3:
        raise FldiagError(
            f"a plane goes through three checkpoints, and there are {len(problems)}",
            "give three",
            usage=True,
        )
    problems = problems if is_plane else trajectory(problems)
    origin = problems[0 if is_plane else -1]
    points = offsets(problems, origin)
    rows: list[Row] = []
    if is_plane:
        axes = plane_axes(points[1:])
    else:
        axes, shares = principal_axes(points)
        about: Row = {"metric": "explained_variance", "estimator": "exact"}
        rows = [{**about, "index": i + 1, "value": float(s)} for i, s in enumerate(shares)]
    places = points @ axes.T
    for i, (p, point, place) in enumerate(zip(problems, points, places, strict=True)):
        scores = p.scores() if is_plane else origin.scores(p.w)
        x, y = place.tolist()
        common: Row = {"index": i, "x": x, "y": y, "estimator": "exact"}
        common |= {} if is_plane else {"round": p.labels.get("round")}
        row: Row = {"metric": "point" if is_plane else "trajectory", "value": scores.loss}
        rows.append({**common, **row, "stderr": scores.stderr})
        if not is_plane:
            away = float((point - place @ axes).norm())
            rows.append({**common, "metric": "projection_error", "value": away})
    if origin.buffers:
        which = "first" if is_plane else "last"
        warnings.warn(
            f"the surface has the buffers of the {which} checkpoint everywhere", stacklevel=3
        )
    return origin, axes, rows, float(places.abs().max())


# -- what a person reads first


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """Sharpness at the centre, and how far the surface can be trusted."""
    parts = {str(run): part for run, part in frame.groupby("run", sort=False)}
    rows, columns = [], dict(SUMMARY)
    for run, part in parts.items():
        centre = only(part, metric="loss", x=0, y=0)
        row: Row = {"run": run, "slice": centre["slice"].iloc[0], "loss": number(centre)}
        row["n"] = int(centre["n_examples"].iloc[0])
        for name, metric, column in (
            ("lambda_1", "eigenvalue", "value"),
            ("residual", "eigenvalue", "residual"),
        ):
            row[name] = number(part, metric, index=1, column=column)
        if row["lambda_1"] is not None:
            row["converged"] = bool(only(part, metric="eigenvalue")["converged"].all())
        ratio, k = (number(part, "eigenvalue_ratio", column=c) for c in ("value", "index"))
        if ratio is not None:
            row["ratio"], columns["ratio"] = ratio, f"λ1/λ{k:.0f}"
        rows.append(row)
    yield Small(rows, columns)
    for run, part in parts.items():
        lead = f"{run}: " if len(parts) > 1 else ""
        count, miss = len(only(part, metric="loss")), number(part, "interpolation_error")
        if miss is not None:
            yield Say(
                f"{lead}{count:,} of {POINTS**2:,} points evaluated; the spline through them misses {CHECKS} others by at most "
                f"{100 * miss:.2g} % of the range"
            )
        values = only(part, metric="eigenvalue").sort_values("index")
        floor = values["residual"].clip(lower=1e-6 * values["value"].abs().max())
        for i in values.loc[values["value"].abs() <= floor, "index"]:
            if i <= 2:
                yield Note(
                    f"{lead}eigenvalue {i} is zero within its error: its direction is arbitrary"
                )
        shares = only(part, metric="explained_variance")["value"]
        if len(shares):
            away = only(part, metric="projection_error")["value"].max()
            yield Say(
                f"{lead}the plane explains {100 * shares.sum():.1f} % of the variance of "
                f"{len(only(part, metric='trajectory')):,} checkpoints; the farthest is {away:.3g} away from it"
            )


# -- what is drawn


@dataclass(frozen=True)
class Surface:
    """The evaluated part of a run's grid: ``axis`` [m] and ``losses`` [m, m], rows are y; and the run's other rows."""

    run: str
    axis: np.ndarray
    losses: np.ndarray
    rows: pd.DataFrame

    def numbers(self) -> str:
        """λ1 and its ratio, by the index that it has."""
        top = number(self.rows, "eigenvalue", index=1)
        ratio, k = (number(self.rows, "eigenvalue_ratio", column=c) for c in ("value", "index"))
        texts = [] if top is None else [f"λ₁ = {style.number(top, 3)}"]
        if ratio is not None:
            texts.append(f"λ₁/λ{str(int(k or 0)).translate(SUBSCRIPTS)} = {style.number(ratio, 3)}")
        return ", ".join(texts)


def surfaces(frame: pd.DataFrame) -> list[Surface]:
    """The surfaces of a table, in their order. Raises FldiagError for one that is no landscape."""
    result = []
    for run in dict.fromkeys(frame["run"]):
        rows = only(frame, run=run)
        points = only(rows, metric="loss").dropna(subset=["x", "y"])
        span = points["x"].abs().max()
        places = (points[["y", "x"]].to_numpy(float) / span + 1) * (POINTS // 2)
        grid, mask = np.full((POINTS, POINTS), np.nan), np.zeros((POINTS, POINTS), bool)
        index = tuple(places.round().astype(int).T)
        grid[index], mask[index] = points["value"].to_numpy(float), True
        for level in reversed(LEVELS):
            if mask[::level, ::level].all():
                axis = np.linspace(-span, span, POINTS)[::level]
                result.append(Surface(str(run), axis, grid[::level, ::level], rows))
                break
        else:
            raise FldiagError(f"run {run!r} has no whole grid of losses", "compute it again")
    return result


@dataclass(frozen=True)
class Scale:
    """The heights that all surfaces share: losses or, where they span much, their logarithms, from ``low`` to ``high``.

    ``high`` is the largest, unless a few corners explode: then 1.5 times the 95th percentile, above the lowest.
    """

    is_log: bool
    low: float
    high: float
    is_cut: bool

    @staticmethod
    def of(grids: Sequence[Surface]) -> Scale:
        """Raises FldiagError where no loss is finite."""
        losses = np.concatenate([g.losses.ravel() for g in grids])
        losses = losses[np.isfinite(losses)]
        if not len(losses):
            raise FldiagError("no loss of the landscape is finite", "choose a smaller --span")
        is_log = is_wide(losses)
        heights = np.log10(losses) if is_log else losses
        low, high = float(heights.min()), float(heights.max())
        limit = low + 1.5 * float(np.quantile(heights, 0.95) - low)
        is_cut = low < limit < high or len(losses) < sum(g.losses.size for g in grids)
        top = min(limit, high) if is_cut else high
        return Scale(is_log, low, max(top, low + 1e-6 * (1 + abs(low))), is_cut)  # also a flat one

    def heights(self, grid: Surface) -> tuple[np.ndarray, np.ndarray]:
        """A fine axis, and the heights of the spline on it."""
        finite = np.isfinite(grid.losses)
        losses = np.where(finite, grid.losses, grid.losses[finite].max())
        heights = np.log10(losses) if self.is_log else losses
        fine = np.linspace(grid.axis[0], grid.axis[-1], FINE)
        return fine, np.maximum(
            RectBivariateSpline(grid.axis, grid.axis, heights)(fine, fine), self.low
        )

    def ticks(self, count: int) -> list[float]:
        """Round heights within the scale."""
        if self.is_log:
            powers = np.arange(np.floor(self.low), np.ceil(self.high) + 1)
            digits = (1, 2, 5) if self.high - self.low < 1.5 else (1, 3)
            ticks = np.array([p + np.log10(d) for p in powers for d in digits])
        else:
            ticks = np.asarray(MaxNLocator(count).tick_values(self.low, self.high))
        return [float(t) for t in ticks if self.low <= t <= self.high]

    def label(self, height: float) -> str:
        return style.number(10**height if self.is_log else height, 3)


def names_of(frame: pd.DataFrame) -> tuple[str, str]:
    """What the two axes are; principal axes with the share of the variance that they explain."""
    directions = frame.attrs.get("options", {}).get("directions")
    names = AXES.get(directions, ("direction 1", "direction 2"))
    first, second = (number(frame, "explained_variance", index=i) for i in (1, 2))
    if directions != "pca" or first is None or second is None:
        return names
    return f"{names[0]} ({100 * first:.0f} % of variance)", f"{names[1]} ({100 * second:.0f} %)"


def draw(frame: pd.DataFrame) -> Figure:
    """A column a run: its surface above its contours, the weights marked +, models as dots; one scale of heights and colours.

    Where a few corners explode, surface and contours end along a level line.
    """
    grids = surfaces(frame)
    scale, names = Scale.of(grids), names_of(frame)
    columns = min(len(grids), PER_ROW)
    blocks = -(-len(grids) // columns)
    width = style.wide()
    side = min(2.2, (width - 1.2) / columns - 0.15)
    with style.paper():
        height = blocks * (2 * side + 1.0)
        fig = style.figure(columns * (side + 0.15) + 1.2, height)
        norm, colours = Normalize(scale.low, scale.high), matplotlib.colormaps[style.COLORMAP]

        def place(left: float, top: float, w: float, h: float) -> tuple[float, float, float, float]:
            total = fig.get_figwidth()
            return left / total, (height - top - h) / height, w / total, h / height

        for i, grid in enumerate(grids):
            left = 0.55 + (i % columns) * (side + 0.15)
            top = (i // columns) * (2 * side + 1.0)
            title = "\n".join(style.wrap(style.plain(grid.run), side, 2, 9.5))
            middle = (left + side / 2) / fig.get_figwidth()
            under = 1 - np.array([top + 0.05, top + 2 * side + 0.72]) / height
            text: dict[str, Any] = {"ha": "center", "va": "top"}
            fig.text(middle, under[0], title, **text, fontsize=8.5, weight="bold")
            fig.text(middle, under[1], grid.numbers(), **text, fontsize=7)
            fine, heights = scale.heights(grid)
            above = fig.add_axes(place(left - 0.1, top + 0.2, side + 0.2, side), projection="3d")
            above.set_zorder(-i)  # tick labels lie over the next one's empty edge
            _draw_surface(above, fine, heights, scale, norm, names)
            below = fig.add_axes(place(left, top + side + 0.3, side, side))
            _draw_contours(below, grid, fine, heights, scale, names)
            if i % columns:
                below.set(ylabel="", yticklabels=[])
        bar = fig.add_axes(place(fig.get_figwidth() - 0.5, side + 0.3, 0.09, side))
        labels = FuncFormatter(lambda height, _: scale.label(height))
        fig.colorbar(ScalarMappable(norm, colours), cax=bar, ticks=scale.ticks(6), format=labels)
        bar.set_title("loss", fontsize=7.5, loc="left")
    return fig


def _draw_surface(
    ax: Any,
    fine: np.ndarray,
    heights: np.ndarray,
    scale: Scale,
    norm: Normalize,
    names: tuple[str, str],
) -> None:
    # cells across the edge of the scale stay, cut flat: so the surface ends along a level line
    inside = (
        minimum_filter(heights, 3) < scale.high if scale.is_cut else np.full(heights.shape, True)
    )
    z = np.where(inside, np.minimum(heights, scale.high), np.nan)
    options = {"cmap": style.COLORMAP, "norm": norm, "linewidth": 0, "antialiased": False}
    mesh = ax.plot_surface(*np.meshgrid(fine, fine), z, rstride=1, cstride=1, **options)
    mesh.set_rasterized(True)  # thousands of polygons show seams, and weigh much as vectors
    ax.set(zlim=(scale.low, scale.high), xlim=fine[[0, -1]], ylim=fine[[0, -1]])
    ax.set_box_aspect((1, 1, 0.8), zoom=0.95)
    ax.view_init(elev=26, azim=-57)
    ax.patch.set_alpha(0)
    inner = [
        float(t) for t in MaxNLocator(4).tick_values(*fine[[0, -1]]) if abs(t) < 0.76 * fine[-1]
    ]
    is_small = ax.get_window_extent().width < 1.5 * ax.figure.dpi  # the contours below say the same
    inner, heights_said = ([], []) if is_small else (inner, scale.ticks(4))
    ax.set(xticks=inner, yticks=inner, zticks=heights_said)
    for axis in (ax.xaxis, ax.yaxis, ax.zaxis):
        axis.set_pane_color((0.97, 0.97, 0.97, 1.0))
        axis._axinfo["grid"].update(linewidth=0.3, color="#cccccc")
        axis.line.set_linewidth(0.5)
    short = ["" if is_small else style.plain(name.partition(" (")[0]) for name in names]
    for set_label, name, pad in zip(
        (ax.set_xlabel, ax.set_ylabel, ax.set_zlabel),
        (*short, "" if is_small else "loss"),
        (-10, -8, -8),
        strict=True,
    ):
        set_label(name, fontsize=6, labelpad=pad)
    ax.zaxis.set_major_formatter(FuncFormatter(lambda height, _: scale.label(height)))
    ax.tick_params(axis="both", labelsize=6, pad=-4, width=0.4)
    ax.tick_params(axis="z", labelsize=6, pad=-2, width=0.4)


def _draw_contours(
    ax: Any,
    grid: Surface,
    fine: np.ndarray,
    heights: np.ndarray,
    scale: Scale,
    names: tuple[str, str],
) -> None:
    levels = np.linspace(scale.low, scale.high, 21)
    heights = heights if scale.is_cut else np.minimum(heights, scale.high)
    ax.contourf(fine, fine, heights, levels=levels, cmap=style.COLORMAP)
    thin = {"colors": "white", "linestyles": "solid", "linewidths": 0.3, "alpha": 0.7}
    ax.contour(fine, fine, heights, levels=levels[1:-1], **thin)
    dots = {"color": "white", "markeredgecolor": "black", "markeredgewidth": 0.6, "markersize": 3}
    for metric, line in (("trajectory", "-"), ("point", "none")):
        models = only(grid.rows, metric=metric).sort_values("index")
        x, y = (models[c].to_numpy(float) for c in ("x", "y"))
        ax.plot(x, y, linestyle=line, color="black", linewidth=2)
        ax.plot(x, y, "o", linestyle=line, linewidth=1, **dots)
        ends = ((0, 1, "start"), (-1, -2, "end"))
        for i, j, text in ends if metric == "trajectory" and len(x) > 1 else ():
            across, up = -np.sign(x[i]) or -1, 1 if y[i] > y[j] else -1  # inwards, and off the line
            shift = {"textcoords": "offset points", "xytext": (6 * across, 6 * up), "fontsize": 6.5}
            sides = {"ha": "right" if across < 0 else "left", "va": "bottom" if up > 0 else "top"}
            ax.annotate(text, (x[i], y[i]), color="white", **shift, **sides)
    ax.plot(0, 0, "+", color="black", markersize=9, markeredgewidth=2.6)
    ax.plot(0, 0, "+", color="white", markersize=8, markeredgewidth=1.1)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(4, prune="both"))
    ax.set(xlabel=style.plain(names[0]), ylabel=style.plain(names[1]))
    ax.xaxis.labelpad = ax.yaxis.labelpad = 1.5
    ax.spines[:].set_visible(True)


def page(frame: pd.DataFrame) -> Section:
    """The surfaces to turn and to hover over: all move together, and share heights and colours."""
    grids = surfaces(frame)
    scale, names, charts = Scale.of(grids), names_of(frame), []
    ticks = scale.ticks(5)
    marks = {"tickvals": ticks, "ticktext": [scale.label(t) for t in ticks]}
    colours = matplotlib.colormaps[style.COLORMAP](np.linspace(0, 1, 33))
    layout = {
        "scene": {
            "xaxis": {"title": {"text": literal(names[0])}},
            "yaxis": {"title": {"text": literal(names[1])}},
            "zaxis": {"title": {"text": "loss"}, "range": [scale.low, scale.high], **marks},
            "aspectratio": {"x": 1, "y": 1, "z": 0.8},
        },
        "margin": {"l": 0, "r": 0, "t": 0, "b": 0},
    }
    for grid in grids:
        fine, heights = (t[::2] for t in scale.heights(grid))
        heights = heights[:, ::2]
        losses = 10**heights if scale.is_log else heights
        trace = {
            "type": "surface",
            "x": fine.tolist(),
            "y": fine.tolist(),
            "z": np.minimum(heights, scale.high).tolist(),
            "cmin": scale.low,
            "cmax": scale.high,
            "text": [[f"loss {v:.4g}" for v in row] for row in losses],
            "hoverinfo": "x+y+text",
            "colorscale": [[i / 32, to_hex(c)] for i, c in enumerate(colours)],
            "colorbar": {"title": {"text": "loss"}, "thickness": 12, **marks},
        }
        caption = ": ".join(filter(None, [grid.run, grid.numbers()]))
        charts.append(Chart(caption, [trace], layout))
    lead = (
        "Drag to turn, scroll or pinch to zoom. Surfaces are splines through the evaluated points."
    )
    return Section("landscape", "Loss landscape", lead, charts=charts)


@diagnostic(
    "landscape",
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
            json_schema_extra={"joint": ["plane", "pca"]},
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
    tol: Annotated[
        float, Field(gt=0, lt=1, description="Allowed relative error of each eigenvalue.")
    ] = 1e-3,
    max_products: Annotated[
        int,
        Field(ge=2, description="Maximum number of Hessian-vector products for the eigenvalues."),
    ] = 100,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Draw the loss surface around checkpoints, with λ1 and λ1/λk: picture, interactive page and table.

    Rows ``loss``: the mean loss at points w + x d1 + y d2 with standard errors over the examples, all of them evaluated;
    ``accuracy`` at the centre. ``directions``: ``eigen`` (unit vectors; adds the rows of the spectrum), ``random``
    (filter-normalised), ``plane`` (of three checkpoints; adds rows ``point``, each loss with its own buffers) or ``pca`` (of the
    checkpoints of a run, or of several; adds rows ``trajectory``, ``projection_error`` and ``explained_variance``). In the
    last two, coordinates are Euclidean distances, and the surface has the buffers of the weights at its centre everywhere.

    The grid has 41 x 41 points from -``span`` to ``span``. Every fourth line is evaluated first (11 x 11 points), then 16 points
    of every second line. If the bicubic spline through the coarser grid misses one of these by more than 0.5 % of the range (of
    the logarithm, where losses span more than a factor of 30), every second line is evaluated, and likewise all lines. Row
    ``interpolation_error``: the largest miss as a share of the range; none where all points are evaluated.

    Cost: from 137 evaluations of the slice.

    Raises FldiagError for models that span no plane, or a loss at the weights that is not finite.
    """
    problems = [problem] if isinstance(problem, Problem) else list(problem)
    origin, reach, rows = problems[0], 0.8, list[Row]()
    with workspace().part(0, 2, ""):
        if directions == "random":
            axes = torch.stack([random_direction(origin, seed, i) for i in range(2)])
        elif directions != "eigen":
            origin, axes, rows, reach = through(problems, directions)
        else:
            options: dict[str, Any] = {"tol": tol, "max_products": max_products, "seed": seed}
            pairs = eigenpairs(origin, k, progress=workspace().show, **options)
            axes, rows = pairs.vectors[:2], eigenvalue_rows(origin, pairs, matrix="hessian")
            if len(axes) < 2:
                raise FldiagError(
                    "there is one eigenvector, and a landscape needs two",
                    "allow more products, or ask for the spectrum of a model with one parameter",
                    usage=True,
                )
    centre = origin.centre.rows(origin)
    axis = np.linspace(-1, 1, POINTS) * (span or 1.25 * reach or 1.0)
    with workspace().part(1, 2, ""):
        losses = surface_rows(origin, axes, axis, seed)
    return table([*at_centre(losses, centre, x=0.0, y=0.0), *rows], **origin.common)
