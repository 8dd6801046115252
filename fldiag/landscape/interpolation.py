"""Straight paths between models: is there a barrier between the clients' models and their average?"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
            Evaluator(problem, [offset], along), "interpolated", float(offset.norm())
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
