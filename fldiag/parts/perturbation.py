"""Perturbations e(w): the local gradient is taken at w + e."""

from __future__ import annotations

from torch import Tensor

from fldiag.losses import GUARD
from fldiag.method import Part, Perturbation
from fldiag.params import norm
from fldiag.step import Step


class Sharpness(Part):
    """e = rho g / (||g|| + 1e-12), g the local gradient on the same minibatch (SAM, Foret et al. 2021);
    adaptive: e = rho w^2 g / (|| |w| g || + 1e-12) (ASAM, Kwon et al. 2021, without the constant eta)."""

    def __init__(self, rho: float, adaptive: bool = False, guard: float = GUARD):
        self.rho, self.adaptive, self.guard = rho, adaptive, guard

    def perturb(self, step: Step) -> Perturbation | None:
        if not self.rho:
            return None
        _, g = step.local_gradient()
        e = ascent(g, self.rho, step.w.abs() if self.adaptive else None, self.guard)
        return Perturbation(e, 0, e.shape[-1])


def ascent(g: Tensor, rho: float, scale: Tensor | None = None, guard: float = GUARD) -> Tensor:
    """rho T^2 g / (||T g|| + guard), row by row; T = 1 without ``scale``."""
    if scale is None:
        return rho * g / (norm(g) + guard)
    scaled = scale * g
    return rho * scale * scaled / (norm(scaled) + guard)
