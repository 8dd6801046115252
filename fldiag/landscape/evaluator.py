"""Losses at many weight vectors w + sum of c_i d_i: a plane, a line, a path between models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fldiag.problem.problem import Problem
from fldiag.problem.scores import Scores


class Evaluator:
    """The loss at ``w + c_1 d_1 + c_2 d_2 + ...`` as a function of the coefficients.

    ``buffers``: the model's buffers at some coefficients (default: the problem's everywhere).
    """

    def __init__(
        self,
        problem: Problem,
        directions: Sequence[Tensor],
        buffers: Callable[..., dict[str, Tensor]] | None = None,
    ):
        self.problem, self.buffers = problem, buffers
        self.directions = [d.double() for d in directions]
        problem.probe()

    def at(self, *coefficients: float) -> Tensor:
        """The weights there, [P] in float64."""
        w = self.problem.w.double()
        for c, d in zip(coefficients, self.directions, strict=True):
            w = w + c * d
        return w

    def scores(self, *coefficients: float) -> Scores:
        """Losses and right answers of one forward pass."""
        w = self.at(*coefficients)
        buffers = None if self.buffers is None else self.buffers(*coefficients)
        return self.problem.scores_of(w, self.problem.evaluate(w.to(self.problem.w), buffers))

    def losses(self, *coefficients: float) -> Tensor | None:
        """The loss of each example [n] in float64, None when the loss cannot be taken per example."""
        return self.scores(*coefficients).each

    def __call__(self, *coefficients: float) -> tuple[float, float | None]:
        """Mean loss and its standard error over the examples, as ``Problem.loss``."""
        w = self.at(*coefficients)
        buffers = None if self.buffers is None else self.buffers(*coefficients)
        return self.problem.loss_of(w, self.problem.evaluate(w.to(self.problem.w), buffers))
