"""Quadratic Bezier curves between two models, bent so that the loss along them is small.

phi(t) = (1 - t)^2 w_1 + 2 t (1 - t) theta + t^2 w_2 (Garipov et al., "Loss Surfaces, Mode Connectivity, and Fast Ensembling of
DNNs", NeurIPS 2018, equation 2), theta from the midpoint by gradient steps on E_t F(phi(t)), t uniform.
"""

from __future__ import annotations

import copy
import math

import torch

from fldiag.landscape.mixtures import Mixtures, Model
from fldiag.registry import Progress

#: The first step moves every weight by this share of the distance between the models, per weight in the mean.
STEP = 0.2


def shares(t: float) -> tuple[float, float, float]:
    """Of w_1, w_2 and theta at t.

    >>> shares(0.5), shares(1.0)
    ((0.25, 0.25, 0.5), (0.0, 1.0, 0.0))
    """
    return (1 - t) ** 2, t * t, 2 * t * (1 - t)


def bent(ends: Mixtures, steps: int, progress: Progress | None = None) -> Model:
    """theta after ``steps`` gradients of the whole slice, by Adam with steps that shrink to zero (half a cosine); its buffers.

    t runs through a sequence that covers [0, 1] evenly (multiples of the golden ratio), so nothing is random. Statistics of
    batch-norm are found anew for every gradient and are constants in it.
    """
    problem = copy.copy(ends.problem)  # whose buffers change
    problem.probe()
    first, second = (w.double() for w, _ in ends.models)
    theta = ((first + second) / 2).requires_grad_()
    start = STEP * float((second - first).norm()) / math.sqrt(problem.layout.size)
    rule = torch.optim.Adam([theta], lr=start)
    for step in range(steps):
        t = (0.5 + step * (math.sqrt(5) - 1) / 2) % 1.0
        a, b, c = shares(t)
        at = (a * first + b * second + c * theta.detach()).to(problem.dtype)
        if problem.buffers:
            problem.buffers = (
                ends.statistics(at) if ends.buffers == "reestimated" else ends.mixed((1 - t, t))
            )
        rule.param_groups[0]["lr"] = start * (1 + math.cos(math.pi * step / steps)) / 2
        theta.grad = c * problem.gradient(at)
        rule.step()
        if progress:
            progress(step + 1, steps, "bending the path")
    return theta.detach(), ends.mixed(
        (0.5, 0.5)
    )  # with these the buffers go straight from one end's to the other's
