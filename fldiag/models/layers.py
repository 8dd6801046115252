"""Everything that depends on the type of a layer: one table, one rule a type.

Stacked evaluation (``models/network.py``), slim sub-networks, curvature by the R-operator, exact diagonals, the proof that a
network is piecewise linear, the probe of a Problem and fast loss surfaces look here. A new type is one entry, also for a
layer of one's own::

    LAYERS[Gain] = Layer(stacked=..., links=..., squares=..., obstacle=no_obstacle)

``Layer`` says what each rule means. The links are those of ``models/links.py``; how large sums and products are computed is in
``models/kernels.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.errors import FldiagError
from fldiag.models import frozen
from fldiag.models.kernels import (
    StackedConvolution,
    bias_squares,
    by_onednn,
    outer_squares,
    position_squares,
    product,
    products,
)
from fldiag.models.links import (
    Link,
    Views,
    Weighted,
    by_model,
    layout_of,
    per_channel,
    sum_over_all_but_channels,
    tensor_name,
)

_convolution_backward: Any = torch.ops.aten.convolution_backward
_threshold_backward = torch.ops.aten.threshold_backward.default

Chain = Sequence[tuple[str, nn.Module]]


def always(m: Any) -> bool:
    return True


def never(m: Any) -> bool:
    return False


def unknown_obstacle(m: Any) -> str | None:
    return f"({type(m).__name__})"


def no_obstacle(m: Any) -> str | None:
    return None


def apply_layer(m: Any, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    """The ``stacked`` rule of a layer without weights that treats examples and channels alike."""
    return m(x)


def layer_input(m: Any, a: Tensor) -> Tensor:
    return a


@dataclass(frozen=True)
class Layer:
    """The rules for one type of layer. Where a rule is left out, a network with such a layer takes the general way.

    In all of them ``m`` is the layer, ``name`` its place in the network, and ``views`` holds the network's weights by
    their full names.

    ``fits(m)``: whether ``call``, ``stacked`` and ``links`` hold for a layer with these settings.
    ``call(m, name, views, x)``: the output with the weights in ``views``; only a layer with weights needs it.
    ``stacked(m, name, views, x, rows)``: the outputs of several models side by side. Each view is [rows, ...]; images
    are [B, rows * C, H, W], anything else is [rows, B, ...].
    ``takes_rows``: ``stacked`` also takes images as [rows, B, C, H, W].
    ``overwrite(x)``: the output of a layer without weights, written over its input.
    ``links(m, name, buffers)``: the layer as links for the R-operator, in order.
    ``squares(m, a, g, total)``: name of a weight -> the sum over examples of its squared gradients, or with ``total``
    the sum over all entries, for inputs a [b, ...] and r cotangents of each output, g [b, r, ...].
    ``squares_input(m, a)``: what ``squares`` takes for an input a. Computed while the layer is evaluated: only then do its
    buffers hold the values that belong to the weights.
    ``obstacle(m)``: what keeps the output from being piecewise linear in the input and in the weights, with the other
    one fixed, in eval mode; None where nothing does.
    ``macs(m, out)``: multiply-adds of one example, whose output is ``out`` [1, ...].
    ``slim(m, x, width)``: from the channels (features) that x has to the first ``width`` in (0, 1] of the layer's own.
    ``mixes_examples(m)``: whether an example's output depends on the others of its batch, also in eval mode.
    ``monotone``: its output, number by number, never falls as the input rises. ``takes_maximum``: its output is the maximum
    over some positions; it can then change places with a monotone layer.
    ``random``: it draws random numbers in training mode.
    ``channels_last``: without gradients it is faster in that memory format.
    """

    fits: Callable[[Any], bool] = always
    call: Callable[[Any, str, Views, Tensor], Tensor] | None = None
    stacked: Callable[[Any, str, Views, Tensor, int], Tensor] | None = None
    takes_rows: bool = False
    overwrite: Callable[[Tensor], Tensor] | None = None
    links: Callable[[Any, str, Views], list[Link | Weighted] | None] | None = None
    squares: Callable[[Any, Tensor, Tensor, bool], dict[str, Tensor]] | None = None
    squares_input: Callable[[Any, Tensor], Tensor] = layer_input
    obstacle: Callable[[Any], str | None] = unknown_obstacle
    macs: Callable[[Any, Tensor], int] | None = None
    slim: Callable[[Any, Tensor, float], Tensor] | None = None
    mixes_examples: Callable[[Any], bool] = never
    monotone: bool = False
    takes_maximum: bool = False
    random: bool = False
    channels_last: bool = False


def single(
    make: Callable[[Any], Link],
) -> Callable[[Any, str, Views], list[Link | Weighted] | None]:
    """The ``links`` rule of a layer that is one link without weights."""
    return lambda m, name, buffers: [make(m)]


def divisible(v: float, by: int = 8) -> int:
    """``v`` rounded to a multiple of ``by``, one step up when that would lose more than 10 %; at least 1."""
    n = max(1, int(v + by / 2) // by * by)
    return n + by if n < 0.9 * v else n


def channels(total: int, width: float) -> int:
    """How many of a layer's ``total`` channels the fraction ``width`` in (0, 1] keeps; all of them at 1.

    Raises FldiagError when ``width`` is no such fraction.
    """
    if not 0 < width <= 1:
        raise FldiagError(
            f"width = {width!r} is not a fraction of the channels",
            "give a number in (0, 1]",
            usage=True,
        )
    return total if width == 1 else min(total, divisible(total * width))


# nn.Linear


def _call_linear(m: nn.Linear, name: str, views: Views, x: Tensor) -> Tensor:
    return F.linear(x, views[f"{name}.weight"], views.get(f"{name}.bias"))


def _stacked_linear(m: nn.Linear, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    w, b = views[f"{name}.weight"], views.get(f"{name}.bias")
    if rows == 1:
        return product(x[0], w[0], None if b is None else b[0]).unsqueeze(0)
    return products(x, w, b)


class LinearLink(Weighted):
    stacks = True

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.ndim == 2:
            return product(a, weight, bias)
        return products(by_model(a, weight), weight, bias).flatten(0, 1)

    def back(self, g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        if weight.ndim == 2:
            return product(g, weight.T)
        return products(by_model(g, weight), weight.mT).flatten(0, 1)

    def weigh(self, g: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        if weight.ndim == 2:
            return product(g.T, a.T)
        return products(by_model(g, weight).mT, by_model(a, weight).mT)

    def shift(self, g: Tensor, weight: Tensor) -> Tensor:
        return g.sum(0) if weight.ndim == 2 else by_model(g, weight).sum(1)

    def write(self, g: Tensor, a: Tensor, views: Views, into: Views) -> None:
        """Without a copy, where the product can go straight into its place."""
        weight, place = views[self.weight], into[self.weight]
        if g.dtype != place.dtype:
            return super().write(g, a, views, into)
        if weight.ndim == 3:
            g, a = by_model(g, weight), by_model(a, weight)
        left = g.mT
        if by_onednn(left, a.mT):
            place.copy_(product(left, a.mT) if weight.ndim == 2 else products(left, a.mT))
        elif weight.ndim == 2:
            torch.mm(left, a, out=place)
        else:
            torch.bmm(left, a, out=place)
        if self.bias is not None:
            torch.sum(g, weight.ndim - 2, out=into[self.bias])


def _linear_squares(m: nn.Linear, a: Tensor, g: Tensor, total: bool) -> dict[str, Tensor]:
    if a.ndim == 2:
        squares = {"weight": outer_squares(g, a, total)}
        g = g.unsqueeze(3)
    else:
        g = g.flatten(2, -2).transpose(2, 3)
        squares = {"weight": position_squares(g, a.flatten(1, -2).transpose(1, 2), total)}
    return squares if m.bias is None else {**squares, "bias": bias_squares(g, total)}


def _slim_linear(m: nn.Linear, x: Tensor, width: float) -> Tensor:
    n = channels(m.out_features, width)
    return F.linear(x, m.weight[:n, : x.shape[1]], None if m.bias is None else m.bias[:n])


LINEAR = Layer(
    call=_call_linear,
    stacked=_stacked_linear,
    links=lambda m, name, buffers: [LinearLink(name, m.bias is not None)],
    squares=_linear_squares,
    obstacle=no_obstacle,
    macs=lambda m, out: out.numel() * m.in_features,
    slim=_slim_linear,
)


# nn.Conv2d


def zero_padding(layer: nn.Conv2d) -> tuple[int, ...]:
    """Padding in rows and columns. Raises ValueError where one side would be padded more than the other."""
    if isinstance(layer.padding, str):
        both_sides = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        if layer.padding == "valid":
            return 0, 0
        if any(p % 2 for p in both_sides):
            raise ValueError(
                f"padding = {layer.padding!r} with a kernel of size {list(layer.kernel_size)} pads one side more "
                "than the other"
            )
        return tuple(p // 2 for p in both_sides)
    return layer.padding


def _pads_with_zeros(m: nn.Conv2d) -> bool:
    return m.padding_mode == "zeros"


def _convolve(
    m: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None, rows: int = 1
) -> Tensor:
    """``m`` with these weights, of ``rows`` models side by side."""
    return F.conv2d(x, weight, bias, m.stride, m.padding, m.dilation, rows * m.groups)


def _call_convolution(m: nn.Conv2d, name: str, views: Views, x: Tensor) -> Tensor:
    return _convolve(m, x, views[f"{name}.weight"], views.get(f"{name}.bias"))


def _stacked_convolution(m: nn.Conv2d, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    w, b = views[f"{name}.weight"], views.get(f"{name}.bias")
    return _convolve(m, x, w.flatten(0, 1), None if b is None else b.flatten(), rows)


class ConvLink(Weighted):
    def __init__(self, name: str, layer: nn.Conv2d):
        super().__init__(name, layer.bias is not None)
        self.layer, self.padding = layer, zero_padding(layer)
        self.side_by_side = StackedConvolution(layer, self.padding)

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.ndim == 5:
            return self.side_by_side.apply(a, weight, bias)
        return _convolve(self.layer, a, weight, bias)

    def _backward(self, g: Tensor, a: Tensor, weight: Tensor, mask: list[bool]) -> list[Tensor]:
        """The gradients of input, weight and bias, as far as the mask picks them."""
        m = self.layer
        return _convolution_backward(
            g, a, weight, None, m.stride, self.padding, m.dilation, False, [0, 0], m.groups, mask
        )

    def back(self, g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        if weight.ndim == 5:
            return self.side_by_side.back(g, weight, a)
        # of the input only shape and layout count; in another layout than its own the kernel takes a third longer
        like = torch.empty(
            (len(g), *a.shape[1:]), dtype=g.dtype, device=g.device, memory_format=layout_of(a)
        )
        return self._backward(g, like, weight, [True, False, False])[0]

    def weigh(self, g: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        if weight.ndim == 5:
            return self.side_by_side.weigh(g, a, weight)
        return self._backward(g, a, weight, [False, True, False])[1]

    def shift(self, g: Tensor, weight: Tensor) -> Tensor:
        return super().shift(g, weight) if weight.ndim == 4 else by_model(g, weight).sum((1, 3, 4))


def _convolution_links(m: nn.Conv2d, name: str, buffers: Views) -> list[Link | Weighted] | None:
    try:
        return [ConvLink(name, m)]
    except ValueError:
        return None


def _convolution_squares(m: nn.Conv2d, a: Tensor, g: Tensor, total: bool) -> dict[str, Tensor]:
    patches = F.unfold(a, m.kernel_size, m.dilation, zero_padding(m), m.stride)  # [b, I * k * k, L]
    g = g.flatten(3)
    parts = [
        position_squares(gp, up, total)
        for gp, up in zip(g.chunk(m.groups, 2), patches.chunk(m.groups, 1), strict=True)
    ]
    weight = torch.stack(parts).sum(0) if total else torch.cat(parts).reshape(m.weight.shape)
    return (
        {"weight": weight} if m.bias is None else {"weight": weight, "bias": bias_squares(g, total)}
    )


def _convolution_macs(m: nn.Conv2d, out: Tensor) -> int:
    return out[0].numel() * (m.in_channels // m.groups) * math.prod(m.kernel_size)


def _slim_convolution(m: nn.Conv2d, x: Tensor, width: float) -> Tensor:
    """For groups = 1."""
    n = channels(m.out_channels, width)
    return _convolve(m, x, m.weight[:n, : x.shape[1]], None if m.bias is None else m.bias[:n])


CONV2D = Layer(
    fits=_pads_with_zeros,
    call=_call_convolution,
    stacked=_stacked_convolution,
    links=_convolution_links,
    squares=_convolution_squares,
    obstacle=lambda m: None if _pads_with_zeros(m) else f"pads in mode {m.padding_mode!r}",
    macs=_convolution_macs,
    slim=_slim_convolution,
    channels_last=True,
)


# Batch-norm, and the slim form of group-norm


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


class ScaleLink(Weighted):
    """The weights of batch-norm."""

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = a * per_channel(weight, a)
        return out if bias is None else out + per_channel(bias, out)

    def back(self, g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        return g * per_channel(weight, g)

    def weigh(self, g: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        return sum_over_all_but_channels(g * a)


def _uses_batch_statistics(m: Any) -> bool:
    """Also in eval mode."""
    return m.running_mean is None


def _uses_running_statistics(m: Any) -> bool:
    """So it is an affine layer."""
    return m.running_mean is not None and not m.training


def _batch_norm_links(m: Any, name: str, buffers: Views) -> list[Link | Weighted]:
    mean = buffers[tensor_name(name, "running_mean")]
    variance = buffers[tensor_name(name, "running_var")]
    normalise = Normalise(mean, variance, m.eps)
    return [normalise, ScaleLink(name, m.bias is not None)] if m.affine else [normalise]


def _normalised(m: Any, a: Tensor) -> Tensor:
    return F.batch_norm(a, m.running_mean, m.running_var, None, None, False, 0.0, m.eps)


def _batch_norm_squares(m: Any, a: Tensor, g: Tensor, total: bool) -> dict[str, Tensor]:
    """``a``: the normalised input."""
    g = g.reshape(*g.shape[:3], -1)
    slope = (g * a.reshape(len(a), 1, a.shape[1], -1)).sum(3)
    squares = slope.square().sum((0, 1), dtype=torch.float64)
    return {"weight": squares.sum() if total else squares, "bias": bias_squares(g, total)}


def _batch_norm_obstacle(m: Any) -> str | None:
    uses_batch = _uses_batch_statistics(m)
    return f"({type(m).__name__}) uses the statistics of the batch" if uses_batch else None


def _slim_batch_norm(m: Any, x: Tensor, width: float) -> Tensor:
    """With the statistics of the batch in either mode: the running ones belong to the full network, and are neither read
    nor updated."""
    n = x.shape[1]
    return F.batch_norm(x, None, None, m.weight[:n], m.bias[:n], training=True, eps=m.eps)


def _slim_group_norm(m: nn.GroupNorm, x: Tensor, width: float) -> Tensor:
    n = x.shape[1]
    if n % m.num_groups:
        raise FldiagError(
            f"{n} channels do not split into the {m.num_groups} groups of a group-norm",
            "choose a larger width, so that every layer keeps a multiple of 8 channels",
            usage=True,
        )
    return F.group_norm(x, m.num_groups, m.weight[:n], m.bias[:n], m.eps)


#: What all batch-norms have in common.
ANY_BATCH_NORM = Layer(mixes_examples=_uses_batch_statistics)
BATCH_NORM = Layer(
    fits=_uses_running_statistics,
    links=_batch_norm_links,
    squares=_batch_norm_squares,
    squares_input=_normalised,
    obstacle=_batch_norm_obstacle,
    slim=_slim_batch_norm,
    mixes_examples=_uses_batch_statistics,
)
GROUP_NORM = Layer(
    slim=_slim_group_norm,
)


# Functions of single numbers


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
        return _times_per_example(g, saved > 0)


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
        return _times_per_example(g, saved)


def _times_per_example(g: Tensor, slope: Tensor) -> Tensor:
    """The cotangents [b * r, ...] of each example times its slope [b, ...]."""
    return (g.reshape(len(slope), -1, *slope.shape[1:]) * slope.unsqueeze(1)).reshape(g.shape)


RELU = Layer(
    stacked=apply_layer,
    overwrite=torch.relu_,
    links=single(lambda m: Positive()),
    obstacle=no_obstacle,
    monotone=True,
)
LEAKY_RELU = Layer(links=single(lambda m: Slopes(m.negative_slope)), obstacle=no_obstacle)
#: Piecewise linear, with more than one kink.
CLIPPED = Layer(obstacle=no_obstacle)
SMOOTH = Layer(stacked=apply_layer)


# Pooling over positions of an image


def _pair(n: int | tuple[int, ...]) -> list[int]:
    return [n, n] if isinstance(n, int) else list(n)


class MaxPool(Link):
    def __init__(self, layer: nn.MaxPool2d):
        self.layer = layer
        self.overlap = layer.kernel_size != layer.stride or layer.dilation not in (1, (1, 1))

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
            sizes = (_pair(n) for n in (m.kernel_size, m.stride, m.padding, m.dilation))
            return torch.ops.aten.max_pool2d_with_indices_backward(
                g, like, *sizes, m.ceil_mode, places
            )
        flat = places.reshape(b, 1, c, -1).expand(b, len(g) // b, c, -1)
        out = g.new_zeros(b, len(g) // b, c, h * w)
        spread = out.scatter_add_ if self.overlap else out.scatter_
        return spread(3, flat, g.reshape(flat.shape)).reshape(len(g), c, h, w)


class LinearMap(Link):
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


MAX_POOL = Layer(
    fits=lambda m: not m.return_indices,
    stacked=apply_layer,
    links=single(MaxPool),
    obstacle=no_obstacle,
    takes_maximum=True,
)
AVERAGE_POOL = Layer(stacked=apply_layer, links=single(LinearMap), obstacle=no_obstacle)
ADAPTIVE_MAX_POOL = Layer(obstacle=no_obstacle)


# Layers that rearrange, copy or pass on their input, and dropout, which passes it on in eval mode


class FlattenLink(Link):
    def forward(self, a: Tensor) -> tuple[Tensor, tuple[torch.Size, torch.memory_format]]:
        return a.flatten(1), (a.shape, layout_of(a))

    def tangent(self, saved: tuple[torch.Size, torch.memory_format], t: Tensor) -> Tensor:
        return t.flatten(1)

    def back(self, saved: tuple[torch.Size, torch.memory_format], g: Tensor) -> Tensor:
        shape, memory_format = saved
        return g.reshape(len(g), *shape[1:]).contiguous(memory_format=memory_format)


def _flattens_all_but_examples(m: nn.Flatten) -> bool:
    return (m.start_dim, m.end_dim) == (1, -1)


def _stacked_flatten(m: nn.Flatten, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    if x.dim() == 5:
        return x.flatten(2)
    if x.dim() == 3:
        return x
    return x.reshape(x.shape[0], rows, -1).transpose(0, 1)


def _no_links(m: nn.Module, name: str, buffers: Views) -> list[Link | Weighted]:
    return []


def _upsample_obstacle(m: Any) -> str | None:
    return None if m.mode in ("nearest", "bilinear") else f"(Upsample {m.mode})"


FLATTEN = Layer(
    fits=_flattens_all_but_examples,
    stacked=_stacked_flatten,
    takes_rows=True,
    links=single(lambda m: FlattenLink()),
    obstacle=no_obstacle,
)
IDENTITY = Layer(stacked=apply_layer, links=_no_links, obstacle=no_obstacle)
DROPOUT = Layer(
    fits=lambda m: not m.training,
    links=_no_links,
    obstacle=no_obstacle,
    random=True,
)
#: Linear, with neither a stacked form nor links.
UNFLATTEN = Layer(obstacle=no_obstacle)
PADDING = Layer(obstacle=no_obstacle)
UPSAMPLE = Layer(obstacle=_upsample_obstacle)


#: By the exact type: a subclass may compute anything.
LAYERS: dict[type[nn.Module], Layer] = {
    nn.Linear: LINEAR,
    nn.Conv2d: CONV2D,
    nn.BatchNorm1d: BATCH_NORM,
    nn.BatchNorm2d: BATCH_NORM,
    nn.modules.batchnorm._BatchNorm: ANY_BATCH_NORM,
    nn.GroupNorm: GROUP_NORM,
    nn.ReLU: RELU,
    nn.LeakyReLU: LEAKY_RELU,
    nn.ReLU6: CLIPPED,
    nn.Hardtanh: CLIPPED,
    nn.Tanh: SMOOTH,
    nn.GELU: SMOOTH,
    nn.Sigmoid: SMOOTH,
    nn.MaxPool2d: MAX_POOL,
    nn.AvgPool2d: AVERAGE_POOL,
    nn.AdaptiveAvgPool2d: AVERAGE_POOL,
    nn.AdaptiveMaxPool2d: ADAPTIVE_MAX_POOL,
    nn.Flatten: FLATTEN,
    nn.Unflatten: UNFLATTEN,
    nn.ZeroPad2d: PADDING,
    nn.Upsample: UPSAMPLE,
    nn.Identity: IDENTITY,
    nn.Dropout: DROPOUT,
    nn.Dropout1d: DROPOUT,
    nn.Dropout2d: DROPOUT,
    nn.Dropout3d: DROPOUT,
    nn.AlphaDropout: DROPOUT,
    nn.FeatureAlphaDropout: DROPOUT,
}
_NO_RULES = Layer()


def rules(m: nn.Module) -> Layer:
    """The entry of a layer's type, without any rule for a type that is not in the table."""
    return LAYERS.get(type(m), _NO_RULES)


