"""Landscape tables as grids with one shared scale: what the printed and the interactive picture have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from fldiag.errors import FldiagError
from fldiag.plotting.tables import floats, names, need, select
from fldiag.results.select import number as value_of
from fldiag.results.select import only
from fldiag.results.summary import number

PICTURE = "loss landscape"
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
#: Directions -> what the two axes are.
AXES = {
    "eigen": ("eigenvector 1", "eigenvector 2"),
    "random": ("random direction 1", "random direction 2"),
    "plane": ("towards checkpoint 2", "at right angles, to checkpoint 3"),
    "pca": ("principal axis 1", "principal axis 2"),
}


@dataclass(frozen=True)
class Marks:
    """Places to show on a surface: ``trajectory`` [T, 2] in order, and single weight sets ``points`` [m, 2].

    ``texts`` say what each place of the trajectory is.
    """

    trajectory: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    points: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Surface:
    """One run's loss over the grid: ``x`` [nx], ``y`` [ny], ``loss`` and ``stderr`` [ny, nx] (nan = unknown)."""

    run: str
    x: np.ndarray
    y: np.ndarray
    loss: np.ndarray
    stderr: np.ndarray
    slice: str
    n: int | None
    sharpness: float | None  # lambda_1
    residual: float | None
    converged: bool
    ratio: float | None  # lambda_1 / lambda_k
    ratio_index: int  # that k
    evaluated: int | None = None  # points that were evaluated; None = all
    error: float | None = None  # estimated, of the spline between them, as a share of the range
    marks: Marks = field(default_factory=lambda: Marks())

    @property
    def ratio_name(self) -> str:
        return f"λ₁/λ{str(self.ratio_index).translate(SUBSCRIPTS)}"

    @property
    def centre(self) -> float | None:
        """Loss at the weights themselves, coefficients (0, 0); None when that is no grid point."""
        near = [
            np.flatnonzero(np.abs(axis) <= 1e-9 * max(np.ptp(axis), 1e-30))
            for axis in (self.y, self.x)
        ]
        return float(self.loss[near[0][0], near[1][0]]) if all(len(i) for i in near) else None

    @property
    def lowest(self) -> float | None:
        return float(self.loss[np.isfinite(self.loss)].min(initial=np.inf))

    @property
    def highest(self) -> float | None:
        """The largest loss, infinite if one is."""
        return float(np.nanmax(self.loss, initial=-np.inf))

    def numbers(self) -> list[str]:
        """What stands under the contours: lambda_1 and lambda_1 / lambda_k, and that the surface is drawn as a spline."""
        curvature = [
            f"{name} = {number(value, 3)}"
            for name, value in (("λ₁", self.sharpness), (self.ratio_name, self.ratio))
            if value is not None
        ]
        count = (
            f"{len(self.x)} × {len(self.y)}" if self.evaluated is None else f"{self.evaluated:,}"
        )
        lines = [", ".join(curvature)] if curvature else []
        return [*lines, f"spline through {count} points"]

    def finely(self, shared: Scale) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, y and the heights of a spline through the grid, on one of about a hundred points; masked: what is unknown or
        infinite. Where a surface is whole the spline is cubic, elsewhere one that makes no waves (Fritsch and Carlson, 1980).
        """
        from scipy.interpolate import CubicSpline, PchipInterpolator

        heights = shared.height(self.loss, cut=False)
        lost = ~np.isfinite(self.loss)
        kind = (
            PchipInterpolator
            if lost.any() or shared.clip is not None or min(heights.shape) < 4
            else CubicSpline
        )
        heights = np.where(lost, shared.high, heights)
        axes = []
        for axis, places in ((0, self.y), (1, self.x)):
            fine = np.linspace(
                places[0], places[-1], (len(places) - 1) * max(1, -(-100 // (len(places) - 1))) + 1
            )
            heights = kind(places, heights, axis=axis)(fine)
            near = np.abs(fine[:, None] - places[None, :]).argmin(1)
            lost = np.take(lost, near, axis=axis)
            axes.append(fine)
        heights = np.maximum(heights, shared.low)
        if shared.clip is None:
            heights = np.minimum(heights, shared.high)
        return axes[1], axes[0], np.ma.masked_where(lost, heights)

    def interpolation(self) -> list[str]:
        """How many points were evaluated, and the error elsewhere; nothing where all were."""
        if self.evaluated is None:
            return []
        error = (
            f"≤ about {number(100 * self.error, 2)} % of the range"
            if self.error is not None
            else "unknown"
        )
        return [
            f"interpolated from {self.evaluated:,} of {self.loss.size:,} points,",
            f"error {error}",
        ]

    def height_at(self, places: np.ndarray) -> np.ndarray:
        """The loss at places [m, 2] by bilinear interpolation, nan beyond the grid."""
        out = np.full(len(places), np.nan)
        for k, (px, py) in enumerate(places):
            if self.x[0] <= px <= self.x[-1] and self.y[0] <= py <= self.y[-1]:
                i = min(int(np.searchsorted(self.x, px, "right")) - 1, len(self.x) - 2)
                j = min(int(np.searchsorted(self.y, py, "right")) - 1, len(self.y) - 2)
                u = (px - self.x[i]) / (self.x[i + 1] - self.x[i])
                v = (py - self.y[j]) / (self.y[j + 1] - self.y[j])
                cell = self.loss[j : j + 2, i : i + 2]
                out[k] = np.array([1 - v, v]) @ cell @ np.array([1 - u, u])
        return out


@dataclass(frozen=True)
class Scale:
    """The height and colour scale that all surfaces share; heights are log10 of the loss when ``log``."""

    log: bool
    low: float  # in heights
    high: float
    clip: float | None  # in losses; None = nothing was cut off
    top: float  # largest finite loss of the table
    floor: float  # smallest loss drawn (a logarithm needs one above 0)
    overflows: int  # points whose loss is infinite or not a number

    def height(self, loss: np.ndarray, cut: bool = True) -> np.ndarray:
        """Losses as heights: log10 where the scale is, ``cut`` at the clip (an infinite loss lies there); nan stays."""
        limit = self.clip if cut and self.clip is not None else self.top
        losses = np.clip(loss, self.floor, limit)
        return np.log10(losses) if self.log else losses

    def ticks(self, count: int = 5) -> list[float]:
        """About ``count`` round heights within the scale."""
        from matplotlib.ticker import MaxNLocator

        if not self.log:
            steps = np.asarray(
                MaxNLocator(nbins=count, steps=[1, 2, 2.5, 5, 10]).tick_values(self.low, self.high)
            )
        else:
            powers = np.arange(np.floor(self.low), np.ceil(self.high) + 1)
            for digits in ((1, 2, 5), (1, 3), (1,)):
                steps = np.array([p + np.log10(d) for p in powers for d in digits])
                if np.sum((steps >= self.low) & (steps <= self.high)) <= count + 2:
                    break
            else:
                steps = powers[:: int(np.ceil(len(powers) / count))]
        slack = 1e-9 * (self.high - self.low)
        return [float(s) for s in steps if self.low - slack <= s <= self.high + slack]

    def label(self, height: float) -> str:
        if self.log and abs(height) >= 3 and abs(height - round(height)) < 1e-9:
            return number(10.0 ** round(height), 1).removeprefix("1×")
        value = 10**height if self.log else height
        return number(0.0 if abs(value) < 1e-12 * max(abs(self.low), abs(self.high)) else value, 3)

    def notes(self) -> list[str]:
        """What the reader must know about the scale."""
        lines = []
        if self.clip is not None:
            lines.append(
                f"Loss clipped at {number(self.clip, 3)} (largest: {number(self.top, 3)})."
            )
        if self.overflows:
            points = "1 point has" if self.overflows == 1 else f"{self.overflows:,} points have"
            lines.append(f"{points} an infinite or undefined loss.")
        if self.log:
            lines.append("Heights and colours are logarithmic.")
        return lines


def surfaces(table: pd.DataFrame) -> list[Surface]:
    """One surface a run, in order of appearance.

    Raises FldiagError for missing columns or rows, and for a run whose points are not one rectangular grid.
    """
    need(table, ("metric", "run", "x", "y", "value"), PICTURE)
    select(table, "loss", PICTURE)
    table = table.assign(run=names(table["run"]))
    return [
        _surface(str(run), rows)
        for run, rows in table.groupby("run", sort=False)
        if len(only(rows, metric="loss"))
    ]


def _surface(run: str, rows: pd.DataFrame) -> Surface:
    loss = select(rows, "loss", PICTURE)
    px, py = floats(loss["x"]), floats(loss["y"])
    if not (np.isfinite(px).all() and np.isfinite(py).all()):
        raise FldiagError(
            f"run {run!r} has loss rows without coordinates x, y", "drop them or fill them in"
        )
    x, y = np.unique(px), np.unique(py)
    col, row = np.searchsorted(x, px), np.searchsorted(y, py)
    counts = np.zeros((len(y), len(x)), dtype=int)
    np.add.at(counts, (row, col), 1)
    if counts.max() > 1:
        j, i = np.argwhere(counts > 1)[0]
        raise FldiagError(
            f"run {run!r} has {counts[j, i]} losses at (x, y) = ({x[i]:g}, {y[j]:g})",
            "give every surface (slice, round) its own run label",
        )
    if len(x) < 2 or len(y) < 2 or counts.min() == 0:
        raise FldiagError(
            f"run {run!r} has {len(loss)} points, which is not a full grid of {len(x)} x by {len(y)} y",
            "evaluate every pair of at least two x and two y values",
        )
    grids = {}
    for name in ("value", "stderr"):
        grids[name] = np.full(counts.shape, np.nan)
        if name in loss.columns:
            grids[name][row, col] = floats(loss[name])
    first = {
        c: loss[c].dropna().iloc[0] if c in loss.columns and loss[c].notna().any() else None
        for c in ("slice", "n_examples")
    }
    evaluated = value_of(rows, "evaluated")
    return Surface(
        run,
        x,
        y,
        grids["value"],
        grids["stderr"],
        str(first["slice"] or ""),
        None if first["n_examples"] is None else int(first["n_examples"]),
        *_eigen(rows),
        None if evaluated is None else int(evaluated),
        value_of(rows, "interpolation_error"),
        _marks(rows),
    )


def _marks(rows: pd.DataFrame) -> Marks:
    """The trajectory and the single points of a run, in the order of their index."""
    if "index" not in rows.columns:
        return Marks()
    trajectory, points = (
        only(rows, metric=metric).sort_values("index") for metric in ("trajectory", "point")
    )
    rounds = trajectory["round"] if "round" in trajectory.columns else [None] * len(trajectory)
    texts = [
        ("" if pd.isna(r) else f"round {int(r)}, ") + f"loss {number(v)}"
        for r, v in zip(rounds, floats(trajectory["value"]), strict=True)
    ]
    places = _places(points)
    return Marks(_places(trajectory), places[np.abs(places).sum(1) > 0], texts)


def _places(rows: pd.DataFrame) -> np.ndarray:
    return np.column_stack([floats(rows["x"]), floats(rows["y"])])


def _eigen(rows: pd.DataFrame) -> tuple[float | None, float | None, bool, float | None, int]:
    """lambda_1, its residual, whether it converged, lambda_1 / lambda_k and k, as far as the table has them."""
    first, fifth = (value_of(rows, "eigenvalue", index=i) for i in (1, 5))
    ratio, k = (value_of(rows, "eigenvalue_ratio", column=c) for c in ("value", "index"))
    if ratio is None and first is not None and fifth:
        ratio = first / fifth
    residual, converged = (
        value_of(rows, "eigenvalue", index=1, column=c) for c in ("residual", "converged")
    )
    return first, residual, converged != 0.0, ratio, int(k or 5)


def scale(grids: Sequence[Surface]) -> Scale:
    """One scale for all surfaces: log10 where positive losses span more than a factor of 30, else linear.

    A linear one is cut at the largest outer fence of a run (third quartile + 3 interquartile ranges; J. Tukey, "Exploratory
    Data Analysis", 1977), which leaves every bowl-shaped surface whole and keeps a few exploding corners from flattening the
    rest. Raises FldiagError where no loss is finite.
    """
    pooled = np.concatenate([g.loss.ravel() for g in grids])
    finite = pooled[np.isfinite(pooled)]
    if not len(finite):
        raise FldiagError(
            "no point of the landscape has a finite loss",
            "choose a smaller span around the weights",
        )
    floor, top = float(finite.min()), float(finite.max())
    log = floor > 0 and top > 30 * floor
    # A logarithm already holds the corners down; cutting as well would hide what it was asked to show.
    limit = np.inf if log else max(_fence(g.loss) for g in grids)
    cut = limit if limit < top else None
    low, high = floor, cut if cut is not None else top
    if log:
        low, high = np.log10(low), np.log10(high)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-12):
        high = low + max(abs(low) * 1e-3, 1e-6)  # a flat surface still needs a range
    return Scale(log, float(low), float(high), cut, top, floor, int(len(pooled) - len(finite)))


def _fence(loss: np.ndarray) -> float:
    finite = loss[np.isfinite(loss)]
    if not len(finite):
        return -np.inf
    lower, upper = np.quantile(finite, [0.25, 0.75])
    return float(upper + 3 * (upper - lower)) if upper > lower else np.inf
