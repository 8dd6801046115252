"""Curvature products by automatic differentiation, for any network autograd can differentiate twice.

Hessian: H v is the derivative of the gradient in direction v, by differentiating the gradient's own graph
(Pearlmutter 1994, in its reverse-over-reverse form), or by forward over reverse with the forward pass
recorded once (``Linearized``). Gauss-Newton: J^T H_L J v (Schraudolph 2002), with J v as the derivative of
the linear function u -> J^T u.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fldiag.diagnostics.linalg.operator import Operator
from fldiag.errors import FldiagError

#: (w) -> (outputs, loss) of a batch
OutputsAndLoss = Callable[[Tensor], tuple[Any, Callable[[Any], Tensor]]]


def derivative(output: Tensor, w: Tensor, v: Tensor | None = None, *, twice: bool = False) -> Tensor | None:
    """d output / d w (or the derivative's adjoint on ``v``), or None where the output does not depend on w.

    Raises FldiagError where autograd cannot.
    """
    if not output.requires_grad:
        return None
    try:
        return torch.autograd.grad(output, w, v, create_graph=twice, allow_unused=True)[0]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise FldiagError(f"the model cannot be differentiated: {str(error).partition(' Hint:')[0].rstrip('.')}",
                          "let operations in place work on copies of what another layer still needs (inplace=False)") from error


def _refuse_dead_ends(gradient: Tensor) -> None:
    """A function marked once_differentiable leaves a node that autograd passes over in silence."""
    seen: set[Any] = set()
    todo = [gradient.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node.name().endswith("::Error"):
            raise FldiagError("the model cannot be differentiated twice: "
                              "it uses a once_differentiable function",
                              "give that function a differentiable backward")
        seen.add(node)
        todo += [following for following, _ in node.next_functions]


def _again(output: Tensor, at: Tensor, v: Tensor, retain: bool) -> Tensor:
    try:
        part, = torch.autograd.grad(output, at, v, retain_graph=retain)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise FldiagError(f"the model cannot be differentiated twice: {error}",
                          "replace that operation by a twice differentiable one") from error
    return part.detach()


class Hessian(Operator):
    """The Hessian of ``sum_i weights[i] * losses[i](w)`` at ``w`` as an operator ``H(v) -> Hv``.

    ``losses[i]`` takes a weight vector [P] that requires a gradient and returns the scalar loss of batch i.
    The graphs of the gradients of the first ``keep`` batches stay alive from one product to the next, which
    saves about 40 % of each product; the others are rebuilt every time.
    """

    form = "double backward"

    def __init__(self, losses: Sequence[Callable[[Tensor], Tensor]], weights: Sequence[float], w: Tensor,
                 keep: int = 0):
        super().__init__(w.detach().clone().requires_grad_(), weights, keep)
        self._losses = list(losses)

    def _prepare(self, i: int) -> tuple[Tensor | None, bool]:
        """The gradient of batch i with its graph, and whether the graph outlives a product."""
        # fused attention has no second derivative
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            gradient = derivative(self._losses[i](self._w), self._w, twice=True)
        if not self.products and gradient is not None:  # every batch has the same operations
            _refuse_dead_ends(gradient)
        return gradient, i < self._keep

    def _product(self, prepared: tuple[Tensor | None, bool], v: Tensor) -> Tensor | None:
        gradient, retain = prepared
        if gradient is None or not gradient.requires_grad:  # linear in w: no curvature
            return None
        return _again(gradient, self._w, v, retain)


class GaussNewton(Operator):
    """The generalised Gauss-Newton matrix ``sum_i weights[i] J_i^T H_i J_i``: J_i the derivative of batch i's
    outputs, H_i the Hessian of its loss in the outputs.

    ``batches[i]`` takes w [P] and returns the outputs (a tensor) and the loss as a function of them.
    """

    form = "double backward"

    def __init__(self, batches: Sequence[OutputsAndLoss], weights: Sequence[float], w: Tensor, keep: int = 0):
        super().__init__(w.detach().clone().requires_grad_(), weights, keep)
        self._batches = list(batches)

    def _prepare(self, i: int) -> tuple[Tensor, ...] | None:
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            z, loss = self._batches[i](self._w)
            if not isinstance(z, Tensor):
                raise FldiagError(f"the model returns a {type(z).__name__}: its Gauss-Newton matrix is not defined",
                                  "let the model return one tensor, or use matrix = 'hessian'")
            if not z.requires_grad:
                return None
            at = z.detach().requires_grad_()
            slope = derivative(loss(at), at, twice=True)
            u = torch.zeros_like(z, requires_grad=True)
            back = derivative(z, self._w, u, twice=True)  # J^T u, linear in u
        if slope is None or back is None or not slope.requires_grad or not back.requires_grad:
            return None
        _refuse_dead_ends(back)
        return z, at, slope, u, back

    def _product(self, prepared: tuple[Tensor, ...] | None, v: Tensor) -> Tensor | None:
        if prepared is None:
            return None
        z, at, slope, u, back = prepared
        forward = _again(back, u, v, True)
        curved = _again(slope, at, forward, True)
        return _again(z, self._w, curved, True)


class Linearized(Operator):
    """The Hessian by ``torch.func.linearize`` of the gradient: each product only replays the derivative.

    It needs seconds to record a batch, forward-mode derivatives of every operation, and it keeps every batch; a
    product then takes 0.9 to 1.5 times one by double backward (residual networks on one core). So it pays, if at
    all, over hundreds of products, and is never chosen unless asked for.
    """

    form = "linearize"

    def __init__(self, losses: Sequence[Callable[[Tensor], Tensor]], weights: Sequence[float], w: Tensor):
        super().__init__(w.detach().clone(), weights, keep=len(weights))
        self._losses = list(losses)

    def _prepare(self, i: int) -> Callable[[Tensor], Tensor]:
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the names of constants in the recorded graph
            _, product = torch.func.linearize(torch.func.grad(self._losses[i]), self._w)
        return product

    def _product(self, prepared: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        with torch.no_grad():
            return prepared(v)
