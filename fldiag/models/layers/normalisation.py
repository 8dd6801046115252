"""Batch-norm, and the slim form of group-norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.errors import FldiagError
from fldiag.models.layers import per_example_squares
from fldiag.models.layers.entry import Layer, Units
from fldiag.models.layers.links import (
    Link,
    Views,
    Weighted,
    inside,
    per_channel,
    sum_over_all_but_channels,
)


def _of_the_batch(m: Any) -> bool:
    """It uses the statistics of the batch also in eval mode."""
    return m.running_mean is None


def _fixed(m: Any) -> bool:
    """Its running statistics are used, so it is an affine layer."""
    return m.running_mean is not None and not m.training


class Normalise(Link):
    """(a - mean) / deviation per channel: the part of batch-norm without weights."""

    def __init__(self, mean: Tensor, variance: Tensor, eps: float):
        self.mean, self.scale = mean, (variance + eps).rsqrt()

    def forward(self, a: Tensor) -> tuple[Tensor, None]:
        return (a - per_channel(self.mean, a)) * per_channel(self.scale, a), None

    def tangent(self, saved: None, t: Tensor) -> Tensor:
        return t * per_channel(self.scale, t)

    def back(self, saved: None, g: Tensor) -> Tensor:
        return g * per_channel(self.scale, g)


class Scale(Weighted):
    """The weights of batch-norm."""

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = a * per_channel(weight, a)
        return out if bias is None else out + per_channel(bias, out)

    def back(self, g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        return g * per_channel(weight, g)

    def weigh(self, g: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        return sum_over_all_but_channels(g * a)


def _links(m: Any, name: str, buffers: Views) -> list[Link | Weighted]:
    normalise = Normalise(
        buffers[inside(name, "running_mean")], buffers[inside(name, "running_var")], m.eps
    )
    return [normalise, Scale(name, m.bias is not None)] if m.affine else [normalise]


def _normalised(m: Any, a: Tensor) -> Tensor:
    return F.batch_norm(a, m.running_mean, m.running_var, None, None, False, 0.0, m.eps)


def _squares(m: Any, a: Tensor, g: Tensor, total: bool) -> dict[str, Tensor]:
    """``a``: the normalised input."""
    g = g.reshape(*g.shape[:3], -1)
    slope = (
        (g * a.reshape(len(a), 1, a.shape[1], -1)).sum(3).square().sum((0, 1), dtype=torch.float64)
    )
    return {"weight": slope.sum() if total else slope, "bias": per_example_squares.bias(g, total)}


def _obstacle(m: Any) -> str | None:
    return (
        f"({type(m).__name__}) uses the statistics of the batch" if m.running_mean is None else None
    )


def _slim(m: Any, x: Tensor, width: float) -> Tensor:
    """With the statistics of the batch in either mode: the running ones belong to the full network, and are neither read
    nor updated."""
    n = x.shape[1]
    return F.batch_norm(x, None, None, m.weight[:n], m.bias[:n], training=True, eps=m.eps)


def _slim_groups(m: nn.GroupNorm, x: Tensor, width: float) -> Tensor:
    n = x.shape[1]
    if n % m.num_groups:
        raise FldiagError(
            f"{n} channels do not split into the {m.num_groups} groups of a group-norm",
            "choose a larger width, so that every layer keeps a multiple of 8 channels",
            usage=True,
        )
    return F.group_norm(x, m.num_groups, m.weight[:n], m.bias[:n], m.eps)


def _own(m: Any) -> Units | None:
    return "own"


def _own_unless_grouped(m: nn.GroupNorm) -> Units | None:
    return "own" if m.num_groups in (1, m.num_channels) else None


#: What all batch-norms have in common.
ANY_BATCH_NORM = Layer(mixes_examples=_of_the_batch)
BATCH_NORM = Layer(
    fits=_fixed,
    links=_links,
    squares=_squares,
    seen=_normalised,
    obstacle=_obstacle,
    slim=_slim,
    mixes_examples=_of_the_batch,
    units=_own,
)
GROUP_NORM = Layer(slim=_slim_groups, units=_own_unless_grouped)
