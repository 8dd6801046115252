"""Functions of single numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from fldiag.models.layers.entry import Layer, as_it_is, kept, no_obstacle
from fldiag.models.layers.links import Link, single

_threshold_backward = torch.ops.aten.threshold_backward.default


class Positive(Link):
    """ReLU. What it saves is its output, which the next layer keeps anyway."""

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        out = a.clamp_min(0)
        return out, out

    def tangent(self, saved: Tensor, t: Tensor) -> Tensor:
        return _threshold_backward(t, saved, 0)

    def back(self, saved: Tensor, g: Tensor) -> Tensor:
        if g.shape == saved.shape:
            return self.tangent(saved, g)
        return (g.reshape(len(saved), -1, *saved.shape[1:]) * (saved > 0).unsqueeze(1)).reshape(
            g.shape
        )


class Slopes(Link):
    """Leaky ReLU."""

    def __init__(self, negative: float):
        self.negative = negative

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        slope = torch.where(a > 0, torch.ones_like(a), self.negative)
        return a * slope, slope

    def tangent(self, saved: Tensor, t: Tensor) -> Tensor:
        return t * saved

    def back(self, saved: Tensor, g: Tensor) -> Tensor:
        return (g.reshape(len(saved), -1, *saved.shape[1:]) * saved.unsqueeze(1)).reshape(g.shape)


RELU = Layer(
    stacked=as_it_is,
    overwrite=torch.relu_,
    links=single(lambda m: Positive()),
    obstacle=no_obstacle,
    monotone=True,
    units=kept,
)
LEAKY_RELU = Layer(
    links=single(lambda m: Slopes(m.negative_slope)), obstacle=no_obstacle, units=kept
)
#: Piecewise linear, with more than one kink.
CLIPPED = Layer(obstacle=no_obstacle, units=kept)
SMOOTH = Layer(stacked=as_it_is, units=kept)
