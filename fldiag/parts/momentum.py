"""The last global update, sent down and used by the clients."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fldiag.losses import perturbation
from fldiag.method import Part, Round
from fldiag.params import ratio
from fldiag.step import Perturbation, Step


class GlobalUpdate(Part):
    """Server: Delta := -mean_S d_k / K_k, sent with w_g; w_g := w_g + server_lr (w - w_g).

    ``steps``: K_k is the number of local steps ("plain"), or what the base optimiser makes of them ("effective"). With
    momentum a gradient enters the displacement more than once, so only the effective number leaves a Delta of the size of
    one gradient, as a mix with gradients needs it; without momentum the two are the same. ``by_lr``: Delta is also divided
    by the round's lr.
    """

    sent = ("delta",)

    def __init__(self, steps: Literal["plain", "effective"], by_lr: bool, server_lr: float = 1.0):
        self.steps, self.by_lr, self.server_lr = steps, by_lr, server_lr

    def server_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"delta": torch.zeros_like(w0)}

    def server(self, round: Round, w: Tensor) -> Tensor:
        steps = round.effective if self.steps == "effective" else round.steps.unsqueeze(1)
        divisor = steps.to(round.rows.dtype) * (round.lr if self.by_lr else 1.0)
        round.state["delta"] = -round.mean(ratio(round.rows - round.w_g, divisor))
        return w if self.server_lr == 1 else round.w_g + self.server_lr * (w - round.w_g)


class ClientMomentum(Part):
    """g := alpha g + (1 - alpha) Delta (FedCM, Xu et al. 2021, Algorithm 1)."""

    def __init__(self, alpha: float):
        self.alpha = alpha

    def correct(self, step: Step, g: Tensor) -> Tensor:
        return (
            g.mul_(self.alpha).add_(step.local.sent["delta"], alpha=1 - self.alpha)
            if self.alpha != 1
            else g
        )


class DualCorrection(Part):
    """g := g + beta_dual Delta (FedTOGA's corrected dual variable)."""

    def __init__(self, beta_dual: float):
        self.beta_dual = beta_dual

    def correct(self, step: Step, g: Tensor) -> Tensor:
        return g.add_(step.local.sent["delta"], alpha=self.beta_dual) if self.beta_dual else g


class GlobalPerturbation(Part):
    """e = rho q / (||q|| + 1e-7) (FedTOGA): q = g + kappa Delta ("global"), gt + kappa Delta ("neighbour", gt the
    gradient of the step before; the first step of a round takes g), g + gt + kappa Delta ("fusion")."""

    def __init__(self, rho: float, kappa: float, mode: str):
        self.rho, self.kappa, self.mode = rho, kappa, mode

    def perturb(self, step: Step) -> Perturbation | None:
        if not self.rho:
            return None
        before = None if self.mode == "global" else step.local.memo.get("register")
        if before is None:
            q = step.local_gradient()[1]
        elif self.mode == "neighbour":
            q = before[: step.k]
        else:
            q = step.local_gradient()[1] + before[: step.k]
        e = perturbation(q + self.kappa * step.local.sent["delta"], self.rho, guard=1e-7)
        return Perturbation(e, 0, e.shape[-1])


class GradientMemory(Part):
    """Keeps the gradient as it is at this place among the parts, for the next step's perturbation."""

    def correct(self, step: Step, g: Tensor) -> Tensor:
        step.local.memo["register"] = g.clone()
        return g
