"""Straight paths between models: is there a barrier between the clients' models and their average?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.landscape.evaluator import Evaluator
from fldiag.problem import inputs
from fldiag.problem.problem import Problem
from fldiag.results.table import Row


@dataclass
class StraightPath:
    """The straight path from a problem's weights (t = 0) to other weights (t = 1).

    ``evaluate(t)`` -> (mean loss, standard error). Floating-point buffers (running statistics of batch-norm)
    go along the same straight path when the end brings its own, so that both ends are the models as they are;
    else they stay the problem's. ``buffers`` says so: "interpolated", "fixed", or "" for a model without any.
    """

    evaluate: Evaluator
    buffers: str
    length: float

    @staticmethod
    def to(problem: Problem, end: Any) -> StraightPath:
        """Raises FldiagError when the weights or buffers do not fit the model."""
        w = inputs.weights(problem.module, problem.layout, end, problem.dtype, problem.device)
        offset = w.double() - problem.w.double()
        moving = {n for n, b in problem.buffers.items() if b.is_floating_point()}
        if not moving:
            return StraightPath(Evaluator(problem, [offset]), "", float(offset.norm()))
        if not (isinstance(end, Mapping) and moving <= end.keys()):
            return StraightPath(Evaluator(problem, [offset]), "fixed", float(offset.norm()))
        end_buffers = inputs.buffers(problem.module, None, end, problem.dtype, problem.device)

        def along(t: float) -> dict[str, Tensor]:
            return {
                n: torch.lerp(b, end_buffers[n], t) if n in moving else b.clone()
                for n, b in problem.buffers.items()
            }

        return StraightPath(
            Evaluator(problem, [offset], buffers=along), "interpolated", float(offset.norm())
        )


def barrier(path: StraightPath, places: np.ndarray, values: np.ndarray) -> Row:
    """The largest excess of the loss over the straight line between the ends' losses (Entezari et al., "The Role
    of Permutation Invariance in Linear Mode Connectivity", ICLR 2022, equation 1), at least 0.

    ``x`` is where it is (none for a barrier of 0: the loss is nowhere above the line); the standard error is over
    the examples, each with its own excess there. Where the loss overflows between sound ends, it is infinite.
    """
    if not np.isfinite(values).all():
        sound = np.isfinite(values[[0, -1]]).all()
        return {"metric": "barrier", "value": math.inf if sound else math.nan, "estimator": "exact"}
    excess = values - ((1 - places) * values[0] + places * values[-1])
    most = int(excess.argmax())
    if excess[most] <= 0:
        return {"metric": "barrier", "value": 0.0, "estimator": "exact"}
    t, stderr = float(places[most]), None
    each = [path.evaluate.losses(s) for s in (0.0, t, 1.0)]
    if each[0] is not None and each[1] is not None and each[2] is not None and len(each[0]) > 1:
        stderr = float((each[1] - (1 - t) * each[0] - t * each[2]).std()) / math.sqrt(len(each[0]))
    return {
        "metric": "barrier",
        "value": float(excess[most]),
        "x": t,
        "stderr": stderr,
        "estimator": "exact",
    }


def highest(
    f: Callable[[float], float], places: np.ndarray, values: np.ndarray, most: int, rtol: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Ask ``f`` at up to ``most`` further places, each in the middle of the interval that may hide most.

    Between two neighbours a function lies above both by at most h^2 / 8 times its second derivative, which is taken from the
    second differences at the two. Ends when nothing higher than the highest value is expected by more than ``rtol`` of the range.

    Returns places, values, and by how much the function may exceed the highest of them: an estimate, as the second derivative
    between the points is one. Values that are no numbers end it, with an error of NaN.

    >>> x, y, error = highest(lambda t: -(t - 0.3) ** 2, np.linspace(0, 1, 5), -(np.linspace(0, 1, 5) - 0.3) ** 2, 20, 1e-4)
    >>> round(float(x[y.argmax()]), 2), bool(-y.max() <= error <= 1e-4)
    (0.3, True)
    """
    for count in range(most + 1):
        if not np.isfinite(values).all():
            return places, values, float("nan")
        above = _above(places, values)
        error = float(above.max() - values.max())
        if count == most or error <= rtol * float(np.ptp(values)):
            return places, values, max(error, 0.0)
        at = int(above.argmax())
        new = float((places[at] + places[at + 1]) / 2)
        places, values = np.insert(places, at + 1, new), np.insert(values, at + 1, f(new))
    raise AssertionError


def _above(places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """How high the function may be in each interval."""
    steps = np.diff(places)
    slopes = np.diff(values) / steps
    bend = np.abs(np.diff(slopes) / ((steps[1:] + steps[:-1]) / 2))
    bend = np.concatenate([bend[:1], bend, bend[-1:]])
    return np.maximum(values[:-1], values[1:]) + steps**2 / 8 * np.maximum(bend[:-1], bend[1:])
