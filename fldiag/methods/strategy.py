"""Strategies A0 to A6 of FedSOL's ablation: where the local and the proximal gradient are taken."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from fldiag.method import Method, Perturbation, method
from fldiag.methods.fedsol import FedSOL, Rho, radius
from fldiag.parts.proximal import KL, L2
from fldiag.sections import NonNegative, Positive, Rule, Strength
from fldiag.step import Step

#: id -> the point of grad L_l, the point of grad L_p (None: no such term): w, w + eps_p or w + eps_c
POINTS: dict[str, tuple[str, str | None]] = {
    "A0": ("w", None),
    "A1": ("p", None),
    "A2": ("w", "p"),
    "A3": ("p", "p"),
    "A4": ("c", "c"),
    "A5": ("w", "w"),
    "A6": ("p", "w"),
}


class Strategy(FedSOL):
    """g_u = grad L_l(w or w + eps) + beta grad L_p(w or w + eps) (Lee et al. 2024, Table 10).

    eps_p is FedSOL's e, eps_c = rho Lambda (g_p + g_l) / ||g_p + g_l|| (Eq. 13).
    """

    def __init__(self, id: str, beta: float, *options: Any):
        super().__init__(*options)
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
        g_p = self.gradient_at_w(step)
        g = step.local_gradient()[1] + g_p
        return self.along(step, g[:, slice(*self.span(step))])

    def gradient_at_w(self, step: Step) -> Tensor:
        """g_p over all parameters, [k, P]."""
        value, g_p = self.loss_p.gradient(step)
        step.note_proximal(self.loss_p.kind, g_p, value)
        return g_p

    def perturb(self, step: Step) -> Perturbation | None:
        e = self.point(step, self.local_at)
        step.local.memo["strategy"] = e
        return e

    def correct(self, step: Step, g: Tensor) -> Tensor:
        if not self.beta:
            return g
        at = self.proximal_at
        e = step.local.memo["strategy"] if at == self.local_at else self.point(step, at)
        if isinstance(self.loss_p, KL):
            g_p = self.gradient_at_w(step) if e is None else step.gradient(self.loss_p.term, e)[1]
            return g.add_(g_p, alpha=self.beta)
        centre = step.local.w_g.expand_as(step.w)  # the gradient of l2 at w + e is w - (w_g - e)
        if e is not None:
            centre = centre.clone()
            centre[:, e.start : e.stop] -= e.value
        return step.pull(g, centre, self.beta)


@method(
    "strategy",
    source="Lee et al., CVPR 2024, Table 10",
    neutral={"beta_prox": 0.0, "rho": 0.0},
    equals="fedavg",
)
def strategy(
    id: Literal["A0", "A1", "A2", "A3", "A4", "A5", "A6"] = "A1",
    beta_prox: NonNegative = 1.0,
    loss: Literal["kl", "l2"] = "kl",
    rho: Rho = None,
    tau: Positive = 3.0,
    part: Literal["full", "body", "head"] = "head",
    strength: Strength = "adaptive",
    lambda_norm: Rule = "layer",
) -> Method:
    """Ways to combine the local and the proximal loss, by the points where their gradients are taken.

    Local step:  by id, with eps_p = rho Lambda g_p / ||g_p||, eps_c = rho Lambda (g_p + g_l) / ||g_p + g_l||, b = beta_prox
                 A0: grad L_l(w)                                    (FedAvg)
                 A1: grad L_l(w + eps_p)                            (FedSOL)
                 A2: grad L_l(w)         + b grad L_p(w + eps_p)
                 A3: grad L_l(w + eps_p) + b grad L_p(w + eps_p)
                 A4: grad L_l(w + eps_c) + b grad L_p(w + eps_c)    (SAM of the sum, Eq. 13)
                 A5: grad L_l(w)         + b grad L_p(w)            (FedProx with l2)
                 A6: grad L_l(w + eps_p) + b grad L_p(w)
    L_p, Lambda: loss (kl at temperature tau, or l2), part, strength and lambda_norm as in FedSOL
    Server:      as FedAvg.
    Cost:        1.33 P a step for A1 with the head, as FedSOL; each further gradient up to 1 P more. Uplink 1x.
    Values:      not printed for this table; beta_prox = 1 and FedSOL's rho (1.5 with kl, 2.0 with l2) are an assumption.
    """
    return Method(
        Strategy(
            id,
            beta_prox,
            KL(tau) if loss == "kl" else L2(),
            radius(rho, loss),
            part,
            strength,
            lambda_norm,
        )
    )
