"""Pooling over positions of an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.models.layers.entry import Layer, as_it_is, kept, no_obstacle
from fldiag.models.layers.links import Link, layout_of, single


def _pair(n: int | tuple[int, ...]) -> list[int]:
    return [n, n] if isinstance(n, int) else list(n)


class MaxPool(Link):
    def __init__(self, layer: nn.MaxPool2d):
        self.layer, self.overlap = (
            layer,
            layer.kernel_size != layer.stride or layer.dilation not in (1, (1, 1)),
        )

    def forward(self, a: Tensor) -> tuple[Tensor, tuple[Tensor, torch.Size]]:
        m = self.layer
        out, places = F.max_pool2d(
            a, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, True
        )
        return out, (places, a.shape)

    def tangent(self, saved: tuple[Tensor, torch.Size], t: Tensor) -> Tensor:
        places, _ = saved
        return t.flatten(2).gather(2, places.flatten(2)).reshape(places.shape)

    def back(self, saved: tuple[Tensor, torch.Size], g: Tensor) -> Tensor:
        places, (b, c, h, w) = saved
        if len(g) == b:
            m = self.layer
            # of the input only shape and layout count
            like = torch.empty(
                (b, c, h, w), dtype=g.dtype, device=g.device, memory_format=layout_of(places)
            )
            return torch.ops.aten.max_pool2d_with_indices_backward(
                g,
                like,
                _pair(m.kernel_size),
                _pair(m.stride),
                _pair(m.padding),
                _pair(m.dilation),
                m.ceil_mode,
                places,
            )
        flat = places.reshape(b, 1, c, -1).expand(b, len(g) // b, c, -1)
        out = g.new_zeros(b, len(g) // b, c, h * w)
        spread = out.scatter_add_ if self.overlap else out.scatter_
        return spread(3, flat, g.reshape(flat.shape)).reshape(len(g), c, h, w)


class Fixed(Link):
    """A linear map without weights; its adjoint is taken by autograd (average pooling)."""

    def __init__(self, layer: nn.Module):
        self.layer = layer

    def forward(self, a: Tensor) -> tuple[Tensor, torch.Size]:
        return self.layer(a), a.shape

    def tangent(self, saved: torch.Size, t: Tensor) -> Tensor:
        return self.layer(t)

    def back(self, saved: torch.Size, g: Tensor) -> Tensor:
        with torch.enable_grad():
            at = g.new_zeros(len(g), *saved[1:]).requires_grad_()
            return torch.autograd.grad(self.layer(at), at, g)[0]


def _values_alone(m: Any) -> bool:
    return not m.return_indices


MAX_POOL = Layer(
    fits=_values_alone,
    stacked=as_it_is,
    links=single(MaxPool),
    obstacle=no_obstacle,
    takes_maximum=True,
    units=kept,
)
AVERAGE_POOL = Layer(stacked=as_it_is, links=single(Fixed), obstacle=no_obstacle, units=kept)
ADAPTIVE_MAX_POOL = Layer(obstacle=no_obstacle, units=kept)
