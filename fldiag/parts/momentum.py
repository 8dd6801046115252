"""The last global update, sent down and used by the clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fldiag.method import Part, Round
from fldiag.parts.perturbation import ascent
from fldiag.step import Local, Perturbation, Step


class GlobalUpdate(Part):
    """Server: Delta := -mean_S d_k / K_k ("steps") or -mean_S d_k / (K_k lr) ("steps_lr"), sent with w_g.

    K_k is the effective number of steps: the plain one without momentum. w_g := w_g + server_lr (w - w_g).
    """

    sent = ("delta",)

    def __init__(self, scale: str, server_lr: float = 1.0):
        self.scale, self.server_lr = scale, server_lr

    def server_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"delta": torch.zeros_like(w0)}

    def server(self, round: Round, w: Tensor) -> Tensor:
        divisor = round.effective.to(round.rows.dtype)
        if self.scale == "steps_lr":
            divisor = divisor * round.lr
        moved = torch.where(divisor > 0, (round.rows - round.w_g) / divisor.clamp(min=1e-12), 0.0)
        round.state["delta"] = -round.mean(moved)
        return w if self.server_lr == 1 else round.w_g + self.server_lr * (w - round.w_g)


class ClientMomentum(Part):
    """g := alpha g + (1 - alpha) Delta (FedCM, Xu et al. 2021, Algorithm 1)."""

    def __init__(self, alpha: float):
        self.alpha = alpha

    def correct(self, step: Step, g: Tensor) -> Tensor:
        return g.mul_(self.alpha).add_(step.local.sent["delta"], alpha=1 - self.alpha) if self.alpha != 1 else g


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

    def begin(self, local: Local) -> None:
        local.memo.pop("register", None)

    def perturb(self, step: Step) -> Perturbation | None:
        if not self.rho:
            return None
        before = step.local.memo.get("register")
        before = None if before is None else before[: step.k]
        if self.mode == "neighbour" and before is not None:
            q = before
        else:
            q = step.local_gradient()[1]
            if self.mode == "fusion" and before is not None:
                q = q + before
        e = ascent(q + self.kappa * step.local.sent["delta"], self.rho, guard=1e-7)
        return Perturbation(e, 0, e.shape[-1])


class Register(Part):
    """Keeps the gradient as it is at this place among the parts, for the next step's perturbation."""

    def correct(self, step: Step, g: Tensor) -> Tensor:
        step.local.memo["register"] = g.clone()
        return g
