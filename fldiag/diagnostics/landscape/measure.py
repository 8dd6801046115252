"""The surface over a grid: which points are evaluated, and by whom."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from fldiag.execution.pool import Pool
from fldiag.landscape import grid as grids
from fldiag.landscape.evaluator import Evaluator
from fldiag.landscape.points import Place, Points, Value
from fldiag.problem.problem import Problem
from fldiag.registry import Progress
from fldiag.results.table import Row


@dataclass
class Grid:
    """What the values of a grid depend on; whoever evaluates points makes the rest of it."""

    problem: Problem
    directions: tuple[Tensor, Tensor]
    places: np.ndarray

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.problem, list(self.directions), reach=float(self.places[-1]))

    def value(self, row: int, column: int) -> Value:
        return self.evaluator(float(self.places[column]), float(self.places[row]))


def values(grid: Grid, block: list[Place]) -> list[Value]:
    return [grid.value(*place) for place in block]


class GridFiller:
    """Fills the grid of a landscape and describes it; rows of the arrays are y."""

    def __init__(self, grid: Grid, kept: Points, seed: int, progress: Progress | None):
        self.grid, self.kept, self.seed, self.progress, self.places = (
            grid,
            kept,
            seed,
            progress,
            grid.places,
        )
        self.pool: Pool | None = None

    def fill(self, rtol: float, pool: Pool | None = None) -> grids.FilledGrid:
        self.pool = pool
        values = grids.GridValues(self.kept.done, self.kept.value, self.kept.stderr)
        return grids.fill(self.places, values, self._ask, rtol, self.seed)

    def _ask(self, new: np.ndarray, planned: int, stage: str) -> None:
        self.kept.fill(
            new, self.grid.value, f"landscape, {stage}", self.progress, planned, self.pool
        )

    def rows(self, filled: grids.FilledGrid) -> list[Row]:
        rows: list[Row] = [
            {
                "metric": "loss",
                "estimator": "exact" if filled.evaluated[r, c] else "spline",
                "x": float(x),
                "y": float(y),
                "value": float(filled.value[r, c]),
                "stderr": float(filled.stderr[r, c]),
                "residual": None if filled.evaluated[r, c] else float(filled.residual[r, c]),
            }
            for r, y in enumerate(self.places)
            for c, x in enumerate(self.places)
        ]
        if filled.error is not None:
            rows += [
                {
                    "metric": "interpolation_error",
                    "estimator": "spline",
                    "value": filled.error,
                    "index": filled.checks,
                },
                {
                    "metric": "evaluated",
                    "estimator": "exact",
                    "value": int(filled.evaluated.sum()),
                    "unit": "points",
                },
            ]
        return rows
