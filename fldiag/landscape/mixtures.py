"""Mixtures of models, sum of a_k w_k: straight paths, curves and simplices between models are all made of them.

Batch-norm's running statistics at a mixture, which was never trained, are mixed too, or found anew. A curve is a quadratic
Bezier curve between two models, bent so that the loss along it is small: phi(t) = (1 - t)^2 w_1 + 2 t (1 - t) theta + t^2 w_2
(Garipov et al., "Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs", NeurIPS 2018, equation 2), theta from the
midpoint by gradient steps on E_t F(phi(t)), t uniform.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fldiag.landscape.evaluator import Evaluator
from fldiag.problem.memory import DEPENDENT
from fldiag.problem.problem import Problem
from fldiag.problem.scores import Scores
from fldiag.registry import Progress

#: What becomes of batch-norm's running statistics: mixed like the weights, or found anew at every mixture.
Buffers = Literal["mixed", "reestimated"]
#: Weights [P] with the buffers that go with them.
Model = tuple[Tensor, dict[str, Tensor]]
#: The first step moves every weight by this share of the distance between the models, per weight in the mean.
STEP = 0.2


class RunningStatistics:
    """The problem's buffers with running statistics found anew: the mean over batches of the statistics of each (Izmailov et
    al., "Averaging Weights Leads to Wider Optima", UAI 2018, section 3.2).

    The batches are of the problem's own slice and of one fixed size, so that memory does not enter; only the inputs are looked
    at. Everything but batch-norm stays in eval mode.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.module = copy.deepcopy(problem.module)
        layers = {
            n: m
            for n, m in self.module.named_modules()
            if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
        }
        for m in layers.values():
            m.train()
            m.momentum = None  # the mean over all batches
        self.names = {
            f"{n}.{b}" if n else b for n, m in layers.items() for b, _ in m.named_buffers()
        }
        count = -(-problem.n // DEPENDENT)
        self._bounds = [
            (i * problem.n // count, (i + 1) * problem.n // count) for i in range(count)
        ]

    def __call__(self, w: Tensor) -> dict[str, Tensor]:
        """At weights [P]."""
        p = self.problem
        views = p.layout.views(w.to(p.dtype))
        buffers = {
            n: torch.zeros_like(b) if n in self.names else b.clone() for n, b in p.buffers.items()
        }
        for start, stop in self._bounds:
            x, _ = p.read(start, stop)
            with p.guarded(), torch.no_grad():
                p.call(views, x, buffers, self.module)
        return buffers


def has_running_statistics(problem: Problem) -> bool:
    """Whether the model has statistics that could be found anew."""
    return any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
        for m in problem.module.modules()
    )


@dataclass
class Mixtures:
    """The loss at mixtures of ``models``, whose first are the weights and buffers of ``problem``."""

    problem: Problem
    models: Sequence[Model]
    buffers: Buffers

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __call__(self, shares: Sequence[float]) -> Scores:
        """At sum of a_k w_k, for shares a [K] that sum to 1."""
        return self._evaluator.scores(*shares[1:])

    def weights(self, shares: Sequence[float]) -> Tensor:
        """[P] in float64."""
        return self._evaluator.at(*shares[1:])

    def buffers_at(self, shares: Sequence[float]) -> dict[str, Tensor]:
        """The buffers that go with the mixture."""
        return (
            self.statistics(self.weights(shares))
            if self.buffers == "reestimated"
            else self.mixed(shares)
        )

    def mixed(self, shares: Sequence[float]) -> dict[str, Tensor]:
        """The mixture of the models' own buffers; those that are no floating-point numbers are the first model's."""
        mixture = {n: b.clone() for n, b in self.problem.buffers.items()}
        for n, b in mixture.items():
            if b.is_floating_point():
                terms = (
                    a * bufs[n].double() for a, (_, bufs) in zip(shares, self.models, strict=True)
                )
                b.copy_(sum(terms))  # type: ignore[arg-type]
        return mixture

    @cached_property
    def statistics(self) -> RunningStatistics:
        return RunningStatistics(self.problem)

    @cached_property
    def _evaluator(self) -> Evaluator:
        def buffers(*others: float) -> dict[str, Tensor]:
            return self.buffers_at((1.0 - sum(others), *others))

        origin = self.problem.w.double()
        return Evaluator(
            self.problem,
            [w.double() - origin for w, _ in self.models[1:]],
            buffers=buffers if self.problem.buffers else None,
        )


def bezier_shares(t: float) -> tuple[float, float, float]:
    """Of w_1, w_2 and theta at t.

    >>> bezier_shares(0.5), bezier_shares(1.0)
    ((0.25, 0.25, 0.5), (0.0, 1.0, 0.0))
    """
    return (1 - t) ** 2, t * t, 2 * t * (1 - t)


def bend_path(ends: Mixtures, steps: int, progress: Progress | None = None) -> Model:
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
        a, b, c = bezier_shares(t)
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
    # with these the buffers go straight from one end's to the other's
    return theta.detach(), ends.mixed((0.5, 0.5))
