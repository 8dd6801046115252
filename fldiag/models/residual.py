"""Residual networks (He et al., CVPR 2016), written once: plain, at a fraction of the width, with random depth.

Stochastic depth (Huang et al., ECCV 2016): in training each residual block keeps its branch F with probability p_l,
one draw a block and minibatch from torch's default generator; evaluation uses ReLU(p_l F(x) + I(x)). With p_l = 1
everywhere nothing is drawn and the network is the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.models.slim import apply_slim

Norm = Callable[[int], nn.Module]


def keep_probabilities(
    blocks: int, last: float, rule: Literal["code", "paper"] = "code"
) -> list[float]:
    """p_l of each block: linear in depth down to ``last``, from 1 at the first block (code) or at the input (paper)."""
    if rule == "paper":
        return [1 - l / blocks * (1 - last) for l in range(1, blocks + 1)]
    return [1 - l / max(blocks - 1, 1) * (1 - last) for l in range(blocks)]


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class ResidualBlock(nn.Module):
    """F(x) + I(x), before the ReLU. ``keep`` is the probability of keeping F in training.

    I is the identity, or a 1x1 convolution where the shape changes. At a ``width`` the block is the slim form of
    the whole block: nothing is dropped.
    """

    expansion = 1

    def __init__(self, inputs: int, planes: int, stride: int, norm: Norm):
        super().__init__()
        self.keep = 1.0
        self.fill(inputs, planes, stride, norm)
        outputs = planes * self.expansion
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(convolution(inputs, outputs, 1, stride), norm(outputs))

    def fill(self, inputs: int, planes: int, stride: int, norm: Norm) -> None:
        """Register the layers of the branch F."""
        raise NotImplementedError

    def branch(self, x: Tensor, width: float | None = None) -> Tensor:
        """F(x)."""
        raise NotImplementedError

    def shortcut(self, x: Tensor, width: float | None = None) -> Tensor:
        """I(x)."""
        for m in self.downsample or ():
            x = apply_slim(m, x, width)
        return x

    def forward(self, x: Tensor, width: float | None = None) -> Tensor:
        if self.keep == 1 or width is not None:
            return self.branch(x, width) + self.shortcut(x, width)
        if not self.training:
            return self.keep * self.branch(x) + self.shortcut(x)
        # drawn on the CPU whatever the device: the same blocks are dropped there, and nothing waits for the device
        keeps_branch = float(torch.rand((), device="cpu")) < self.keep
        return self.branch(x) + self.shortcut(x) if keeps_branch else self.shortcut(x)


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions."""

    def fill(self, inputs: int, planes: int, stride: int, norm: Norm) -> None:
        self.conv1, self.bn1 = convolution(inputs, planes, 3, stride), norm(planes)
        self.conv2, self.bn2 = convolution(planes, planes, 3), norm(planes)

    def branch(self, x: Tensor, width: float | None = None) -> Tensor:
        x = F.relu(apply_slim(self.bn1, apply_slim(self.conv1, x, width), width))
        return apply_slim(self.bn2, apply_slim(self.conv2, x, width), width)


class Bottleneck(ResidualBlock):
    """1x1, 3x3 and 1x1 convolutions; four times as many channels leave as pass the 3x3."""

    expansion = 4

    def fill(self, inputs: int, planes: int, stride: int, norm: Norm) -> None:
        self.conv1, self.bn1 = convolution(inputs, planes, 1), norm(planes)
        self.conv2, self.bn2 = convolution(planes, planes, 3, stride), norm(planes)
        self.conv3, self.bn3 = convolution(planes, planes * 4, 1), norm(planes * 4)

    def branch(self, x: Tensor, width: float | None = None) -> Tensor:
        x = F.relu(apply_slim(self.bn1, apply_slim(self.conv1, x, width), width))
        x = F.relu(apply_slim(self.bn2, apply_slim(self.conv2, x, width), width))
        return apply_slim(self.bn3, apply_slim(self.conv3, x, width), width)


