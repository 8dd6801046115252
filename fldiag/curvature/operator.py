"""Curvature matrices as operators v -> Mv, by automatic differentiation, for any network that autograd can differentiate twice.

Hessian: H v is the derivative of the gradient's own graph (Pearlmutter, Neural Computation 1994, in its reverse-over-reverse
form). Gauss-Newton: J^T H_L J v (Schraudolph, Neural Computation 2002), with J v as the derivative of the linear u -> J^T u.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad

from fldiag.errors import FldiagError, first_line
from fldiag.sections import Matrix

#: v [P] -> Mv [P], both in float64.
Operator = Callable[[Tensor], Tensor]
#: Weights by name -> outputs of a batch, and its share of the loss as a function of them.
Batch = Callable[[Mapping[str, Tensor]], tuple[Any, Callable[[Any], Tensor]]]
#: Pieces of a vector, one a tensor.
Pieces = Sequence[Tensor]
#: Those of v -> those of its product.
Product = Callable[[Pieces], Pieces]
#: Relative error from which on a derivative is wrong.
WRONG = 1e-3


def slopes(value: Tensor, leaves: Pieces, twice: bool = False) -> Pieces:
    """The gradient of a number in leaves, zero in those on which it does not depend; ``twice``: to be differentiated again."""
    if not value.requires_grad:
        return [torch.zeros_like(t) for t in leaves]
    return grad(value, leaves, create_graph=twice, retain_graph=True, materialize_grads=True)


def pull_back(
    outputs: Pieces,
    leaves: Pieces,
    vectors: Pieces,
    twice: bool = False,
) -> Pieces:
    """J^T v with the derivative J of outputs in leaves, as that of <outputs, v>: ``grad`` with vectors would import sympy."""
    inner: Any = sum((out * v).sum() for out, v in zip(outputs, vectors, strict=True))
    return slopes(inner, leaves, twice)


def hessian_product(z: Any, loss: Callable[[Any], Tensor], leaves: Pieces) -> Product:
    """Products with the Hessian of ``loss(z)`` in the leaves, from which z was computed."""
    gradient = slopes(loss(z), leaves, twice=True)
    return lambda v: pull_back(gradient, leaves, v)


def ggn_product(z: Tensor, loss: Callable[[Any], Tensor], leaves: Pieces) -> Product:
    """Products with J^T H_L J: J is the derivative of z in the leaves, H_L the Hessian of the loss in z."""
    at, u = z.detach().requires_grad_(), torch.zeros_like(z).requires_grad_()
    slope = slopes(loss(at), [at], twice=True)
    back = pull_back([z], leaves, [u], twice=True)  # J^T u, linear in u

    def multiply(v: Pieces) -> Pieces:
        jv = pull_back(back, [u], v)
        return pull_back([z], leaves, pull_back(slope, [at], jv))

    return multiply


class Curvature:
    """The sum over batches of their Hessians or Gauss-Newton matrices, v [P] -> Mv [P] in float64.

    ``products`` counts how often it was multiplied.

    Args:
        batches: functions of the weights.
        weights: name -> tensor; P is the number of all their entries, in this order.
        matrix: hessian or ggn.
        keep: how many batches keep their graph for the next product, which saves about 40 % of it.
        shift: a multiple of the identity that is added.

    >>> square = Curvature([lambda w: (w["a"], lambda z: z.square().sum())], {"a": torch.ones(2)})
    >>> square(torch.tensor([1.0, 3.0])), square.products
    (tensor([2., 6.], dtype=torch.float64), 1)
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        weights: Mapping[str, Tensor],
        *,
        matrix: Matrix = "hessian",
        keep: int = 0,
        shift: float = 0.0,
    ):
        self.batches, self.keep, self.shift, self.products = batches, keep, shift, 0
        self.weights = {n: t.detach().clone().requires_grad_() for n, t in weights.items()}
        self.sizes = [t.numel() for t in self.weights.values()]
        self.size = sum(self.sizes)
        self._form = hessian_product if matrix == "hessian" else ggn_product
        self._graphs: dict[int, Product] = {}

    def _product(self, i: int) -> Product:
        if i in self._graphs:
            return self._graphs[i]
        product = self._form(*self.batches[i](self.weights), [*self.weights.values()])
        if i < self.keep:
            self._graphs[i] = product
        return product

    def __call__(self, v: Tensor) -> Tensor:
        """The product with v [P].

        Raises FldiagError for a vector of another length, a product that is not finite, and a model that cannot be
        differentiated twice.
        """
        if v.shape != (self.size,):
            raise FldiagError(
                f"a vector {list(v.shape)} for a matrix of {self.size} rows",
                "give one entry a weight",
            )
        total = self.shift * v.double()
        leaves = self.weights.values()
        pieces = [p.view_as(t).to(t) for p, t in zip(v.split(self.sizes), leaves, strict=True)]
        for i in range(len(self.batches)):
            try:
                with torch.enable_grad():
                    parts = self._product(i)(pieces)
            except RuntimeError as error:
                text = f"the model cannot be differentiated twice: {first_line(error)}"
                raise FldiagError(text, "replace the operation that has no derivative") from error
            for place, part in zip(total.split(self.sizes), parts, strict=True):
                place += part.detach().reshape(-1)
        self.products += 1
        return finite(total)


