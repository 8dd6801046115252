"""Layers of a sequential network as links that map values, tangents and cotangents.

Every link is affine in its input between kinks. ``Linked`` networks are nested ``nn.Sequential``s of affine
layers, convolutions, batch-norm with running statistics, ReLU and pooling: piecewise linear in their weights.
What a link needs to map tangents and cotangents (a mask, the places of maxima) is saved by ``forward``.
Cotangents may come several to an example (r of them side by side: [b * r, ...] with b saved examples).

K models side by side are a network too: their examples lie one model after the other, [K * b, ...], and the weights
of a link that ``stacks`` are [K, ...]. Links without weights see nothing but more examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.models.network import pool_first

Views = Mapping[str, Tensor]
_convolution_backward: Any = torch.ops.aten.convolution_backward


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


class Slopes(Link):
    """ReLU or leaky ReLU."""

    def __init__(self, negative: float = 0.0):
        self.negative = negative

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        slope = (a > 0).to(a.dtype)
        if self.negative:
            slope = torch.where(a > 0, slope, self.negative)
        return a * slope, slope

    def tangent(self, saved: Tensor, t: Tensor) -> Tensor:
        return t * saved

    def back(self, saved: Tensor, g: Tensor) -> Tensor:
        return (g.reshape(len(saved), -1, *saved.shape[1:]) * saved.unsqueeze(1)).reshape(g.shape)


class MaxPool(Link):
    def __init__(self, layer: nn.MaxPool2d):
        self.layer, self.overlap = layer, layer.kernel_size != layer.stride or layer.dilation not in (1, (1, 1))

    def forward(self, a: Tensor) -> tuple[Tensor, tuple[Tensor, torch.Size]]:
        m = self.layer
        out, places = F.max_pool2d(a, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, True)
        return out, (places, a.shape)

    def tangent(self, saved: tuple[Tensor, torch.Size], t: Tensor) -> Tensor:
        places, _ = saved
        return t.flatten(2).gather(2, places.flatten(2)).reshape(places.shape)

    def back(self, saved: tuple[Tensor, torch.Size], g: Tensor) -> Tensor:
        places, (b, c, h, w) = saved
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


class Flat(Link):
    def forward(self, a: Tensor) -> tuple[Tensor, torch.Size]:
        return a.flatten(1), a.shape

    def tangent(self, saved: torch.Size, t: Tensor) -> Tensor:
        return t.flatten(1)

    def back(self, saved: torch.Size, g: Tensor) -> Tensor:
        return g.reshape(len(g), *saved[1:])


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


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (like.ndim - 2))


class Weighted:
    """A layer with a weight and perhaps a bias: linear in its input and linear in its weights."""

    stacks = False  # whether it takes the weights of several models

    def __init__(self, name: str, bias: bool):
        prefix = f"{name}." if name else ""
        self.weight, self.bias = f"{prefix}weight", f"{prefix}bias" if bias else None

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


def by_model(a: Tensor, weight: Tensor) -> Tensor:
    """The examples of the K models that the weight [K, ...] belongs to: [K * b, ...] -> [K, b, ...]."""
    return a.unflatten(0, (len(weight), -1))


class Linear(Weighted):
    stacks = True

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.ndim == 2:
            return F.linear(a, weight, bias)
        a = by_model(a, weight)
        out = torch.bmm(a, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), a, weight.mT)
        return out.flatten(0, 1)

    def back(self, g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        return g @ weight if weight.ndim == 2 else torch.bmm(by_model(g, weight), weight).flatten(0, 1)

    def weigh(self, g: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        return g.T @ a if weight.ndim == 2 else torch.bmm(by_model(g, weight).mT, by_model(a, weight))

    def shift(self, g: Tensor, weight: Tensor) -> Tensor:
        return g.sum(0) if weight.ndim == 2 else by_model(g, weight).sum(1)


class Conv(Weighted):
    def __init__(self, name: str, layer: nn.Conv2d):
        super().__init__(name, layer.bias is not None)
        self.stride, self.dilation, self.groups = layer.stride, layer.dilation, layer.groups
        self.padding: tuple[int, ...] = zero_padding(layer)

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.conv2d(a, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def _backward(self, g: Tensor, a: Tensor, weight: Tensor, wanted: list[bool]) -> list[Tensor]:
        return _convolution_backward(g, a, weight, None, self.stride, self.padding, self.dilation, False, [0, 0],
                                     self.groups, wanted)

    def back(self, g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        return self._backward(g, a.new_empty(()).expand(len(g), *a.shape[1:]), weight, [True, False, False])[0]

    def weigh(self, g: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        return self._backward(g, a, weight, [False, True, False])[1]


class Scale(Weighted):
    """The weights of batch-norm."""

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = a * per_channel(weight, a)
        return out if bias is None else out + per_channel(bias, out)

    def back(self, g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        return g * per_channel(weight, g)

    def weigh(self, g: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        return sum_over_all_but_channels(g * a)


def sum_over_all_but_channels(g: Tensor) -> Tensor:
    return g.sum([0, *range(2, g.ndim)])


def zero_padding(layer: nn.Conv2d) -> tuple[int, ...]:
    """Padding in rows and columns. Raises ValueError where one side would be padded more than the other."""
    if isinstance(layer.padding, str):
        wide = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        if layer.padding == "valid":
            return 0, 0
        if any(p % 2 for p in wide):
            raise ValueError(layer.padding)
        return tuple(p // 2 for p in wide)
    return layer.padding


def leaves(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]] | None:
    """The layers of nested ``nn.Sequential``s in order, None for any other module or one with hooks."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or "forward" in vars(module):
        return None
    if type(module).forward is not nn.Sequential.forward:
        return [(prefix.removesuffix("."), module)]
    found: list[tuple[str, nn.Module]] = []
    for name, child in module._modules.items():
        inner = None if child is None else leaves(child, f"{prefix}{name}.")
        if inner is None:
            return None
        found += inner
    return found


