"""Forward and backward passes of a sequential network by hand, link by link, and its R-operator's tangents.

A link is a layer, or a part of one, that is affine in its input between kinks. It maps values, tangents and cotangents; what
the latter two need (a mask, the places of maxima) is saved by ``forward``. Cotangents may come several to an example: r of
them side by side, [b * r, ...], with b saved examples.

K models side by side are a network too: their examples lie one model after the other, [K * b, ...], and the weights
of a link are [K, ...]. Links without weights see nothing but more examples.

No graph is recorded, and every gradient is written where it belongs in a row of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Views = Mapping[str, Tensor]


class Link:
    """A layer without weights; this one does nothing."""

    def forward(self, a: Tensor) -> tuple[Tensor, Any]:
        """The output and what ``tangent`` and ``back`` need."""
        return a, None

    def tangent(self, saved: Any, t: Tensor) -> Tensor:
        """The derivative of the output when the input moves by t."""
        return t

    def back(self, saved: Any, g: Tensor) -> Tensor:
        """The adjoint of ``tangent``."""
        return g


class Weighted:
    """A layer with a weight and perhaps a bias: linear in its input and linear in its weights."""

    stacks = False  # whether curvature products of several models are faster side by side

    def __init__(self, name: str, bias: bool):
        self.weight = tensor_name(name, "weight")
        self.bias = tensor_name(name, "bias") if bias else None

    def forward(self, a: Tensor, views: Views) -> Tensor:
        """The output on input a with these weights (or its derivative when the weights move by ``views``)."""
        return self.apply(a, views[self.weight], None if self.bias is None else views[self.bias])

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def back(self, g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        """The cotangent of the input a (its shape counts) from that of the output."""
        raise NotImplementedError

    def weigh(self, g: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the weight (its shape counts), summed over the examples."""
        raise NotImplementedError

    def shift(self, g: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the bias, summed over the examples."""
        return sum_over_all_but_channels(g)

    def write(self, g: Tensor, a: Tensor, views: Views, into: Views) -> None:
        """The gradients of weight and bias, written over theirs in ``into``."""
        into[self.weight].copy_(self.weigh(g, a, views[self.weight]))
        if self.bias is not None:
            into[self.bias].copy_(self.shift(g, views[self.weight]))


Links = Sequence[Link | Weighted]


@dataclass
class Pass:
    """Inputs carried through links: the output, and per link its input (weighted links) or what it saved."""

    links: Links
    views: Views
    saved: list[Any]
    out: Tensor

    @staticmethod
    def of(links: Links, views: Views, a: Tensor) -> Pass:
        saved: list[Any] = []
        for link in links:
            if isinstance(link, Weighted):
                saved.append(a)
                a = link.forward(a, views)
            else:
                a, state = link.forward(a)
                saved.append(state)
        return Pass(links, views, saved, a)

    def back(
        self, g: Tensor, at: Callable[[int, Tensor], None], *, through: bool = False
    ) -> Tensor:
        """Carry the cotangent g of the output back, and return it where the walk ends: at the first weighted link, or with
        ``through`` at the input.

        ``at(j, g)`` is called for every weighted link with its index and the cotangent of its output.
        """
        weighted = (j for j, link in enumerate(self.links) if isinstance(link, Weighted))
        first = 0 if through else next(weighted, len(self.links))
        for j in range(len(self.links) - 1, first - 1, -1):
            link = self.links[j]
            if not isinstance(link, Weighted):
                g = link.back(self.saved[j], g)
                continue
            at(j, g)
            if through or j > first:
                g = link.back(g, self.views[link.weight], self.saved[j])
        return g

    def gradient(self, g: Tensor, into: Views, *, through: bool = False) -> Tensor:
        """As ``back``, and write the gradients of the weights to ``into``, by name. Autograd must be off."""

        def write(j: int, g: Tensor) -> None:
            link = self.links[j]
            assert isinstance(link, Weighted)
            link.write(g, self.saved[j], self.views, into)

        return self.back(g, write, through=through)


def tensor_name(layer: str, tensor: str) -> str:
    """The full name of a layer's tensor; the name of a network that is a single layer is empty."""
    return f"{layer}.{tensor}" if layer else tensor


def by_model(a: Tensor, weight: Tensor) -> Tensor:
    """The examples of the K models that the weight [K, ...] belongs to: [K * b, ...] -> [K, b, ...]."""
    k = weight.shape[0]
    return a.view(k, a.shape[0] // k, *a.shape[1:])  # unflatten is several times as slow


def layout_of(a: Tensor) -> torch.memory_format:
    """Whether images lie with their channels first or last."""
    last = (
        a.dim() == 4
        and not a.is_contiguous()
        and a.is_contiguous(memory_format=torch.channels_last)
    )
    return torch.channels_last if last else torch.contiguous_format


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (like.ndim - 2))


def sum_over_all_but_channels(g: Tensor) -> Tensor:
    return g.sum([0, *range(2, g.ndim)])
