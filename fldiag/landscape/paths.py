"""Straight ways through weight space: from a model along a direction, or to another model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fldiag.problem.loss import Scores
from fldiag.problem.problem import Problem
from fldiag.results.table import Row

#: What the rows along a way have of the rows of scores.
COLUMNS = ("metric", "value", "stderr", "estimator")


@dataclass(frozen=True)
class Path:
    """From a problem's weights w (t = 0) to w + ``offset`` (t = 1).

    Args:
        problem: whose loss it is.
        offset: [P] in float64.
        buffers: floating-point buffers at t = 1, by name (the running statistics of batch-norm); they go along the same way.
            Those that are not named stay the problem's.
    """

    problem: Problem
    offset: Tensor
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def between(start: Problem, end: Problem) -> Path:
        """From one model to another, each with its own buffers."""
        own = end.module.named_buffers()
        buffers = {n: end.state[n] for n, b in own if b.is_floating_point()}
        return Path(start, end.w.double() - start.w.double(), buffers)

    def scores(self, t: float) -> Scores:
        buffers = {n: self.problem.state[n].lerp(b, t) for n, b in self.buffers.items()}
        return self.problem.scores(self.problem.w.double() + t * self.offset, buffers)


def rows_along(paths: Sequence[Path], number: int, places: np.ndarray) -> list[Row]:
    """Loss and accuracy at every t of ``places``; on the way from one model (0) to another (1) also the ``barrier``."""
    path = paths[number]
    scores = [path.scores(float(t)) for t in places]
    rows: list[Row] = [
        {"x": float(t), **{name: row[name] for name in COLUMNS}}
        for t, at_t in zip(places, scores, strict=True)
        for row in at_t.rows(path.problem)
    ]
    if places[0] == 0:
        rows.append({"metric": "barrier", "estimator": "exact", **barrier(places, scores)})
    return rows


def barrier(places: np.ndarray, scores: Sequence[Scores]) -> Row:
    """The largest excess of the loss over the straight line between the losses of the ends, at least 0.

    Entezari et al., "The Role of Permutation Invariance in Linear Mode Connectivity" (ICLR 2022), equation 1.

    Args:
        places: t from 0 to 1.
        scores: at these.

    Returns:
        ``value``; ``x``, the place (none where the loss is nowhere above the line); ``stderr`` over the examples, each with its
        own excess there. Infinite where the loss overflows between sound ends.

    >>> [row] = [barrier(np.array([0.0, 0.5, 1.0]), [Scores(v, None, None) for v in (1.0, 3.0, 2.0)])]
    >>> row["value"], row["x"]
    (1.5, 0.5)
    """
    losses = np.array([at_t.loss for at_t in scores])
    if not np.isfinite(losses).all():
        return {"value": math.inf if np.isfinite(losses[[0, -1]]).all() else math.nan}
    excess = losses - losses[0] - places * (losses[-1] - losses[0])
    top = int(excess.argmax())
    if excess[top] <= 0:
        return {"value": 0.0}
    row: Row = {"value": float(excess[top]), "x": float(places[top])}
    first, highest, last = (scores[i].each for i in (0, top, -1))
    if first is not None and highest is not None and last is not None and len(first) > 1:
        each = highest - first - row["x"] * (last - first)
        row["stderr"] = float(each.std()) / math.sqrt(len(each))
    return row