def links(module: nn.Module, buffers: Views) -> list[Link | Weighted] | None:
    """The links of a sequential network in eval mode, None when some layer has no rule or weights are shared."""
    chain = leaves(module)
    if chain is None or len({id(m) for _, m in chain if any(True for _ in m.parameters())}) != sum(
            any(True for _ in m.parameters()) for _, m in chain):
        return None
    if len(list(module.parameters())) != sum(len(list(m.parameters())) for _, m in chain):
        return None
    found: list[Link | Weighted] = []
    for name, m in pool_first(chain):
        made = _links(name, m, buffers)
        if made is None:
            return None
        found += made
    return found if any(isinstance(link, Weighted) for link in found) else None


def _links(name: str, m: Any, buffers: Views) -> list[Any] | None:
    kind = type(m)
    if kind is nn.Linear:
        return [Linear(name, m.bias is not None)]
    if kind is nn.Conv2d and m.padding_mode == "zeros":
        try:
            return [Conv(name, m)]
        except ValueError:
            return None
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d) and m.running_mean is not None and not m.training:
        prefix = f"{name}." if name else ""
        normalise = Normalise(buffers[f"{prefix}running_mean"], buffers[f"{prefix}running_var"], m.eps)
        return [normalise, Scale(name, m.bias is not None)] if m.affine else [normalise]
    if kind is nn.ReLU:
        return [Slopes()]
    if kind is nn.LeakyReLU:
        return [Slopes(m.negative_slope)]
    if kind is nn.MaxPool2d and not m.return_indices:
        return [MaxPool(m)]
    if kind in (nn.AvgPool2d, nn.AdaptiveAvgPool2d):
        return [Fixed(m)]
    if kind is nn.Flatten and (m.start_dim, m.end_dim) == (1, -1):
        return [Flat()]
    if kind is nn.Identity or (isinstance(m, nn.modules.dropout._DropoutNd) and not m.training):
        return []
    return None
