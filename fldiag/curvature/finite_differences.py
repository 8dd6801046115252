"""Hessian-vector products by central differences of the gradient, for networks that cannot be differentiated twice.

H v is (g(w + h v) - g(w - h v)) / 2h up to the third derivative times h^2 and the gradient's rounding over h, so there is a best
step. It is found by trying: near it, products with neighbouring steps agree best, and by how much they do not is the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fldiag.curvature.operator import Operator

#: Steps that are tried, each so many times the one before; the middle one balances both errors where all derivatives are alike.
TRIED, FACTOR = 9, 4.0


@dataclass(frozen=True)
class DifferenceStep:
    """``length`` of the step to both sides, and the relative ``error`` of a product."""

    length: float
    error: float

    def __str__(self) -> str:
        return f"differences, step {self.length:.0e}, error {self.error:.0e}"


class Differences(Operator):
    """``v -> Hv`` in float64 from ``gradient`` [P] -> [P] in float64; steps of length ``step`` whatever the length of v."""

    form = "differences"

    def __init__(self, gradient: Callable[[Tensor], Tensor], w: Tensor, step: float):
        super().__init__(w, [1.0])
        self._gradient, self._step = gradient, step

    def _prepare(self, i: int) -> None:
        return None

    def _product(self, prepared: None, v: Tensor) -> Tensor | None:
        length = float(v.double().norm())
        return (
            difference(self._gradient, self._w, v, self._step / length) * length if length else None
        )


def difference(gradient: Callable[[Tensor], Tensor], w: Tensor, v: Tensor, t: float) -> Tensor:
    """The product with v over the length of v; ``t``: the step in units of v."""
    at = [(w.double() + sign * t * v.double()).to(w) for sign in (1, -1)]
    length = float((at[0].double() - at[1].double()).norm())  # of the step as rounded
    return (gradient(at[0]) - gradient(at[1])) / length


def best_step(gradient: Callable[[Tensor], Tensor], w: Tensor, v: Tensor) -> DifferenceStep:
    """The step at which products agree best with those of its neighbours; 2 ``TRIED`` gradients.

    The direction is H v, in which the large eigenvalues weigh more than in v.
    """
    middle = torch.finfo(w.dtype).eps ** (1 / 3) * (float(w.double().norm()) or 1.0)
    first = difference(gradient, w, v, middle / float(v.double().norm()))
    direction = first if float(first.norm()) > 0 else v.double()
    lengths = [middle * FACTOR ** (i - TRIED // 2) for i in range(TRIED)]
    products = [
        difference(gradient, w, direction, length / float(direction.norm())) for length in lengths
    ]
    apart = [float((a - b).norm()) for a, b in pairwise(products)]
    errors = {i: max(apart[i - 1], apart[i]) for i in range(1, TRIED - 1)}
    best = min(errors, key=lambda i: errors[i])
    size = float(products[best].norm())
    return DifferenceStep(lengths[best], errors[best] / size if size else 0.0)