def inherited_rules(m: nn.Module) -> Layer:
    """The entry of the nearest of a layer's classes: for what a subclass has in common with its parent."""
    return next((LAYERS[kind] for kind in type(m).__mro__ if kind in LAYERS), _NO_RULES)


def batch_dependent(module: nn.Module) -> bool:
    """Whether an example's output depends on the others of its batch, also in eval mode, as far as the layers tell."""
    return any(inherited_rules(m).mixes_examples(m) for m in module.modules())


def apply_slim(m: nn.Module, x: Tensor, width: float | None = None) -> Tensor:
    """``m(x)``, or with a ``width`` the slim form of ``m``: from the channels that ``x`` has to the first ``width`` of its own.

    Slimmable layers (Yu et al., ICLR 2019) as GradAug (Yang et al., NeurIPS 2020) and FedAlign (Mendieta et al., CVPR 2022)
    use them: the first channels of every layer, with the weights of the full network, which stays an ordinary module.
    Layers without parameters have only one form.
    """
    if width is None or not any(True for _ in m.parameters()):
        return m(x)
    slim = inherited_rules(m).slim
    if slim is None:
        raise FldiagError(
            f"a layer of type {type(m).__name__} has no slim form", "use batch-norm or group-norm"
        )
    return slim(m, x, width)


