"""First crossings along directions in weight space."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import mstats
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.execution.start import started
from fldiag.losses import noise_floor
from fldiag.problem.eigenpairs import loss_rows
from fldiag.problem.problem import Problem
from fldiag.problem.scores import Scores
from fldiag.registry import Progress
from fldiag.results.kept_units import KeptUnits
from fldiag.results.provenance import digest
from fldiag.results.table import Row
from fldiag.seeding import torch_rng
from fldiag.surface.evaluator import Evaluator

CRITERIA = ("accuracy", "loss")
UNIT = "||w||"


@dataclass(frozen=True)
class Options:
    draws: int
    drop: float
    rise: float
    least: float
    most: float
    density: int
    rtol: float
    seed: int

    @property
    def grid(self) -> np.ndarray:
        """Radii from least to most, evenly on a logarithmic scale."""
        count = math.ceil(self.density * math.log10(self.most / self.least)) + 1
        return np.geomspace(self.least, self.most, max(count, 2))


@dataclass
class Work:
    """``centre``: losses and correct answers at the weights themselves. ``ascent``: the direction of the gradient, None where
    that is rounding noise."""

    problem: Problem
    options: Options
    centre: Scores
    ascent: Tensor | None

    def direction(self, number: int) -> Tensor:
        """Of norm ||w||; 0 is the ascent direction."""
        if number == 0:
            assert self.ascent is not None
            found = self.ascent
        else:
            rng = torch_rng(self.options.seed, "basin direction", number)
            found = torch.randn(self.problem.layout.size, dtype=torch.float64, generator=rng).to(self.problem.device)
        return found * (self.problem.w.double().norm() / found.norm())

    def left(self, at: Scores, criterion: str) -> bool:
        """Whether the basin is left; a loss that is not a number has left it."""
        if criterion == "loss":
            return not at.loss <= (1 + self.options.rise) * self.centre.loss
        assert at.right is not None and self.centre.right is not None
        lost = float(self.centre.right.sum()) - float(at.right.sum())
        return lost > self.options.drop * self.problem.n

    @property
    def criteria(self) -> dict[str, str]:
        """What the basin can be left by -> why not ("": it can)."""
        return {"accuracy": "" if self.centre.right is not None else "the targets are not classes",
                "loss": "" if self.centre.loss > 0 else "the loss at the weights is not above 0"}


@dataclass(frozen=True)
class Direction:
    """0 is the ascent direction."""

    number: int

    def __str__(self) -> str:
        return f"direction {self.number} of the basin"


def crossings(work: Work, unit: Direction) -> dict[str, tuple[float, float] | None]:
    """Criterion -> the first radius along a direction at which the basin is left, and the width of its bracket; None: nowhere."""
    evaluate = Evaluator(work.problem, [work.direction(unit.number)], reach=work.options.most)
    seen: dict[float, Scores] = {}

    def left(radius: float, criterion: str) -> bool:
        if radius not in seen:
            seen[radius] = evaluate.scores(radius)
        return work.left(seen[radius], criterion)

    return {criterion: first(lambda r, c=criterion: left(r, c), work.options.grid, work.options.rtol)  # type: ignore[misc]
            for criterion, why in work.criteria.items() if not why}


def first(left: Callable[[float], bool], grid: np.ndarray, rtol: float) -> tuple[float, float] | None:
    """The first point of the grid that has left, brought nearer to the one before by bisection; and the bracket's width.

    >>> radius, width = first(lambda r: r > 0.3, np.geomspace(0.01, 1, 5), 1e-3)
    >>> round(radius, 3), width <= 1e-3 * radius
    (0.3, True)
    """
    inside = 0.0
    for radius in map(float, grid):
        if left(radius):
            break
        inside = radius
    else:
        return None
    outside = radius
    while outside - inside > rtol * outside and inside:  # already the smallest radius: no farther down
        middle = math.sqrt(inside * outside)
        inside, outside = (inside, middle) if left(middle) else (middle, outside)
    return outside, outside - inside


def rows(problem: Problem, options: Options, progress: Progress | None, store: Any = None) -> list[Row]:
    if options.least >= options.most:
        raise FldiagError(f"least = {options.least:g} is not below most = {options.most:g}", "give a range of radii", usage=True)
    if not bool(problem.w.any()):
        raise FldiagError("the weights are all zero, so radii in norms of the weights are too", "give a trained model")
    centre = loss_rows(problem)
    gradient = problem.gradient()
    noise = float(gradient.norm()) <= noise_floor(problem.dtype)
    work = Work(problem, options, Evaluator(problem, [], fast=False).scores(), None if noise else gradient)
    units = [Direction(n) for n in range(int(noise), options.draws + 1)]
    kept = KeptUnits(store, lambda: digest("basins", problem.digest(), vars(options)))
    with started(problem.executor, crossings, work, most=len(units)) as pool:
        made = kept.results(pool, units, progress)
    found = {unit.number: crossed for unit, crossed in zip(units, made, strict=True)}
    return [{"masked": False, **row} for row in (*centre, *(row for criterion, why in work.criteria.items()
                                                            for row in _criterion(criterion, why, found, options)))]


def _criterion(criterion: str, why: str, found: dict[int, dict[str, tuple[float, float] | None]], options: Options) -> list[Row]:
    """All directions of one criterion, and what they have in common."""
    common: Row = {"criterion": criterion, "unit": UNIT, "estimator": "bisection"}
    nothing = {"masked": True, "note": why or f"not left within {options.most:g} {UNIT}"}
    if why:
        return [{**common, "metric": metric, **nothing} for metric in ("most_case", "worst_case")]
    rows: list[Row] = [] if 0 in found else [{**common, "metric": "radius", "index": 0, "direction": "ascent", "masked": True,
                                              "note": "the gradient is rounding noise"}]
    for number, crossed in found.items():
        at = crossed[criterion]
        rows.append({**common, "metric": "radius", "index": number, "direction": "random" if number else "ascent",
                     **({"value": at[0], "residual": at[1]} if at else nothing)})
    radii = np.array([at[0] if (at := found[n][criterion]) else np.inf for n in range(1, options.draws + 1)])
    # a quantile between two of the directions is that of the nearer one: some may be infinitely far
    low, median, high = (float(q) for q in np.quantile(radii, (0.25, 0.5, 0.75), method="closest_observation"))
    whole = bool(np.isfinite(radii).all()) and len(radii) > 1
    # the estimate does not move with the radii, but its rounding does: less the median, none is lost where they are all alike
    most: Row = {"value": median, "stderr": float(mstats.mjci(radii - median, [0.5])[0]) if whole else None}
    rows.append({**common, "metric": "most_case", "crossed": int(np.isfinite(radii).sum()),
                 **(most if math.isfinite(median) else nothing),
                 "low": low if math.isfinite(low) else None, "high": high if math.isfinite(high) else None})
    ends = [at[0] for crossed in found.values() if (at := crossed[criterion])]
    rows.append({**common, "metric": "worst_case", **({"value": min(ends)} if ends else nothing)})
    return rows
