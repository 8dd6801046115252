"""Mixtures of models, sum of a_k w_k: straight paths, curves and simplices between models are all made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from fldiag.landscape.batch_norm import Statistics
from fldiag.landscape.evaluator import Evaluator
from fldiag.problem.problem import Problem
from fldiag.problem.scores import Scores

#: What becomes of batch-norm's running statistics: mixed like the weights, or found anew at every mixture.
Buffers = Literal["mixed", "reestimated"]
#: Weights [P] with the buffers that go with them.
Model = tuple[Tensor, dict[str, Tensor]]


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
        held = {n: b.clone() for n, b in self.problem.buffers.items()}
        for n, b in held.items():
            if b.is_floating_point():
                mixed = sum(
                    a * own[n].double() for a, (_, own) in zip(shares, self.models, strict=True)
                )
                b.copy_(mixed)  # type: ignore[arg-type]
        return held

    @cached_property
    def statistics(self) -> Statistics:
        return Statistics(self.problem)

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
