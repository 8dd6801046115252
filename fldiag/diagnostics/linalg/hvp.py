"""Hessian-vector products of a loss that is a weighted sum of batch losses.

H v is the derivative of the gradient in direction v, by differentiating the gradient's own graph
(Pearlmutter 1994, in its reverse-over-reverse form), which works for any network autograd can
differentiate twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fldiag.errors import FldiagError


def _derivative(loss: Tensor, w: Tensor, twice: bool) -> Tensor | None:
    """d loss / d w, or None where the loss does not depend on w."""
    if not loss.requires_grad:
        return None
    return torch.autograd.grad(loss, w, create_graph=twice, allow_unused=True)[0]


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


class Hessian:
    """The Hessian of ``sum_i weights[i] * losses[i](w)`` at ``w`` as an operator ``H(v) -> Hv``.

    ``losses[i]`` takes a weight vector [P] that requires a gradient and returns the scalar loss of batch i.
    The graphs of the gradients of the first ``keep`` batches stay alive from one product to the next, which
    saves about 40 % of each product; the others are rebuilt every time. ``products`` counts the products.
    """

    def __init__(self, losses: Sequence[Callable[[Tensor], Tensor]], weights: Sequence[float], w: Tensor,
                 keep: int = 0):
        self._losses, self._weights, self._keep = list(losses), list(weights), keep
        self._w = w.detach().clone().requires_grad_()
        self._kept: dict[int, Tensor | None] = {}
        self.products = 0

    @property
    def size(self) -> int:
        return self._w.numel()

    def _gradient(self, i: int) -> Tensor | None:
        """The gradient of batch i with its graph."""
        if i in self._kept:
            return self._kept[i]
        # fused attention has no second derivative
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            gradient = _derivative(self._losses[i](self._w), self._w, twice=True)
        if not self.products and gradient is not None:  # every batch has the same operations
            _refuse_dead_ends(gradient)
        if i < self._keep:
            self._kept[i] = gradient
        return gradient

    def __call__(self, v: Tensor) -> Tensor:
        """H v [P] in float64; the batches are summed in float64.

        Raises FldiagError when v has another size, or when a part of the model has no second derivative.
        """
        if v.shape != self._w.shape:
            raise FldiagError(f"the vector has shape {list(v.shape)}, the weights have {list(self._w.shape)}",
                              "give a vector as long as the weights")
        v = v.detach().to(self._w)
        total = torch.zeros_like(self._w, dtype=torch.float64)
        for i, weight in enumerate(self._weights):
            gradient = self._gradient(i)
            if gradient is None or not gradient.requires_grad:  # linear in w: no curvature
                continue
            try:
                part, = torch.autograd.grad(gradient, self._w, v, retain_graph=i in self._kept)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise FldiagError(f"the model cannot be differentiated twice: {error}",
                                  "replace that operation by a twice differentiable one") from error
            total.add_(part.detach(), alpha=weight)
        self.products += 1
        return total

    def release(self) -> None:
        """Frees the kept graphs; the operator still works."""
        self._kept.clear()
