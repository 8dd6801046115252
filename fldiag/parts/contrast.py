"""Contrast between representations of the present, the received and the client's previous model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fldiag.local import Local
from fldiag.method import Part
from fldiag.step import Output, Step

if TYPE_CHECKING:
    from fldiag.config import Config
    from fldiag.data import Dataset
    from fldiag.models.network import Network


class ModelContrast(Part):
    """Adds mu mean_x -log(e^{cos(z,zg)/tau} / (e^{cos(z,zg)/tau} + e^{cos(z,zp)/tau})) (MOON, Li et al. 2021, Eq. 3).

    z, zg, zp: what the head sees, in the present, the received and this client's last uploaded model (at first w_g^0);
    the latter two in eval mode, each with its own batch-norm statistics.
    """

    needs = ("features",)

    def __init__(self, mu: float, tau: float):
        self.mu, self.tau = mu, tau
        self.buffers: dict[str, Tensor] = {}

    def check(self, network: Network, dataset: Dataset, config: Config) -> None:
        self.buffers = network.buffers

    def client_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {
            "w_prev": w0.clone(),
            **{f"prev.{name}": b.clone() for name, b in self.buffers.items()},
        }

    def loss(self, step: Step, out: Output) -> Tensor | None:
        if not self.mu:
            return None
        local = step.local
        previous = {name: local.state[f"prev.{name}"] for name in local.buffers}
        z = out.features.flatten(2)  # type: ignore[union-attr]  # it needs them
        to_global = F.cosine_similarity(
            z, frozen(step, local.w_g.expand(step.k, -1), local.received_buffers), dim=-1
        )
        to_previous = F.cosine_similarity(z, frozen(step, step.state("w_prev"), previous), dim=-1)
        return self.mu * step.mean(F.softplus((to_previous - to_global) / self.tau))

    def finish(self, local: Local) -> dict[str, Tensor]:
        local.state["w_prev"] = local.w.clone()
        local.state.update({f"prev.{name}": b.clone() for name, b in local.buffers.items()})
        return {}


def frozen(step: Step, w: Tensor, buffers: dict[str, Tensor]) -> Tensor:
    """Features [k, B, d] of frozen rows w on the minibatch."""
    with torch.no_grad():
        return (
            step.local.network.bind(w, {n: b.clone() for n, b in buffers.items()})
            .features(step.x)
            .flatten(2)
        )
