"""Alignment of the Lipschitz constants of the last stage and of a slim copy of it (FedAlign)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fldiag.method import Part
from fldiag.models.slim import channels
from fldiag.params import norm
from fldiag.step import Output, Step

PRODUCTS = 10  # of the power iteration
GUARD = 1e-12


class LipschitzAlignment(Part):
    """Adds mu L_Lip, L_Lip = mean_x (K_S - K_F)^2 (Mendieta et al. 2022).

    K_F: spectral norm of the transmitting matrix from what enters the last stage to what leaves it, constant; K_S: of
    the same stage at a fraction ``width`` of its channels. ``scale`` "ce": the term is rescaled at every step to the
    value of mu times the label loss; "raw": as it is.
    """

    needs = ("stages", "features")

    def __init__(self, mu: float, width: float, scale: Literal["ce", "raw"]):
        self.mu, self.width, self.scale = mu, width, scale
        self.maps = bool(mu)

    def loss(self, step: Step, out: Output) -> Tensor | None:
        if not self.mu:
            return None
        lip = step.mean(self.gaps(out).square().unsqueeze(0))
        if self.scale == "raw":
            return self.mu * lip
        ce = step.mean(step.label_loss(out.logits)).detach()
        return self.mu * (ce / lip.detach().clamp(min=GUARD)) * lip

    def gaps(self, out: Output) -> Tensor:
        """K_S - K_F of each example, [B]; the graph reaches the weights of the slim stage only."""
        assert out.maps is not None  # it needs stages
        before, after = (F.relu(m.detach()).to(out.leaf.dtype) for m in out.maps[-2:])
        slim = before[:, : channels(before.shape[1], self.width)]
        inside = out.bound.call("last_stage", slim, width=self.width).to(out.leaf.dtype)
        return spectral_norm(transmitting(slim, inside)) - spectral_norm(
            transmitting(before, after)
        )


def transmitting(a: Tensor, b: Tensor) -> Tensor:
    """X = pool(a) b^T / (H W): [B, Ca, H', W'], [B, Cb, H, W] -> [B, Ca, Cb], a average-pooled to the positions of b."""
    a = F.adaptive_avg_pool2d(a, (b.shape[2], b.shape[3])).flatten(2)
    return a @ b.flatten(2).transpose(1, 2) / a.shape[2]


def spectral_norm(x: Tensor, products: int = PRODUCTS) -> Tensor:
    """Largest singular value of each matrix [B, m, n] -> [B], by ``products`` power iterations of X X^T from ones.

    sqrt(||X X^T v||) of the last product, v the unit vector before it: a lower bound. A zero matrix has no
    gradient.
    """
    v = x.new_ones(x.shape[0], x.shape[1], 1)
    for _ in range(products):
        u = x @ (x.transpose(1, 2) @ v)
        n = torch.linalg.vector_norm(u, dim=1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        v = u / n
    return n.flatten().sqrt()


class Clip(Part):
    """g := g min(1, limit / (||g|| + 1e-6)), before weight decay; no clipping at 0."""

    def __init__(self, limit: float):
        self.limit = limit

    def correct(self, step: Step, g: Tensor) -> Tensor:
        return g.mul_((self.limit / (norm(g) + 1e-6)).clamp_(max=1.0)) if self.limit else g
