"""Projections of the local gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fldiag.method import Part
from fldiag.params import dot, norm
from fldiag.parts.perturbation import noise_floor
from fldiag.step import Output, Step


def project(g: Tensor, onto: Tensor) -> Tensor:
    """g - (<g, h> / ||h||^2) h where <g, h> < 0, else g; h = ``onto``; row by row."""
    inner, square = dot(g, onto), dot(onto, onto)
    conflict = (inner < 0) & (square > 0)
    return torch.where(conflict, g - inner / square.clamp(min=torch.finfo(g.dtype).tiny) * onto, g)


class ProximalProjection(Part):
    """g_u = g_l - (<g_l, g_p> / ||g_p||^2) g_p when <g_l, g_p> < 0, else g_l (FedSOL, Lee et al. 2024, Eq. 3).

    Unchanged where g_p is rounding noise (the first step of a round).
    ``loss_p`` None: L_p = ||w - w_g||^2 / 2, whose gradient is w - w_g.
    """

    def __init__(self, loss_p: Callable[[Step, Output], Tensor] | None):
        self.loss_p = loss_p

    def correct(self, step: Step, g: Tensor) -> Tensor:
        if self.loss_p is None:
            return project(g, step.w - step.local.w_g)
        g_p = step.gradient(self.loss_p)[1]
        return torch.where(norm(g_p) >= noise_floor(g_p.dtype), project(g, g_p), g)
