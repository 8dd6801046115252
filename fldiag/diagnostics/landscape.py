"""The loss over a plane in weight space, around a checkpoint.

Directions and grid as in Mendieta et al. (CVPR 2022): L(w + x d1 + y d2) with d1, d2 the top two Hessian
eigenvectors, coefficients added to all weights alike; or filter-normalised random directions (Li et al.,
NeurIPS 2018), or the plane through three weight sets (Garipov et al., NeurIPS 2018).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from fldiag.diagnostics import directions as rules
from fldiag.diagnostics.directions import Directions
from fldiag.diagnostics.problem import Problem
from fldiag.diagnostics.spectrum import Progress
from fldiag.diagnostics.store import ArrayStore
from fldiag.errors import FldiagError
from fldiag.registry import diagnostic
from fldiag.results.provenance import digest
from fldiag.results.table import table


def axis(points: int, span: float) -> np.ndarray:
    """``points`` coefficients from -span to span, symmetric to the bit, with exactly 0 in the middle.

    Raises FldiagError for an even number of points, which has no middle.
    """
    if points % 2 == 0 or points < 3:
        raise FldiagError(f"points = {points} puts no grid point at the weights themselves",
                          "use an odd number of at least 3", usage=True)
    half = span * (np.arange(1, points // 2 + 1) / (points // 2))
    return np.concatenate([-half[::-1], [0.0], half])


def evaluate(problem: Problem, d1: Tensor, d2: Tensor, x: float, y: float) -> tuple[float, float | None]:
    """Loss and standard error at ``w + x d1 + y d2``; at (0, 0) the very bits of ``problem.loss()``."""
    return problem.loss(problem.w.double() + x * d1 + y * d2)


def _forecast(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(1, round(seconds))} s left"
    return f"about {seconds / 60:.0f} min left" if seconds < 5400 else f"about {seconds / 3600:.1f} h left"


class _Surface:
    """The grid's values so far, [points, points] with x along axis 1; NaN where not done."""

    def __init__(self, points: int):
        self.done = np.zeros((points, points), dtype=bool)
        self.value = np.full((points, points), np.nan)
        self.stderr = np.full((points, points), np.nan)

    def arrays(self) -> dict[str, np.ndarray]:
        return {"done": self.done, "value": self.value, "stderr": self.stderr}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        self.done, self.value, self.stderr = arrays["done"], arrays["value"], arrays["stderr"]

    def fill(self, problem: Problem, found: Directions, grid: np.ndarray, progress: Progress | None,
             after_each: Any) -> None:
        start, began, total = time.monotonic(), int(self.done.sum()), self.done.size
        for row, column in np.argwhere(~self.done):
            value, stderr = evaluate(problem, found.d1, found.d2, float(grid[column]), float(grid[row]))
            self.value[row, column] = value
            self.stderr[row, column] = np.nan if stderr is None else stderr
            self.done[row, column] = True
            after_each()
            if progress:
                done = int(self.done.sum())
                left = (time.monotonic() - start) / (done - began) * (total - done)
                # the first point pays for warming up, so it forecasts badly
                text = _forecast(left) if done - began > 2 else "first points"
                progress(done, total, f"landscape points, {text}" if done < total else "landscape points")

    def rows(self, grid: np.ndarray) -> list[dict[str, Any]]:
        return [{"metric": "loss", "estimator": "exact", "x": float(x), "y": float(y),
                 "value": float(self.value[r, c]), "stderr": float(self.stderr[r, c])}
                for r, y in enumerate(grid) for c, x in enumerate(grid)]


@diagnostic("landscape")
def landscape(problem: Problem, progress: Progress | None = None, *,
              directions: Literal["eigen", "random", "plane"] = "eigen",
              points: Annotated[int, Field(ge=3)] = 41, span: Annotated[float, Field(gt=0)] | None = None,
              through: Any = None, k: Annotated[int, Field(ge=2)] = 5,
              tol: Annotated[float, Field(gt=0, lt=1)] = 1e-3,
              max_products: Annotated[int, Field(ge=2)] = 100, seed: int = 0,
              store: Any = None) -> pd.DataFrame:
    """The mean loss on a grid of points w + x d1 + y d2, with standard errors over the examples.

    ``directions``: ``eigen`` (top two Hessian eigenvectors; adds the rows of the spectrum), ``random``
    (filter-normalised, ``seed``) or ``plane`` (with the two weight sets of ``through``; adds rows ``point``).
    The grid has an odd number of ``points`` from -``span`` to ``span`` along each axis, so its centre is the
    checkpoint; ``span`` defaults to 1, for a plane to 1.25 times its farthest coordinate. ``store``: a path
    (file or directory) or an ArrayStore that keeps directions and finished points; called again with it,
    the evaluation goes on where it stopped. Cost: points^2 evaluations of the slice.

    Raises FldiagError for an even number of points, weights that span no plane, or a store of other weights.
    """
    axis(points, 1.0)
    kept = ArrayStore(store) if isinstance(store, (str, os.PathLike)) else store
    surface, key, held = _Surface(points), "", None
    if kept is not None:
        ends = None if not isinstance(through, Sequence) else list(through)
        key = digest(problem.digest(), directions, points, span, ends, k, tol, max_products, seed)
        held = kept.load(key)
    if held is not None:
        arrays, extra = held
        surface.restore(arrays)
        d1, d2 = (torch.from_numpy(arrays[name]).to(problem.device) for name in ("d1", "d2"))
        found = Directions(d1, d2, extra["rows"], extra["reach"])
    elif directions == "eigen":
        found = rules.eigen(problem, k=k, tol=tol, max_products=max_products, seed=seed, progress=progress)
    elif directions == "random":
        found = rules.random(problem, seed=seed)
    else:
        found = rules.plane(problem, through)
    grid = axis(points, span if span is not None else 1.25 * found.reach or 1.0)

    fixed = {"d1": found.d1.cpu().numpy(), "d2": found.d2.cpu().numpy()}
    extra = {"rows": found.rows, "reach": found.reach}

    def after_each() -> None:
        if kept is not None:
            kept.offer(key, {**fixed, **surface.arrays()}, extra)

    try:
        surface.fill(problem, found, grid, progress, after_each)
    finally:  # also on Ctrl-C
        if kept is not None:
            kept.save(key, {**fixed, **surface.arrays()}, extra)
    return table([*surface.rows(grid), *found.rows], **problem.common)
