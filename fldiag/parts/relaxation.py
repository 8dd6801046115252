"""Relaxed contrastive learning inside the minibatch (FedRCL)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fldiag.method import Part
from fldiag.step import Output, Step

NEGATIVES = 2


class RelaxedContrast(Part):
    """Adds mean over levels of mean_x (attract * A + penalty * R) (Seo et al. 2024), s = cosine similarity:

    A = -log(e^{s+/tau} / (e^{s+/tau} + sum_- e^{s-/tau})), s+ the least similar example of the same class (the anchor
    itself, s = 1, among them), s- the two most similar ones of other classes;
    R = -log(e^{1/tau} / (e^{1/tau} + e^{s/tau})), s the least similar other example of the same class, or -1 where that
    is below ``threshold``: same-class representations repel only when all of them are too close.

    Levels: the stages of a staged model (before their ReLU, averaged over positions), else what the head sees.
    """

    needs = ("classes", "features")

    def __init__(self, attract: float, penalty: float, tau: float, threshold: float):
        self.attract, self.penalty, self.tau, self.threshold = attract, penalty, tau, threshold
        self.maps = bool(attract or penalty)

    def loss(self, step: Step, out: Output) -> Tensor | None:
        if not (self.attract or self.penalty):
            return None
        real = torch.ones_like(step.y, dtype=torch.bool) if step.weight is None else step.weight > 0
        levels = (
            [out.features.flatten(2)]  # type: ignore[union-attr]  # it needs them
            if out.maps is None
            else [m.mean((2, 3)).unsqueeze(0) for m in out.maps]
        )
        terms = [step.mean(self.term(z.to(out.leaf.dtype), step.y, real)) for z in levels]
        return torch.stack(terms).mean(0)

    def term(self, z: Tensor, y: Tensor, real: Tensor) -> Tensor:
        """Loss of each anchor, [k, B], from representations z [k, B, d], labels and which examples are no padding."""
        unit = F.normalize(z, dim=-1)
        diagonal = torch.eye(y.shape[1], dtype=torch.bool, device=y.device)
        s = (unit @ unit.transpose(1, 2)).masked_fill(diagonal, 1.0)
        same, real = y[:, :, None] == y[:, None, :], real[:, None, :]
        total = torch.zeros_like(s[..., 0])
        if self.attract:
            positive = (
                s.masked_fill(~(same & real | diagonal), torch.inf).min(-1, keepdim=True).values
            )
            negative = (
                s.masked_fill(same | ~real, -torch.inf)
                .topk(min(NEGATIVES, s.shape[-1]), dim=-1)
                .values
            )
            total = total + self.attract * torch.logsumexp(
                (torch.cat([positive, negative], -1) - positive) / self.tau, -1
            )
        if self.penalty:
            least = s.masked_fill(~(same & real & ~diagonal), torch.inf).min(-1).values
            negative = torch.where(least.isfinite() & (least >= self.threshold), least, -1.0)
            total = total + self.penalty * F.softplus((negative - 1) / self.tau)
        return total
