"""Lines through a problem's weights, the losses along them, and what is said of each line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.landscape.directions import random_direction
from fldiag.landscape.evaluator import Evaluator
from fldiag.landscape.interpolation import StraightPath, barrier
from fldiag.problem.eigenpairs import eigenpairs, eigenvalue_rows, finite_scores, noise_of
from fldiag.problem.problem import Problem
from fldiag.results.table import Row


@dataclass
class Lines:
    """Lines from a problem's weights: along directions [P], or, where ``to_models``, straight to other weights."""

    problem: Problem
    ends: Sequence[Any]
    to_models: bool = False
    current: tuple[int, StraightPath] | None = field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """A worker prepares its lines itself."""
        return {**vars(self), "current": None}

    def path(self, number: int) -> StraightPath:
        """One line; the last one stays in memory."""
        if self.current is None or self.current[0] != number:
            end = self.ends[number]
            if self.to_models:
                path = StraightPath.to(self.problem, end)
            else:
                evaluate = Evaluator(self.problem, [end])
                path = StraightPath(evaluate, "", float(end.norm()))
            self.current = number, path
        return self.current[1]


def loss_at(lines: Lines, point: tuple[int, int, float]) -> tuple[float, float | None]:
    """The mean loss and its standard error at a coefficient of a line."""
    number, _, coefficient = point
    return lines.path(number).evaluate(coefficient)


def loss_rows(lines: Lines, places: np.ndarray) -> Iterator[list[Row]]:
    """The rows ``loss`` of one line after the other."""
    points = [(n, i, float(x)) for n in range(len(lines.ends)) for i, x in enumerate(places)]
    losses = workspace().map(
        loss_at,
        lines,
        points,
        name=lambda point: f"line {point[0] + 1}, point {point[1] + 1}",
    )
    rows: list[Row] = []
    for (number, i, x), (loss, stderr) in zip(points, losses, strict=True):
        rows.append(
            {
                "metric": "loss",
                "index": number + 1,
                "x": x,
                "value": loss,
                "stderr": float("nan") if stderr is None else stderr,
                "estimator": "exact",
            }
        )
        if i == len(places) - 1:
            yield rows
            rows = []


def eigen_directions(problem: Problem, count: int, **options: Any) -> dict[str, Any]:
    """The leading eigenvectors [count, P] of the Hessian, their curvatures, and the rows of the spectrum."""
    pairs = eigenpairs(problem, progress=workspace().show, **options)
    if len(pairs.values) < count:
        raise FldiagError(
            f"{count} lines need as many eigenvectors, {len(pairs.values)} found",
            "ask for fewer lines or allow more products",
            usage=True,
        )
    return {
        "directions": pairs.vectors[:count],
        "curvatures": [float(v) for v in pairs.values[:count]],
        "residuals": [float(v) for v in pairs.residuals[:count]],
        "rows": eigenvalue_rows(pairs, noise=noise_of(problem)),
    }


def random_directions(problem: Problem, count: int, seed: int) -> dict[str, Any]:
    directions = [random_direction(problem, seed, i) for i in range(count)]
    return {
        "directions": torch.stack(directions),
        "curvatures": [float(d @ problem.hvp(d.to(problem.dtype))) for d in directions],
        "residuals": [None] * count,
        "rows": [],
    }


def rows_along(
    problem: Problem,
    kind: Literal["eigen", "random"],
    count: int,
    places: np.ndarray,
    seed: int,
    **options: Any,
) -> list[Row]:
    """Of lines through the weights the losses, and slope, curvature and parabola; then the rows of the spectrum.

    ``options``: of ``eigenpairs``.
    """
    with workspace().part(0, 2, f"{kind} directions"):
        if kind == "eigen":
            result = eigen_directions(problem, count, seed=seed, **options)
        else:
            result = random_directions(problem, count, seed)
    directions: Tensor = result["directions"].to(problem.device)
    gradient, centre = problem.gradient(), finite_scores(problem).loss
    estimator = "lanczos" if kind == "eigen" else "exact"
    rows: list[Row] = []
    with workspace().part(1, 2, "losses"):
        lines = Lines(problem, list(directions))
        for i, line_rows in enumerate(loss_rows(lines, places)):
            slope, curvature = float(gradient @ directions[i]), result["curvatures"][i]
            rows += line_rows
            rows += [
                {"metric": "slope", "index": i + 1, "value": slope, "estimator": "exact"},
                {
                    "metric": "curvature",
                    "index": i + 1,
                    "value": curvature,
                    "residual": result["residuals"][i],
                    "estimator": estimator,
                },
            ]
            rows += [
                {
                    "metric": "parabola",
                    "index": i + 1,
                    "x": float(x),
                    "estimator": estimator,
                    "value": centre + slope * float(x) + 0.5 * curvature * float(x) ** 2,
                }
                for x in places
            ]
    return [*rows, *result["rows"]]


def rows_between(problem: Problem, ends: Mapping[int, Any], points: int) -> list[Row]:
    """Of straight paths to the models of clients the losses, and barrier and length."""
    places = np.linspace(0.0, 1.0, points)
    lines = Lines(problem, list(ends.values()), to_models=True)
    rows: list[Row] = []
    for i, (client, line_rows) in enumerate(zip(ends, loss_rows(lines, places), strict=True)):
        path = lines.path(i)
        columns: Row = {"index": i + 1, "client": client}
        if path.buffers:
            columns["buffers"] = path.buffers
        losses = np.array([row["value"] for row in line_rows])
        length: Row = {"metric": "distance", "value": path.length, "estimator": "exact"}
        rows += [{**row, **columns} for row in [*line_rows, barrier(path, places, losses), length]]
    return rows