class ResNet(nn.Module):
    """Stem, stages of residual blocks, global average pool, classifier ``fc``; named as torchvision names them.

    ``counts`` and ``planes``: blocks and channels of each stage; all stages but the first halve the image.
    ``stem``: 3 (3x3, stride 1) or 7 (7x7, stride 2) pixels; ``pool``: whether a 3x3 max-pool of stride 2 follows.
    ``kaiming``: convolutions start from He's normal distribution (fan out) instead of torch's default.
    ``projection``: two linear layers of the pooled width between pool and classifier (MOON, Li et al., CVPR 2021).
    """

    def __init__(
        self,
        inputs: int,
        classes: int,
        block: type[ResidualBlock],
        counts: Sequence[int],
        planes: Sequence[int],
        *,
        stem: Literal[3, 7] = 3,
        pool: bool = False,
        norm: Norm = nn.BatchNorm2d,
        kaiming: bool = True,
        projection: bool = False,
        keep_last: float = 1.0,
        keep_rule: Literal["code", "paper"] = "code",
    ):
        super().__init__()
        width = planes[0]
        self.conv1, self.bn1 = convolution(inputs, width, stem, 1 if stem == 3 else 2), norm(width)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if pool else nn.Identity()
        outputs = [width, *(p * block.expansion for p in planes)]
        for i, (n, p, (before, after)) in enumerate(
            zip(counts, planes, pairwise(outputs), strict=True)
        ):
            first = block(before, p, 1 if i == 0 else 2, norm)
            self.add_module(
                f"layer{i + 1}",
                nn.Sequential(first, *(block(after, p, 1, norm) for _ in range(n - 1))),
            )
        d = outputs[-1]
        self.projection = (
            nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))
            if projection
            else nn.Sequential()
        )
        self.fc = nn.Linear(d, classes)
        blocks = [m for m in self.modules() if isinstance(m, ResidualBlock)]
        for b, keep in zip(
            blocks, keep_probabilities(len(blocks), keep_last, keep_rule), strict=True
        ):
            b.keep = keep
        if kaiming:
            for m in self.modules():
                if isinstance(m, nn.Conv2d):
                    nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    @property
    def layers(self) -> list[nn.Sequential]:
        """The stages, first to last."""
        return [
            m
            for n, m in self.named_children()
            if n.startswith("layer") and isinstance(m, nn.Sequential)
        ]

    def _stage(self, blocks: nn.Sequential, x: Tensor, width: float | None = None) -> Tensor:
        for block in blocks:
            x = block(F.relu(x), width)
        return x

    def _maps(self, x: Tensor, width: float | None = None) -> list[Tensor]:
        maps = [apply_slim(self.bn1, apply_slim(self.conv1, x, width), width)]
        # the maximum commutes with the ReLU that the first stage begins with
        x = self.maxpool(maps[0])
        for blocks in self.layers:
            x = self._stage(blocks, x, width)
            maps.append(x)
        return maps

    def stages(self, x: Tensor) -> list[Tensor]:
        """Maps [B, C, H, W] before their final ReLU: of the stem (before its pool) and of every stage."""
        return self._maps(x)

    def pooled(self, maps: list[Tensor], width: float | None = None) -> Tensor:
        """What the classifier sees [B, d]: the last map after ReLU, averaged over positions (and projected)."""
        z = torch.flatten(F.adaptive_avg_pool2d(F.relu(maps[-1]), 1), 1)
        for m in self.projection:
            z = apply_slim(m, z, width)
        return z

    def features(self, x: Tensor) -> Tensor:
        """What the classifier sees [B, d]."""
        return self.pooled(self.stages(x))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(x))
        return logits

    def sub(self, x: Tensor, width: float) -> Tensor:
        """Logits [B, C] of the network at a fraction ``width`` of its channels, all blocks kept.

        Every layer's first channels with shared weights; the image enters whole and all classes leave. Batch-norm
        uses the statistics of the batch. Raises FldiagError when ``width`` is not in (0, 1].
        """
        return apply_slim(self.fc, self.pooled(self._maps(x, width), width), 1.0)

    def last_stage(self, f: Tensor, width: float) -> Tensor:
        """The last stage at a fraction of its channels, after the ReLU, all blocks kept.

        ``f`` [B, C', H, W] is what enters it (the first C' channels of the map before it, after the ReLU).
        Batch-norm uses the statistics of the batch. Raises FldiagError when ``width`` is not in (0, 1].
        """
        return F.relu(self._stage(self.layers[-1], f, width))
