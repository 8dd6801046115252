"""Exact diagonals and the proof that a network is piecewise linear: one table, one rule for a type of layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.curvature.squares import bias_squares, outer_squares, position_squares


def unknown_obstacle(m: Any) -> str | None:
    return f"({type(m).__name__})"


def no_obstacle(m: Any) -> str | None:
    return None


def layer_input(m: Any, a: Tensor) -> Tensor:
    return a


@dataclass(frozen=True)
class Layer:
    """The rules for one type of layer. Where a rule is left out, a network with such a layer takes the general way.

    ``squares(m, a, g, total)``: name of a weight -> the sum over examples of its squared gradients, or with ``total``
    the sum over all entries, for inputs a [b, ...] and r cotangents of each output, g [b, r, ...].
    ``squares_input(m, a)``: what ``squares`` takes for an input a. Computed while the layer is evaluated: only then do its
    buffers hold the values that belong to the weights.
    ``obstacle(m)``: what keeps the output from being piecewise linear in the input and in the weights, with the other
    one fixed, in eval mode; None where nothing does.
    ``random``: it draws random numbers in training mode.
    ``channels_last``: without gradients it is faster in that memory format.
    """

    squares: Callable[[Any, Tensor, Tensor, bool], dict[str, Tensor]] | None = None
    squares_input: Callable[[Any, Tensor], Tensor] = layer_input
    obstacle: Callable[[Any], str | None] = unknown_obstacle
    random: bool = False
    channels_last: bool = False


# nn.Linear


def _linear_squares(m: nn.Linear, a: Tensor, g: Tensor, total: bool) -> dict[str, Tensor]:
    if a.ndim == 2:
        squares = {"weight": outer_squares(g, a, total)}
        g = g.unsqueeze(3)
    else:
        g = g.flatten(2, -2).transpose(2, 3)
        squares = {"weight": position_squares(g, a.flatten(1, -2).transpose(1, 2), total)}
    return squares if m.bias is None else {**squares, "bias": bias_squares(g, total)}


LINEAR = Layer(
    squares=_linear_squares,
    obstacle=no_obstacle,
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


CONV2D = Layer(
    squares=_convolution_squares,
    obstacle=lambda m: None if _pads_with_zeros(m) else f"pads in mode {m.padding_mode!r}",
    channels_last=True,
)


# Batch-norm


def _uses_batch_statistics(m: Any) -> bool:
    """Also in eval mode."""
    return m.running_mean is None


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


#: What all batch-norms have in common.
ANY_BATCH_NORM = Layer()
BATCH_NORM = Layer(
    squares=_batch_norm_squares,
    squares_input=_normalised,
    obstacle=_batch_norm_obstacle,
)
GROUP_NORM = Layer()


# Functions of single numbers


RELU = Layer(
    obstacle=no_obstacle,
)
LEAKY_RELU = Layer(obstacle=no_obstacle)
#: Piecewise linear, with more than one kink.
CLIPPED = Layer(obstacle=no_obstacle)
SMOOTH = Layer()


# Pooling over positions of an image


MAX_POOL = Layer(
    obstacle=no_obstacle,
)
AVERAGE_POOL = Layer(obstacle=no_obstacle)
ADAPTIVE_MAX_POOL = Layer(obstacle=no_obstacle)


# Layers that rearrange, copy or pass on their input, and dropout, which passes it on in eval mode


def _upsample_obstacle(m: Any) -> str | None:
    return None if m.mode in ("nearest", "bilinear") else f"(Upsample {m.mode})"


FLATTEN = Layer(
    obstacle=no_obstacle,
)
IDENTITY = Layer(obstacle=no_obstacle)
DROPOUT = Layer(
    obstacle=no_obstacle,
    random=True,
)
#: Linear, without a stacked form.
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