class Differences:
    """Products v -> Hv [P] in float64 by central differences of a gradient [P] -> [P], for what cannot be differentiated twice.

    The step is the cube root of the rounding error, relative to the weights: there, the error of the formula and that of
    rounding are about alike (Nocedal and Wright, *Numerical Optimization*, 8.1).
    """

    def __init__(self, gradient: Callable[[Tensor], Tensor], w: Tensor, sizes: Sequence[int] = ()):
        self.gradient, self.w, self.size, self.products = gradient, w, len(w), 0
        self.sizes = sizes
        self.step = torch.finfo(w.dtype).eps ** (1 / 3) * max(1.0, float(w.double().norm()))

    def __call__(self, v: Tensor) -> Tensor:
        self.products += 1
        length = float(v.double().norm())
        return finite(self.along(v / length, self.step) * length) if length else v.double()

    def noise(self) -> float:
        """The relative error of a product, as the step decides it: that along the image of the gradient with half the step."""
        v = self.gradient(self.w)
        v = self(v if bool(v.any()) else torch.ones_like(v))
        v = v / v.norm()
        whole, half = (self.along(v, self.step * factor) for factor in (1, 0.5))
        return float((whole - half).norm() / whole.norm())

    def along(self, v: Tensor, step: float) -> Tensor:
        """The product with v of unit length, by steps of this length."""
        ahead, behind = ((self.w.double() + s * v.double()).to(self.w) for s in (step, -step))
        apart = float((ahead.double() - behind.double()).norm())  # as rounded
        return (self.gradient(ahead) - self.gradient(behind)) / apart

    def show(self, derivative: Operator, ways: Pieces, step: float, floor: float) -> bool:
        """Whether they show a derivative along one of the ways: a shorter step crosses fewer kinks, a longer one rounds less."""
        for h, v in product((step, step / 10), ways):
            expected = self.along(v, h)
            error = float((derivative(v) - expected).norm())
            if error <= WRONG * max(float(expected.norm()), floor):
                return True
        return False


def finite(value: Tensor) -> Tensor:
    """The value. Raises FldiagError where it holds NaN or infinity."""
    if not bool(torch.isfinite(value.norm())):
        raise FldiagError(
            "the loss, its gradient or a product with its Hessian is not finite: the training diverged, the data hold NaN, no "
            "label counts, or there is a root or logarithm at 0",
            "use dtype float64, or weights from before it diverged; keep arguments off 0, for example sqrt(x + 1e-12)",
        )
    return value
