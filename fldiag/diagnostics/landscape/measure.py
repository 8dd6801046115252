"""The loss over a plane: its directions, and its values at the points of a grid."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from fldiag.execution import workspace
from fldiag.landscape import directions as rules
from fldiag.landscape import grid
from fldiag.landscape.directions import Directions
from fldiag.landscape.evaluator import Evaluator
from fldiag.problem.problem import Problem
from fldiag.results.table import Row

#: Points are evaluated in so many blocks or more, none larger than this: few enough to cost nothing, many enough that no worker
#: waits long for the last, and that an interruption loses little.
BLOCKS, LARGEST = 16, 16
#: Allowed interpolation error between evaluated points, as a share of the loss range.
RTOL = 0.01


def find_directions(
    problem: Problem, kind: str, others: Any, seed: int, **options: Any
) -> Directions:
    """``options``: of the eigenpairs."""

    if kind == "eigen":
        directions = rules.eigen(problem, seed=seed, progress=workspace().show, **options)
    elif kind == "random":
        directions = rules.random(problem, seed=seed)
    elif kind == "plane":
        directions = rules.plane(problem, others)
    else:
        directions = rules.pca(problem, others, workspace().show)
    d1, d2 = (d.to(problem.device) for d in (directions.d1, directions.d2))
    return Directions(d1, d2, directions.rows, directions.reach)


@dataclass
class Plane:
    """``axis``: the coefficients of both directions at the points of the grid."""

    problem: Problem
    directions: tuple[Tensor, Tensor]
    axis: np.ndarray

    def __getstate__(self) -> dict[str, Any]:
        """Whoever evaluates points makes the evaluator."""
        return {name: value for name, value in vars(self).items() if name != "evaluator"}

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.problem, list(self.directions))


@dataclass(frozen=True)
class Block:
    """Points (row, column) that are evaluated together, numbered from ``first``."""

    first: int
    points: list[tuple[int, int]]

    def __str__(self) -> str:
        return f"points {self.first} to {self.first + len(self.points) - 1}"


def losses(plane: Plane, block: Block) -> list[tuple[float, float | None]]:
    """Loss and standard error at every point; rows are y."""
    return [
        plane.evaluator(float(plane.axis[column]), float(plane.axis[row]))
        for row, column in block.points
    ]


def surface_rows(plane: Plane, seed: int) -> list[Row]:
    """The losses over the grid, evaluated and interpolated."""
    count = 0

    def evaluate(points: np.ndarray) -> np.ndarray:
        nonlocal count
        places = [(int(row), int(column)) for row, column in points]
        size = min(-(-len(places) // BLOCKS), LARGEST)
        blocks = [Block(count + i + 1, places[i : i + size]) for i in range(0, len(places), size)]
        count += len(places)
        results = workspace().map(losses, plane, blocks, name=str)
        return np.array([pair for pairs in results for pair in pairs], dtype=float)

    filled = grid.fill(len(plane.axis), evaluate, RTOL, seed)
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
        for r, y in enumerate(plane.axis)
        for c, x in enumerate(plane.axis)
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
