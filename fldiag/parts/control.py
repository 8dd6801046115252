"""Corrections that remember: control variates and the dynamic regulariser."""

from __future__ import annotations

import torch
from torch import Tensor

from fldiag.local import Local
from fldiag.method import Part, Round
from fldiag.params import ratio
from fldiag.step import Step


class ControlVariates(Part):
    """SCAFFOLD (Karimireddy et al. 2020, Alg. 1, option II): g := g - c_k + c.

    Afterwards c_k^+ = c_k - c + (w_g - w_k) / (a lr) with a the effective number of steps, and on the server
    w := w_g + server_lr (w - w_g), c := c + (1/N) sum_{k in S} (c_k^+ - c_k).
    """

    sent, uploaded = ("c",), ("delta_c",)

    def __init__(self, server_lr: float):
        self.server_lr = server_lr

    def client_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"c_k": torch.zeros_like(w0)}

    def server_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"c": torch.zeros_like(w0)}

    def correct(self, step: Step, g: Tensor) -> Tensor:
        return g.sub_(step.state("c_k")).add_(step.local.sent["c"])

    def finish(self, local: Local) -> dict[str, Tensor]:
        delta = ratio(local.w_g - local.w, local.effective_steps() * local.lr) - local.sent["c"]
        delta[local.steps == 0] = 0.0  # no step, no news
        local.state["c_k"] = local.state["c_k"] + delta
        return {"delta_c": delta}

    def server(self, round: Round, w: Tensor) -> Tensor:
        round.state["c"] = round.state["c"] + round.mean(round.uploads["delta_c"]) * (
            round.m / round.clients
        )
        return w if self.server_lr == 1 else round.w_g + self.server_lr * (w - round.w_g)


def relative_size(local: Local) -> Tensor:
    """omega_k = n_k N / n, [K, 1]: the client's examples over those of the average client."""
    return (local.n.double() / local.mean_size).to(local.w.dtype).unsqueeze(1)


class DynamicRegulariser(Part):
    """FedDyn (Acar et al. 2021) in the h-form, gradient memory ghat_k = -lam h_k: g := g + lam (w - w_g + h_k).

    Afterwards h_k := h_k + (w_k - w_g); server w := w + H with H = (1/N) sum_j h_j over all clients.
    ``by_size``: lam / omega_k in place of lam.
    """

    def __init__(self, lam: float, by_size: bool = False):
        self.lam, self.by_size = lam, by_size

    def client_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"h_k": torch.zeros_like(w0)}

    def server_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"h": torch.zeros_like(w0)}

    def correct(self, step: Step, g: Tensor) -> Tensor:
        lam = self.lam / relative_size(step.local)[: step.k] if self.by_size else self.lam
        return step.pull(g, step.local.w_g - step.state("h_k"), lam)

    def finish(self, local: Local) -> dict[str, Tensor]:
        local.state["h_k"] = local.state["h_k"] + (local.w - local.w_g)
        return {}

    def server(self, round: Round, w: Tensor) -> Tensor:
        moved = round.mean(round.rows - round.w_g) * (round.m / round.clients)
        round.state["h"] = round.state["h"] + moved
        return w + round.state["h"]


class GradientDrift(Part):
    """FedDC's gradient correction (Gao et al. 2022): g := g + g_s - g_k; g_k^+ = g_k - g_s - d_k / (K lr), K the
    effective number of steps: with momentum only that leaves g_k of the size of one gradient.

    Server: g_s := g_s + (1/N) sum_S (g_k^+ - g_k). ``by_size``: g_s / omega_k in place of g_s on the client, and
    omega_k (g_k^+ - g_k) in the server's sum. ``first_lr``: divide by the lr of round 0.
    """

    sent, uploaded = ("g",), ("delta_g",)

    def __init__(self, by_size: bool = False, first_lr: bool = False):
        self.by_size, self.first_lr = by_size, first_lr

    def client_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"g_k": torch.zeros_like(w0)}

    def server_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"g": torch.zeros_like(w0)}

    def correct(self, step: Step, g: Tensor) -> Tensor:
        share = step.local.sent["g"]
        if self.by_size:
            share = share / relative_size(step.local)[: step.k]
        return g.add_(share).sub_(step.state("g_k"))

    def finish(self, local: Local) -> dict[str, Tensor]:
        a = local.effective_steps()
        lr = local.train.lr if self.first_lr else local.lr
        omega = relative_size(local) if self.by_size else 1.0
        delta = -local.sent["g"] / omega - ratio(local.w - local.w_g, a * lr)
        delta = torch.where(a > 0, delta, 0.0)
        local.state["g_k"] = local.state["g_k"] + delta
        return {"delta_g": omega * delta}

    def server(self, round: Round, w: Tensor) -> Tensor:
        round.state["g"] = round.state["g"] + round.mean(round.uploads["delta_g"]) * (
            round.m / round.clients
        )
        return w
