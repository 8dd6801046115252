"""Curvature products by automatic differentiation, for any network autograd can differentiate twice.

Hessian: H v is the derivative of the gradient in direction v, by differentiating the gradient's own graph
(Pearlmutter 1994, in its reverse-over-reverse form). Gauss-Newton: J^T H_L J v (Schraudolph 2002), with J v
as the derivative of the linear function u -> J^T u.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fldiag.curvature.operator import Operator, add
from fldiag.errors import FldiagError, out_of_memory
from fldiag.params import Layout

#: The weights as a batch's loss takes them: the vector [P], or its named tensors.
Weights = Any
#: (weights) -> (outputs, loss) of a batch
OutputsAndLoss = Callable[[Weights], tuple[Any, Callable[[Any], Tensor]]]
Parts = list[Tensor | None]


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Graphs are recorded, and attention runs in a kernel that has a second derivative, which the fused ones have not. What
    was allowed before is allowed again afterwards, also after an exception."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        yield


def derivative(
    output: Tensor, at: Sequence[Tensor], v: Tensor | None = None, *, twice: bool = False
) -> Parts:
    """d output / d each of ``at`` (or the derivative's adjoint on ``v``), None where the output does not depend on it.

    Raises FldiagError where autograd cannot.
    """
    if not output.requires_grad:
        return [None] * len(at)
    try:
        return list(torch.autograd.grad(output, at, v, create_graph=twice, allow_unused=True))
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        reason = str(error).partition(" Hint:")[0].rstrip(".")
        raise FldiagError(
            f"the model cannot be differentiated: {reason}",
            "use inplace=False where another layer still needs the values",
        ) from error


def _refuse_dead_ends(gradients: Parts) -> None:
    """A function marked once_differentiable leaves a node that autograd passes over in silence."""
    visited: set[Any] = set()
    stack: list[Any] = [g.grad_fn for g in gradients if g is not None]
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        if node.name().endswith("::Error"):
            raise FldiagError(
                "the model cannot be differentiated twice: it uses a once_differentiable function",
                "give that function a differentiable backward",
            )
        visited.add(node)
        stack += [following for following, _ in node.next_functions]


def _second_derivative(
    outputs: Sequence[Tensor], at: Sequence[Tensor], v: Sequence[Tensor], retain: bool
) -> Parts:
    try:
        parts = torch.autograd.grad(outputs, at, v, retain_graph=retain, allow_unused=True)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        raise FldiagError(
            f"the model cannot be differentiated twice: {error}",
            "replace that operation by a twice differentiable one",
        ) from error
    return [part if part is None else part.detach() for part in parts]


class DoubleBackward(Operator):
    """What is differentiated: the vector of weights, or with a ``layout`` the network's tensors one by one. Then no graph
    gathers or scatters P numbers, which in a deep network on few examples takes as long as the layers."""

    form = "double backward"

    def __init__(self, w: Tensor, shares: Sequence[float], keep: int, layout: Layout | None):
        super().__init__(w, shares, keep)
        self._at: Weights = self._w.requires_grad_()
        self._leaves = [self._w]
        if layout is not None:
            self._at = {
                n: view.detach().requires_grad_() for n, view in layout.views(self._w).items()
            }
            self._leaves = list(self._at.values())
        self._sizes = [leaf.numel() for leaf in self._leaves]

    def __call__(self, v: Tensor) -> Tensor:
        with twice_differentiable():
            return super().__call__(v)

    def _pieces(self, v: Tensor) -> list[Tensor]:
        return [
            piece.view(leaf.shape)
            for piece, leaf in zip(v.split(self._sizes), self._leaves, strict=True)
        ]

    def _add(self, total: Tensor, part: Parts, share: float) -> None:
        for place, piece in zip(total.split(self._sizes), part, strict=True):
            if piece is not None:
                add(place, piece.reshape(-1), share)


class Hessian(DoubleBackward):
    """The Hessian of ``sum_i shares[i] * losses[i](w)`` at ``w`` as an operator ``H(v) -> Hv``.

    ``losses[i]`` takes the weights, which require a gradient, as a vector [P] (with a ``layout``: by name) and returns the
    scalar loss of batch i. The graphs of the gradients of the first ``keep`` batches stay alive from one product to the
    next, which saves about 40 % of each product; the others are rebuilt every time.
    """

    def __init__(
        self,
        losses: Sequence[Callable[[Weights], Tensor]],
        shares: Sequence[float],
        w: Tensor,
        keep: int = 0,
        layout: Layout | None = None,
    ):
        super().__init__(w, shares, keep, layout)
        self._losses = list(losses)

    def _prepare(self, i: int) -> tuple[Parts, bool]:
        """The gradient of batch i with its graph, and whether the graph outlives a product."""
        gradient = derivative(self._losses[i](self._at), self._leaves, twice=True)
        if not self.products:  # every batch has the same operations
            _refuse_dead_ends(gradient)
        return gradient, i < self._keep

    def _product(self, prepared: tuple[Parts, bool], v: Tensor) -> Parts | None:
        gradient, retain = prepared
        pairs = [
            (g, piece)
            for g, piece in zip(gradient, self._pieces(v), strict=True)
            if g is not None and g.requires_grad
        ]
        if not pairs:  # linear in w: no curvature
            return None
        return _second_derivative(
            [g for g, _ in pairs], self._leaves, [piece for _, piece in pairs], retain
        )


class GaussNewton(DoubleBackward):
    """The generalised Gauss-Newton matrix ``sum_i shares[i] J_i^T H_i J_i``: J_i the derivative of batch i's
    outputs, H_i the Hessian of its loss in the outputs.

    ``batches[i]`` takes the weights as above and returns the outputs (a tensor) and the loss as a function of them.
    """

    def __init__(
        self,
        batches: Sequence[OutputsAndLoss],
        shares: Sequence[float],
        w: Tensor,
        keep: int = 0,
        layout: Layout | None = None,
    ):
        super().__init__(w, shares, keep, layout)
        self._batches = list(batches)

    def _prepare(self, i: int) -> tuple[Any, ...] | None:
        z, loss = self._batches[i](self._at)
        if not isinstance(z, Tensor):
            raise FldiagError(
                f"the model returns a {type(z).__name__}: its Gauss-Newton matrix is not defined",
                "let the model return one tensor, or use matrix = 'hessian'",
            )
        if not z.requires_grad:
            return None
        at = z.detach().requires_grad_()
        (slope,) = derivative(loss(at), [at], twice=True)
        u = z.new_zeros(()).expand(z.shape).requires_grad_()  # it is kept, and takes no memory so
        back = derivative(z, self._leaves, u, twice=True)  # J^T u, linear in u
        linear = [b is not None and b.requires_grad for b in back]
        if slope is None or not slope.requires_grad or not any(linear):
            return None
        _refuse_dead_ends(back)
        return z, at, slope, u, back, linear

    def _product(self, prepared: tuple[Any, ...] | None, v: Tensor) -> Parts | None:
        if prepared is None:
            return None
        z, at, slope, *_ = prepared
        curved = _second_derivative([slope], [at], self._forward(prepared, v), True)
        return _second_derivative([z], self._leaves, [c for c in curved if c is not None], True)

    def _forward(self, prepared: tuple[Any, ...], v: Tensor) -> list[Tensor]:
        """J v of a batch, as a list of one."""
        *_, u, back, linear = prepared
        forward = _second_derivative(
            list(compress(back, linear)), [u], list(compress(self._pieces(v), linear)), True
        )
        return [f for f in forward if f is not None]
