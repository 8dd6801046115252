"""The surface over a grid: which points are evaluated, by whom, and how exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from fldiag.execution.pool import Pool
from fldiag.problem.problem import Problem
from fldiag.registry import Progress
from fldiag.results.table import Row
from fldiag.seeding import numpy_rng
from fldiag.surface import grid as grids
from fldiag.surface.evaluator import Evaluator
from fldiag.surface.merge_tree import smad, valleys
from fldiag.surface.points import Place, Points, Value

#: With bf16, so many points besides the centre and the corners are evaluated in float32 too.
BF16_CHECKS = 8


@dataclass
class Grid:
    """What the values of a grid depend on; whoever evaluates points makes the rest of it."""

    problem: Problem
    directions: tuple[Tensor, Tensor]
    places: np.ndarray
    bf16: bool
    seed: int

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.problem, list(self.directions), reach=float(self.places[-1]), bf16=self.bf16)

    @cached_property
    def exact(self) -> np.ndarray:
        """Where the loss is not (or not only) computed in bfloat16."""
        exact = np.ones((len(self.places), len(self.places)), dtype=bool)
        if self.bf16:
            exact[:] = False
            exact[np.ix_([0, -1], [0, -1])] = True
            rng = numpy_rng(self.seed, "landscape bf16 check points")
            exact.flat[rng.permutation(exact.size)[:BF16_CHECKS]] = True
            exact[len(self.places) // 2, len(self.places) // 2] = True
        return exact

    def value(self, row: int, column: int) -> Value:
        x, y = float(self.places[column]), float(self.places[row])
        if not self.bf16:
            return *self.evaluator(x, y), math.nan
        if not self.exact[row, column]:
            value, stderr = self.evaluator(x, y)
            return value, stderr, value
        value, stderr = self.problem.loss(self.evaluator.at(x, y))
        return value, stderr, value if x == y == 0 else self.evaluator(x, y)[0]


def values(grid: Grid, block: list[Place]) -> list[Value]:
    return [grid.value(*place) for place in block]


class Surface:
    """Fills the grid and says how; rows of the arrays are y."""

    def __init__(self, grid: Grid, kept: Points, progress: Progress | None):
        self.grid, self.kept, self.progress = grid, kept, progress
        self.evaluator, self.places, self.seed, self.exact = grid.evaluator, grid.places, grid.seed, grid.exact
        self.pool: Pool | None = None

    def fill(self, rtol: float, pool: Pool | None = None) -> grids.Filled:
        self.pool = pool
        values = grids.Values(self.kept.done, self.kept.value, self.kept.stderr)
        first = self.exact if self.evaluator.bf16 else None
        return grids.fill(self.places, values, self._ask, rtol, self.seed, first)

    def _ask(self, new: np.ndarray, planned: int, stage: str) -> None:
        self.kept.fill(new, self.grid.value, f"landscape, {stage}", self.progress, planned, self.pool)

    def rows(self, filled: grids.Filled) -> list[Row]:
        share, lost, checks = self._precision(filled)
        heights = grids.Heights.of(filled.value) if np.isfinite(filled.value).any() else None
        estimator = np.where(filled.evaluated, np.where(self.exact, "exact", "bf16"), "spline")
        residual = np.where(filled.evaluated, 0.0, filled.residual)
        if self.evaluator.bf16 and heights is not None:
            size = np.maximum(heights.size, filled.value - heights.low)
            residual = residual + np.where(self.exact & filled.evaluated, 0.0, share * size)
        known = estimator != "exact"
        rows: list[Row] = [
            {"metric": "loss", "estimator": str(estimator[r, c]), "x": float(x), "y": float(y),
             "value": float(filled.value[r, c]), "stderr": float(filled.stderr[r, c]),
             "residual": float(residual[r, c]) if known[r, c] else None}
            for r, y in enumerate(self.places) for c, x in enumerate(self.places)]
        if filled.error is not None:
            rows += [{"metric": "interpolation_error", "estimator": "spline", "value": filled.error, "index": filled.checks},
                     {"metric": "evaluated", "estimator": "exact", "value": int(filled.evaluated.sum()),
                      "unit": "points"}]
        if self.evaluator.bf16:
            rows += [{"metric": "precision_error", "estimator": "bf16", "value": lost, "index": checks},
                     {"metric": "precision_error_share", "estimator": "bf16", "value": share, "index": checks}]
        return rows

    def tree(self, filled: grids.Filled) -> list[Row]:
        """The merge tree: every minimum, the saddle over which it is left for a deeper one, and their mean distance (SMAD)."""
        value = filled.value
        heights = grids.Heights.of(value)
        share = (filled.error or 0.0) + self._precision(filled)[0]
        error = np.nan_to_num(share * np.maximum(heights.size, value - heights.low), nan=0.0, posinf=0.0)
        found = valleys(value, error)
        how = "exact" if not share else "bf16" if filled.error is None else "spline"
        depths = [error[v.saddle] + error[v.minimum] for v in found if v.saddle is not None]
        off = float(np.mean(depths)) if depths else share * heights.size  # a valley of that depth would not be seen
        rows: list[Row] = [{"metric": "smad", "value": smad(found), "residual": off if share else None, "estimator": how}]
        for index, v in enumerate(found, start=1):
            for metric, place, height in (("minimum", v.minimum, v.low), ("saddle", v.saddle, v.high)):
                if place is not None:
                    rows.append({"metric": metric, "index": index, "x": float(self.places[place[1]]), "estimator": how,
                                 "y": float(self.places[place[0]]), "value": height,
                                 "residual": float(error[place]) if share else None})
        return rows

    def _precision(self, filled: grids.Filled) -> tuple[float, float, int]:
        """The largest error of bf16 where both were computed: as a share of the range and as a loss."""
        both = self.exact & np.isfinite(self.kept.rough) & np.isfinite(self.kept.value)
        both[len(self.places) // 2, len(self.places) // 2] = False
        if not self.evaluator.bf16 or not both.any():
            return 0.0, 0.0, 0
        error = np.abs(self.kept.rough - self.kept.value)[both]
        share = grids.Heights.of(filled.value).share(error, filled.value[both])
        return float(share.max()), float(error.max()), int(both.sum())
