"""Where the local and the proximal gradient are taken: the strategies A0 to A6 of FedSOL's ablation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from fldiag.parts.perturbation import ProximalPerturbation, ascent
from fldiag.step import Output, Perturbation, Step

#: id -> the point of grad L_l, the point of grad L_p (None: no such term): w, w + eps_p or w + eps_c
POINTS: dict[str, tuple[str, str | None]] = {
    "A0": ("w", None), "A1": ("p", None), "A2": ("w", "p"), "A3": ("p", "p"), "A4": ("c", "c"), "A5": ("w", "w"),
    "A6": ("p", "w")}


class Strategy(ProximalPerturbation):
    """g_u = grad L_l(w or w + eps) + beta grad L_p(w or w + eps) (Lee et al. 2024, Table 10).

    eps_p = rho Lambda g_p / ||g_p||, eps_c = rho Lambda (g_p + g_l) / ||g_p + g_l||, as in ``ProximalPerturbation``.
    """

    def __init__(self, id: str, beta: float, loss: Callable[[Step, Output], Tensor] | None, rho: float,
                 part: Literal["full", "body", "head"], strength: Literal["fixed", "adaptive"]):
        super().__init__(loss, rho, part, strength, "layer", None)
        self.term = loss
        self.local_at, self.proximal_at = POINTS[id]
        self.beta = beta if self.proximal_at else 0.0

    def point(self, step: Step, which: str | None) -> Perturbation | None:
        if which == "c":
            return self.combined(step)
        return super().perturb(step) if which == "p" else None

    def combined(self, step: Step) -> Perturbation | None:
        """eps_c, along the gradient of L_l + L_p."""
        if not self.rho:
            return None
        start, stop = self.bounds(step.local.network.layout)
        g_p = self.gradient_at_w(step)
        g = (step.local_gradient()[1] + g_p)[:, start:stop]
        e = ascent(g, self.rho)
        if self.strength == "adaptive":
            e = e * self.strengths(step, start, stop)
        return Perturbation(e, start, stop)

    def gradient_at_w(self, step: Step) -> Tensor:
        """g_p over all parameters, [k, P]."""
        if self.term is None:
            d = step.w - step.local.w_g
            step.publish("l2", d)
            return d
        value, g = step.gradient(self.term)
        step.publish(str(self.term), g, value)
        return g

    def perturb(self, step: Step) -> Perturbation | None:
        e = self.point(step, self.local_at)
        step.local.memo["strategy"] = e
        return e

    def correct(self, step: Step, g: Tensor) -> Tensor:
        if not self.beta:
            return g
        at = self.proximal_at
        e = step.local.memo["strategy"] if at == self.local_at else self.point(step, at)
        if self.term is not None:
            return g.add_(self.gradient_at_w(step) if e is None else step.gradient(self.term, e)[1], alpha=self.beta)
        centre = step.local.w_g.expand_as(step.w)
        if e is not None:
            centre = centre.clone()
            centre[:, e.start: e.stop] -= e.value
        return step.pull(g, centre, self.beta)
