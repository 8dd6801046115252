"""Regularisation by altered inputs: mixed examples, and sub-networks that see resized images."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fldiag import losses
from fldiag.local import Local
from fldiag.method import Part
from fldiag.seeding import numpy_rng
from fldiag.step import Output, Step


class MixedExamples(Part):
    """x~ = a x + (1 - a) x_pi, loss a CE(f(x~), y) + (1 - a) CE(f(x~), y_pi), a ~ Beta(g, g) and a permutation pi
    a minibatch (mixup, Zhang et al. 2018). A client mixes its own examples; g = 0 draws nothing (a = 1)."""

    def __init__(self, g: float):
        self.g = g

    def begin(self, local: Local) -> None:
        if self.g:
            local.memo["mixup"] = [numpy_rng(local.seed, "mixup", local.t, i) for i in local.ids]

    def batch(self, step: Step) -> None:
        if not self.g:
            return
        size = step.x.shape[1]
        real = [size] * step.k if step.weight is None else (step.weight > 0).sum(1).tolist()
        partner = np.tile(np.arange(size), (step.k, 1))  # padded positions keep to themselves
        share = np.empty((step.k, 1))
        for i, (n, generator) in enumerate(zip(real, step.local.memo["mixup"], strict=False)):
            share[i] = generator.beta(self.g, self.g)
            partner[i, :n] = generator.permutation(n)
        a = torch.from_numpy(share).to(step.x)
        clients = torch.arange(step.k, device=step.x.device)[:, None]
        partners = clients, torch.from_numpy(partner).to(step.x.device)
        wide = a.view(step.k, 1, *[1] * (step.x.dim() - 2))
        step.x = wide * step.x + (1 - wide) * step.x[partners]
        step.targets = [(step.y, a), (step.y[partners], 1 - a)]


class SubNetworks(Part):
    """Adds mu sum_i mean_x KL(softmax(F(x)) || softmax(F_omega_i(T_i x))), F(x) constant (GradAug, Yang et al. 2020).

    F_omega: the first channels of every layer, with batch statistics (``sub`` of the model). T_i: bilinear resize to a
    fraction of the side, drawn from ``sides``. Widths: ``smallest`` for the first sub-network and uniform between it
    and 1 for the others ("code"), or uniform for all ("paper").
    """

    needs = ("classes", "images", "stages")

    def __init__(
        self,
        mu: float,
        n: int,
        smallest: float,
        sides: tuple[float, ...],
        widths: Literal["code", "paper"],
    ):
        self.mu, self.n, self.smallest, self.sides, self.widths = mu, n, smallest, sides, widths

    def begin(self, local: Local) -> None:
        if self.mu:
            # models with sub-networks are not stacked
            [local.memo["gradaug.generator"]] = local.rng("gradaug")

    def batch(self, step: Step) -> None:
        """Draw once a step: every pass of it then sees the same sub-networks."""
        if self.mu:
            step.local.memo["gradaug"] = self.draw(step.local.memo["gradaug.generator"])

    def draw(self, generator: torch.Generator) -> list[tuple[float, float]]:
        """(width, fraction of the side) of each sub-network."""
        networks = []
        for i in range(self.n):
            u = float(torch.rand((), generator=generator, dtype=torch.float64))
            width = self.smallest + u * (1 - self.smallest)
            if i == 0 and self.widths == "code":
                width = self.smallest
            side = self.sides[int(torch.randint(len(self.sides), (), generator=generator))]
            networks.append((width, side))
        return networks

    def loss(self, step: Step, out: Output) -> Tensor | None:
        if not self.mu:
            return None
        teacher = out.logits.detach()
        total = torch.zeros_like(out.leaf[:, 0])
        for width, side in step.local.memo["gradaug"]:
            logits = out.bound.call("sub", resized(step.x[0], side), width=width)
            total = total + step.mean(
                losses.kl(teacher, logits.to(teacher.dtype).unsqueeze(0), 1.0)
            )
        return self.mu * total


def resized(x: Tensor, side: float) -> Tensor:
    """Images [B, C, H, W] at a fraction of their sides (to the nearest pixel), bilinear with aligned corners."""
    size = [max(1, round(side * s)) for s in x.shape[-2:]]
    return (
        x
        if size == list(x.shape[-2:])
        else F.interpolate(x, size, mode="bilinear", align_corners=True)
    )
