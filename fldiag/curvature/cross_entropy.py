"""Cross entropy of many classes with its curvature in closed form, for products that differentiate its gradient.

Of a row of logits z with p = softmax(z), target weights q and their sum Q (1 for a plain label)::

    loss -q^T log p        gradient Q p - q        Hessian Q (diag p - p p^T)

By automatic differentiation the gradient's graph holds several tensors as large as the outputs, [N, T, V] for a language model.
Here it holds one, the gradient: the layer before needs it anyway, and Q p is the gradient plus q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

#: Fewer classes are left to torch: what is saved is small then, and its own product is one call.
MANY = 512


@dataclass(frozen=True)
class _Targets:
    """q = label * onehot(y) + mask * spread, row by row: ``y``, ``label`` and ``mask`` [...], ``spread`` [V] (None: 0)."""

    y: Tensor
    label: Tensor
    mask: Tensor
    spread: Tensor | None

    @property
    def total(self) -> Tensor:
        """Q [...]."""
        return self.label if self.spread is None else self.label + self.mask * self.spread.sum()

    def add_to(self, rows: Tensor, factor: Tensor) -> Tensor:
        """rows [..., V] plus factor [...] times q, in place: q itself would be as large as the outputs."""
        rows.scatter_add_(-1, self.y.unsqueeze(-1), (factor * self.label).unsqueeze(-1))
        if self.spread is not None:
            rows.addcmul_((factor * self.mask).unsqueeze(-1), self.spread)
        return rows


class _Losses(torch.autograd.Function):
    """The loss of every row, [..., V] -> [...]."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, targets: _Targets) -> Tensor:
        ctx.save_for_backward(z)
        ctx.targets = targets
        logs = F.log_softmax(z, -1)
        losses = -targets.label * logs.gather(-1, targets.y.unsqueeze(-1)).squeeze(-1)
        return losses if targets.spread is None else losses - targets.mask * (logs @ targets.spread)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        if (
            g.requires_grad
        ):  # the row's loss enters something that is not linear: g has derivatives, too
            p, factor = F.softmax(z, -1), ctx.targets.total
            return (
                ctx.targets.add_to(p * factor.unsqueeze(-1), -torch.ones_like(factor))
                * g.unsqueeze(-1)
            ), None
        return _Slope.apply(z, g, ctx.targets), None


class _Slope(torch.autograd.Function):
    """The gradient of the sum of the rows' losses with weights g [...], which are constants: g (Q p - q)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, g: Tensor, targets: _Targets) -> Tensor:
        slope = targets.add_to(F.softmax(z, -1).mul_((g * targets.total).unsqueeze(-1)), -g)
        ctx.save_for_backward(slope, g)
        ctx.targets = targets
        return slope

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, None, None]:
        slope, g = ctx.saved_tensors
        mass = ctx.targets.add_to(slope.clone(), g)  # g Q p
        total = (g * ctx.targets.total).unsqueeze(-1)
        product = mass * u
        mean = product.sum(-1, keepdim=True) / total.where(total != 0, torch.ones_like(total))
        return product.addcmul_(mass, mean, value=-1), None, None


class ClosedForm(TorchFunctionMode):
    """Context in which torch's cross entropy of class labels, wherever a model or a loss calls it, is the one above from ``MANY``
    classes on."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            loss = _closed_form(*args, **kwargs)
            if loss is not None:
                return loss
        return func(*args, **kwargs)


def _closed_form(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """As ``F.cross_entropy``; None where it is not for this."""
    if (
        size_average is not None
        or reduce is not None
        or input.ndim < 2
        or input.shape[1] < MANY
        or target.is_floating_point()
        or target.shape != input[:, 0].shape
        or torch._C._functorch.is_functorch_wrapped_tensor(input)
    ):
        return None
    mask = target != ignore_index
    y = target.masked_fill(~mask, 0)
    counts = mask.to(input.dtype) if weight is None else weight[y] * mask
    spread = None
    if label_smoothing:
        each = label_smoothing / input.shape[1]
        spread = input.new_full(input.shape[1:2], each) if weight is None else weight * each
    targets = _Targets(y, counts * (1 - label_smoothing), mask.to(input.dtype), spread)
    losses: Tensor = _Losses.apply(input.movedim(1, -1), targets)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()
