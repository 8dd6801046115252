"""Contrast between representations of the present, the received and the client's previous model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fldiag.errors import FldiagError
from fldiag.method import Part
from fldiag.step import Local, Output, Step

if TYPE_CHECKING:
    from fldiag.config import Config
    from fldiag.data import Dataset
    from fldiag.models.network import Network


class ModelContrast(Part):
    """Adds mu mean_x -log(e^{cos(z,zg)/tau} / (e^{cos(z,zg)/tau} + e^{cos(z,zp)/tau})) (MOON, Li et al. 2021, Eq. 3).

    z, zg, zp: what the head sees, in the present, the received and this client's last uploaded model (at first w_g^0).
    """

    def __init__(self, mu: float, tau: float):
        self.mu, self.tau = mu, tau

    def check(self, network: Network, dataset: Dataset, config: Config) -> None:
        if not network.has_split:
            raise FldiagError("MOON contrasts the features before the head, and this model does not show them",
                              "use an nn.Sequential, or a module with features() and a last child that is the head")

    def client_init(self, w0: Tensor) -> dict[str, Tensor]:
        return {"w_prev": w0.clone()}

    def loss(self, step: Step, out: Output) -> Tensor | None:
        if not self.mu or out.features is None:
            return None
        z = out.features.flatten(2)
        to_global = F.cosine_similarity(z, self.frozen(step, step.local.w_g.expand(step.k, -1)), dim=-1)
        to_previous = F.cosine_similarity(z, self.frozen(step, step.state("w_prev")), dim=-1)
        return self.mu * step.mean(F.softplus((to_previous - to_global) / self.tau))

    def frozen(self, step: Step, w: Tensor) -> Tensor:
        """Features [k, B, d] of frozen rows on the minibatch."""
        with torch.no_grad():
            buffers = {n: b.clone() for n, b in step.local.buffers.items()}
            return step.local.network.bind(w, buffers).features(step.x).flatten(2)

    def finish(self, local: Local) -> dict[str, Tensor]:
        local.state["w_prev"] = local.w.clone()
        return {}
