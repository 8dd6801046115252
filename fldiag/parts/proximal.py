"""Proximal losses L_p(w; w_g): how far a client has moved from the model it received."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fldiag import losses
from fldiag.method import Part
from fldiag.step import Output, Step


class ProximalLoss(Protocol):
    """What a method needs of L_p: its gradient at a step's weights.

    ``kind``: its name in tables. ``exact``: at w = w_g the computed gradient is zero, not rounding noise.
    ``needs``: as of a part.
    """

    kind: str
    exact: bool
    needs: tuple[str, ...]

    def gradient(self, step: Step) -> tuple[Tensor | None, Tensor]:
        """Value [k] (None: it does not come with the gradient) and gradient [k, P] at w on the step's minibatch."""
        ...


class KL:
    """L_p = mean_x KL(softmax(f(x; w_g)/tau) || softmax(f(x; w)/tau)), the received model constant (FedSOL's default)."""

    exact = False
    needs: tuple[str, ...] = ("classes",)

    def __init__(self, tau: float):
        self.tau, self.kind = tau, losses.proximal_name("kl", tau)

    def term(self, step: Step, out: Output) -> Tensor:
        return step.mean(losses.kl(step.received_logits(), out.logits, self.tau))

    def gradient(self, step: Step) -> tuple[Tensor | None, Tensor]:
        return step.gradient(self.term)


class L2:
    """L_p = ||w - w_g||^2 / 2, whose gradient is w - w_g."""

    kind, exact = "l2", True
    needs: tuple[str, ...] = ()

    def gradient(self, step: Step) -> tuple[Tensor | None, Tensor]:
        return None, step.w - step.local.w_g


class Proximal(Part):
    """g := g + mu (w - w_g), the gradient of mu/2 ||w - w_g||^2 (FedProx, Li et al. 2020, Eq. 2)."""

    def __init__(self, mu: float):
        self.mu = mu

    def correct(self, step: Step, g: Tensor) -> Tensor:
        if step.recording and self.mu:
            step.note_proximal("l2", step.w - step.local.w_g)
        return step.pull(g, step.local.w_g, self.mu)


class NotTrueDistillation(Part):
    """Adds mu tau^2 mean_x KL(softmax(zg_{not y}/tau) || softmax(z_{not y}/tau)): the true-class logit is
    removed from both, zg from the received model (FedNTD, Lee et al. 2022, Eq. 5-6)."""

    needs = ("classes",)

    def __init__(self, mu: float, tau: float):
        self.mu, self.tau = mu, tau

    def loss(self, step: Step, out: Output) -> Tensor | None:
        if not self.mu:
            return None
        index = not_true(out.logits.shape[-1], step.y)
        teacher = step.received_logits().gather(-1, index)
        student = out.logits.gather(-1, index)
        return self.mu * self.tau**2 * step.mean(losses.kl(teacher, student, self.tau))


def not_true(classes: int, y: Tensor) -> Tensor:
    """Indices of the classes other than y: [k, B] -> [k, B, C - 1]."""
    index = torch.arange(classes - 1, device=y.device).expand(*y.shape, -1)
    return index + (index >= y.unsqueeze(-1))
