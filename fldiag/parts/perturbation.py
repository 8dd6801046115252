"""Perturbations e(w): the local gradient is taken at w + e."""

from __future__ import annotations

from fldiag.losses import GUARD, perturbation
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
        if self.adaptive:
            size = step.w.abs()
            scaled = size * g
            e = self.rho * size * scaled / (norm(scaled) + self.guard)
        else:
            e = perturbation(g, self.rho, guard=self.guard)
        return Perturbation(e, 0, e.shape[-1])
