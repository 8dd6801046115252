"""Proximal losses L_p(w; w_g): how far a client has moved from the model it received."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fldiag.errors import FldiagError
from fldiag.method import Part
from fldiag.params import dot
from fldiag.step import KL, Output, Step

if TYPE_CHECKING:
    from fldiag.config import Config
    from fldiag.data import Dataset
    from fldiag.models.network import Network


def kl(tau: float) -> Callable[[Step, Output], Tensor]:
    """KL(received || own model) of the outputs at temperature tau, [k]."""
    return KL(tau)


def l2(step: Step, out: Output) -> Tensor:
    """||w - w_g||^2 / 2, [k]."""
    d = out.leaf - step.local.w_g
    return 0.5 * dot(d, d).squeeze(-1)


class Proximal(Part):
    """g := g + mu (w - w_g), the gradient of mu/2 ||w - w_g||^2 (FedProx, Li et al. 2020, Eq. 2)."""

    def __init__(self, mu: float):
        self.mu = mu

    def correct(self, step: Step, g: Tensor) -> Tensor:
        if step.recording and self.mu:
            step.publish("l2", step.w - step.local.w_g)
        return step.pull(g, step.local.w_g, self.mu)


class NotTrueDistillation(Part):
    """Adds mu tau^2 mean_x KL(softmax(zg_{not y}/tau) || softmax(z_{not y}/tau)): the true-class logit is
    removed from both, zg from the received model (FedNTD, Lee et al. 2022, Eq. 5-6)."""

    def __init__(self, mu: float, tau: float):
        self.mu, self.tau = mu, tau

    def check(self, network: Network, dataset: Dataset, config: Config) -> None:
        if dataset.regression:
            raise FldiagError("not-true distillation needs class labels, the data set has real targets",
                              "use another method for regression", usage=True)

    def loss(self, step: Step, out: Output) -> Tensor | None:
        if not self.mu:
            return None
        others = not_true(out.logits.shape[-1], step.y)
        teacher = step.received_logits().gather(-1, others)
        log_t = F.log_softmax(teacher / self.tau, dim=-1)
        log_s = F.log_softmax(out.logits.gather(-1, others) / self.tau, dim=-1)
        return self.mu * self.tau**2 * step.mean((log_t.exp() * (log_t - log_s)).sum(-1))


def not_true(classes: int, y: Tensor) -> Tensor:
    """Indices of the classes other than y: [k, B] -> [k, B, C - 1]."""
    index = torch.arange(classes - 1, device=y.device).expand(*y.shape, -1)
    return index + (index >= y.unsqueeze(-1))
