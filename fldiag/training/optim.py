"""Base optimisers over rows, with the semantics of ``torch.optim`` (a test compares them step by step)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from fldiag.params import norm
from fldiag.sections import TrainSection


class SGD:
    """v := r v + (g + wd w), v := g at first; w := w - lr v (nesterov: w - lr (g + r v)). Fresh every round."""

    def __init__(self, train: TrainSection, w: Tensor, v: Tensor | None = None):
        """``v`` [K, P]: momentum kept from an earlier round, updated in place (zero is a fresh start)."""
        self.train, self.v = train, v

    def step(
        self, w: Tensor, g: Tensor, decay: float | Tensor = 0.0, *, lr: float | Tensor
    ) -> None:
        """Update the rows w [k, P] in place; g [k, P] is overwritten. ``decay`` joins the weight decay. ``lr``: one for all
        rows, or [k, 1]."""
        train = self.train
        is_on_cpu = w.is_contiguous() and w.device.type == "cpu"
        if (
            isinstance(lr, float) and isinstance(decay, float) and is_on_cpu
        ):  # one pass over the rows
            v = [None if self.v is None else self.v[: len(w)]]
            sgd(
                [w],
                [clip(train, g)],
                v,
                weight_decay=decay + train.weight_decay,
                momentum=train.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=train.nesterov,
                maximize=False,
                fused=True,
            )
            self.v = v[0]
            return
        g = prepare(train, w, g, decay)
        if train.momentum:
            self.v = g.clone() if self.v is None else self.v[: len(w)].mul_(train.momentum).add_(g)
            g = g.add_(self.v, alpha=train.momentum) if train.nesterov else self.v
        if isinstance(lr, Tensor):
            w.sub_(g * lr)
        else:
            w.sub_(g, alpha=lr)


class Adam:
    """Adam with PyTorch's defaults (betas 0.9 and 0.999, eps 1e-8, weight decay added to the gradient)."""

    def __init__(self, train: TrainSection, w: Tensor, v: Tensor | None = None):
        self.train, self.count = train, 0
        self.m, self.s = torch.zeros_like(w), torch.zeros_like(w)

    def step(
        self, w: Tensor, g: Tensor, decay: float | Tensor = 0.0, *, lr: float | Tensor
    ) -> None:
        g = prepare(self.train, w, g, decay)
        self.count += 1
        m, s = self.m[: len(w)], self.s[: len(w)]
        m.lerp_(g, 1 - 0.9)
        s.mul_(0.999).addcmul_(g, g, value=1 - 0.999)
        scale = s.sqrt().div_((1 - 0.999**self.count) ** 0.5).add_(1e-8)
        corrected = 1 - 0.9**self.count
        if isinstance(lr, Tensor):
            w.sub_(m / scale * (lr / corrected))
        else:
            w.addcdiv_(m, scale, value=-lr / corrected)


def prepare(train: TrainSection, w: Tensor, g: Tensor, decay: float | Tensor) -> Tensor:
    """Clip the (corrected) gradient of each client, then add weight decay; in place."""
    g = clip(train, g)
    if isinstance(decay, Tensor):
        return g.add_(w * (decay + train.weight_decay))
    decay += train.weight_decay
    return g.add_(w, alpha=decay) if decay else g


def clip(train: TrainSection, g: Tensor) -> Tensor:
    return g if train.clip is None else g.mul_((train.clip / (norm(g) + 1e-6)).clamp_(max=1.0))


OPTIMIZERS: dict[str, type[SGD] | type[Adam]] = {"sgd": SGD, "adam": Adam}
