"""Perturbations that remember: FedSMOO's dual of the perturbation and FedLESAM's last received model."""

from __future__ import annotations

import torch
from torch import Tensor

from fldiag.local import Local
from fldiag.losses import perturbation
from fldiag.method import Part, Round
from fldiag.params import norm, ratio
from fldiag.step import Perturbation, Step


class ConsensusPerturbation(Part):
    """e = rho q / (||q|| + 1e-7), q = g - mu_k - s; mu_k := mu_k + (e - s) (FedSMOO, Sun et al. 2023, Algorithm 1).

    Server: s := rho mubar / ||mubar||, mubar = mean_S mu_k (0 when mubar is 0).
    """

    sent, uploaded = ("s",), ("mu_k",)

    def __init__(self, rho: float):
        self.rho = rho

    def client_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"mu_k": torch.zeros_like(w0)}

    def server_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"s": torch.zeros_like(w0)}

    def perturb(self, step: Step) -> Perturbation | None:
        if not self.rho:
            return None
        s, mu = step.local.sent["s"], step.state("mu_k")
        e = perturbation(step.local_gradient()[1] - mu - s, self.rho, guard=1e-7)
        mu.add_(e - s)
        return Perturbation(e, 0, e.shape[-1])

    def finish(self, local: Local) -> dict[str, Tensor]:
        return {"mu_k": local.state["mu_k"]}

    def server(self, round: Round, w: Tensor) -> Tensor:
        mean = round.mean(round.uploads["mu_k"])
        round.state["s"] = ratio(self.rho * mean, norm(mean))
        return w


class GlobalDrift(Part):
    """e = rho (w_old - w_g) / ||w_old - w_g||, fixed for the round (FedLESAM, Fan et al. 2024, Eq. 5-6).

    ``client``: w_old is the model this client received at its last participation (e = 0 at the first).
    ``server``: the last global model, the same for all clients (as the released code estimates it).
    """

    def __init__(self, rho: float, estimate: str):
        self.rho, self.estimate = rho, estimate
        self.sent = ("w_last",) if estimate == "server" else ()

    def client_init(self, w0: Tensor) -> dict[str, Tensor]:
        return (
            {"w_old": w0.clone(), "seen": torch.zeros_like(w0[:1])}
            if self.estimate == "client"
            else {}
        )

    def server_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"w_last": w0.clone()} if self.estimate == "server" else {}

    def begin(self, local: Local) -> None:
        if self.estimate == "server":
            d = (local.sent["w_last"] - local.w_g).expand_as(local.w)
        else:
            d = torch.where(local.state["seen"] > 0, local.state["w_old"] - local.w_g, 0.0)
        local.memo["drift"] = ratio(self.rho * d, norm(d))

    def perturb(self, step: Step) -> Perturbation | None:
        e = step.local.memo["drift"][: step.k]
        return Perturbation(e, 0, e.shape[-1]) if self.rho else None

    def finish(self, local: Local) -> dict[str, Tensor]:
        if self.estimate == "client":
            local.state["w_old"] = local.w_g.expand_as(local.w).clone()
            local.state["seen"] = torch.ones_like(local.state["seen"])
        return {}

    def server(self, round: Round, w: Tensor) -> Tensor:
        if self.estimate == "server":
            round.state["w_last"] = round.w_g
        return w
