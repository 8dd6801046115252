"""Server steps: what becomes of the clients' mean."""

from __future__ import annotations

import torch
from torch import Tensor

from fldiag.local import Local
from fldiag.method import Part, Round
from fldiag.params import ratio
from fldiag.step import Step


class ServerMomentum(Part):
    """m := beta m + (w_g - wbar), w_g := w_g - server_lr m (FedAvgM, Hsu et al. 2019)."""

    def __init__(self, beta: float, server_lr: float):
        self.beta, self.server_lr = beta, server_lr

    def server_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(w0)}

    def server(self, round: Round, w: Tensor) -> Tensor:
        m, moved = round.state["m"], round.w_g - w
        round.state["m"] = self.beta * m + moved
        # w_g - server_lr m, written so that beta = 0 and server_lr = 1 give w to the bit
        return w - self.server_lr * self.beta * m + (1 - self.server_lr) * moved


class AdaptiveServer(Part):
    """Delta = mean displacement, m := beta1 m + (1 - beta1) Delta, w_g := w_g + server_lr m / (sqrt(v) + tau).

    adam: v := beta2 v + (1 - beta2) Delta^2; yogi: v := v - (1 - beta2) Delta^2 sign(v - Delta^2).
    No bias correction (Reddi et al. 2021, Algorithm 2).
    """

    def __init__(
        self, kind: str, server_lr: float, beta1: float, beta2: float, tau: float, v0: float
    ):
        self.kind, self.server_lr, self.beta1, self.beta2 = kind, server_lr, beta1, beta2
        self.tau, self.v0 = tau, v0

    def server_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(w0), "v": torch.full_like(w0, self.v0)}

    def server(self, round: Round, w: Tensor) -> Tensor:
        delta = w - round.w_g
        square, v = delta.square(), round.state["v"]
        m = self.beta1 * round.state["m"] + (1 - self.beta1) * delta
        if self.kind == "adam":
            v = self.beta2 * v + (1 - self.beta2) * square
        else:
            v = v - (1 - self.beta2) * square * torch.sign(v - square)
        round.state["m"], round.state["v"] = m, v
        return round.w_g + self.server_lr * m / (v.sqrt() + self.tau)


class LookAhead(Part):
    """Clients start at a = w_g + beta m and are pulled back to it; m := beta m + mean(w_k - a), w_g := mean w_k
    (FedACG, Kim et al. 2024). ``mu`` weighs ||w - a||^2 without the factor 1/2, as the released code does."""

    def __init__(self, beta: float, mu: float):
        self.beta, self.mu = beta, mu

    def server_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(w0)}

    def send(self, w_g: Tensor, state: dict[str, Tensor]) -> Tensor:
        return w_g + self.beta * state["m"] if self.beta else w_g

    def correct(self, step: Step, g: Tensor) -> Tensor:
        return step.pull(g, step.local.w_g, 2 * self.mu)

    def server(self, round: Round, w: Tensor) -> Tensor:
        ahead = round.w_g + self.beta * round.state["m"]
        round.state["m"] = self.beta * round.state["m"] + (w - ahead)
        return w


class NormalisedMean(Part):
    """w_g := w_g + tau_eff sum_k p_k (w_k - w_g) / a_k, tau_eff = sum_k p_k a_k (FedNova, Wang et al. 2020)."""

    uploaded = ("a_k",)

    def finish(self, local: Local) -> dict[str, Tensor]:
        return {"a_k": local.effective_steps()}

    def server(self, round: Round, w: Tensor) -> Tensor:
        a = round.uploads["a_k"]
        tau = float((round.p * a.squeeze(1).double().cpu()).sum())
        return round.w_g + tau * round.mean(ratio(round.rows - round.w_g, a), round.p)


class MeanGradientCorrection(Part):
    """The cross-client correction of FedSOL's FedNova configuration: g := g + d - d_k, d_k = (w_g - w_k) / (lr a_k).

    ``update``: d := (1 - q) d + sum_{k in S} (n_k / n) d_k with q the sampled share of the data; without it d stays 0,
    as in the released configuration, which never updates it.
    """

    sent = ("d",)

    def __init__(self, update: bool):
        self.update = update

    def client_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"d_k": torch.zeros_like(w0)}

    def server_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"d": torch.zeros_like(w0)}

    def correct(self, step: Step, g: Tensor) -> Tensor:
        return g.add_(step.local.sent["d"]).sub_(step.state("d_k"))

    def finish(self, local: Local) -> dict[str, Tensor]:
        a = local.effective_steps()
        local.state["d_k"] = torch.where(
            a > 0, ratio(local.w_g - local.w, a * local.lr), local.state["d_k"]
        )
        return {}

    def server(self, round: Round, w: Tensor) -> Tensor:
        if self.update:
            share = round.n.double().cpu() / round.examples
            d = ratio(round.w_g - round.rows, round.uploads["a_k"] * round.lr)
            round.state["d"] = (1 - float(share.sum())) * round.state["d"] + round.mean(d, share)
        return w