# The layers of a sequential network, in order


def hooked(m: nn.Module) -> bool:
    """Whether calling the module does more than its type says."""
    return bool(
        m._forward_hooks
        or m._forward_pre_hooks
        or m._backward_hooks
        or m._backward_pre_hooks
        or "forward" in vars(m)
    )


def leaves(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Names and layers of nested ``nn.Sequential``s in order; of any other module, itself.

    None where hooks change what a module computes, or where weights are shared or frozen.
    """
    layers = None if frozen.weights(module) else _leaves(module, "")
    if layers is None:
        return None
    separate = sum(len(list(m.parameters())) for _, m in layers)
    return layers if separate == len(list(module.parameters())) else None


def _leaves(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]] | None:
    if hooked(module):
        return None
    if type(module).forward is not nn.Sequential.forward:
        return [(prefix.removesuffix("."), module)]
    layers: list[tuple[str, nn.Module]] = []
    # named_children() would drop a second use of the same layer
    for name, child in module._modules.items():
        inner = None if child is None else _leaves(child, f"{prefix}{name}.")
        if inner is None:
            return None
        layers += inner
    return layers


def pool_first(chain: Chain) -> list[tuple[str, nn.Module]]:
    """ReLU after max-pooling instead of before: the same values and gradients to the bit (the maximum commutes with
    a monotone function), on a quarter of the entries. Saves 5-10 % of a step of the FedAvg CNNs."""
    chain = list(chain)
    for i in range(len(chain) - 1):
        if rules(chain[i][1]).monotone and rules(chain[i + 1][1]).takes_maximum:
            chain[i], chain[i + 1] = chain[i + 1], chain[i]
    return chain


def network_links(module: nn.Module, buffers: Views) -> list[Link | Weighted] | None:
    """The links of a sequential network in eval mode, None when some layer has no rule or weights are shared."""
    links = chain_links(pool_first(leaves(module) or []), buffers)
    return links if links and any(isinstance(link, Weighted) for link in links) else None


def chain_links(chain: Chain, buffers: Views) -> list[Link | Weighted] | None:
    """The links of these layers, None when some layer has no rule."""
    links: list[Link | Weighted] = []
    for name, m in chain:
        rule = rules(m)
        of_layer = rule.links(m, name, buffers) if rule.links is not None and rule.fits(m) else None
        if of_layer is None:
            return None
        links += of_layer
    return links
