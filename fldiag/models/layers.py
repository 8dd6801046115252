"""Everything that depends on the type of a layer: one table, one rule a type.

Stacked evaluation (``models/network.py``), slim sub-networks, exact diagonals, the proof that a network is piecewise linear and
the probe of a Problem look here. A new type is one entry, also for a layer of one's own::

    LAYERS[Gain] = Layer(stacked=..., squares=..., obstacle=no_obstacle)

``Layer`` says what each rule means. How large sums of squares are computed is in ``models/squares.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.errors import FldiagError
from fldiag.models import frozen
from fldiag.models.squares import bias_squares, outer_squares, position_squares

Chain = Sequence[tuple[str, nn.Module]]
Views = Mapping[str, Tensor]


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

    ``fits(m)``: whether ``stacked`` holds for a layer with these settings.
    ``stacked(m, name, views, x, rows)``: the outputs of several models side by side. Each view is [rows, ...]; images
    are [B, rows * C, H, W], anything else is [rows, B, ...].
    ``takes_rows``: ``stacked`` also takes images as [rows, B, C, H, W].
    ``squares(m, a, g, total)``: name of a weight -> the sum over examples of its squared gradients, or with ``total``
    the sum over all entries, for inputs a [b, ...] and r cotangents of each output, g [b, r, ...].
    ``squares_input(m, a)``: what ``squares`` takes for an input a. Computed while the layer is evaluated: only then do its
    buffers hold the values that belong to the weights.
    ``obstacle(m)``: what keeps the output from being piecewise linear in the input and in the weights, with the other
    one fixed, in eval mode; None where nothing does.
    ``slim(m, x, width)``: from the channels (features) that x has to the first ``width`` in (0, 1] of the layer's own.
    ``mixes_examples(m)``: whether an example's output depends on the others of its batch, also in eval mode.
    ``random``: it draws random numbers in training mode.
    ``channels_last``: without gradients it is faster in that memory format.
    """

    fits: Callable[[Any], bool] = always
    stacked: Callable[[Any, str, Views, Tensor, int], Tensor] | None = None
    takes_rows: bool = False
    squares: Callable[[Any, Tensor, Tensor, bool], dict[str, Tensor]] | None = None
    squares_input: Callable[[Any, Tensor], Tensor] = layer_input
    obstacle: Callable[[Any], str | None] = unknown_obstacle
    slim: Callable[[Any, Tensor, float], Tensor] | None = None
    mixes_examples: Callable[[Any], bool] = never
    random: bool = False
    channels_last: bool = False


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


def _stacked_linear(m: nn.Linear, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    w, b = views[f"{name}.weight"], views.get(f"{name}.bias")
    if rows == 1:
        return F.linear(x[0], w[0], None if b is None else b[0]).unsqueeze(0)
    return torch.bmm(x, w.mT) if b is None else torch.baddbmm(b.unsqueeze(1), x, w.mT)


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
    stacked=_stacked_linear,
    squares=_linear_squares,
    obstacle=no_obstacle,
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


def _stacked_convolution(m: nn.Conv2d, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    w, b = views[f"{name}.weight"], views.get(f"{name}.bias")
    return _convolve(m, x, w.flatten(0, 1), None if b is None else b.flatten(), rows)


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


def _slim_convolution(m: nn.Conv2d, x: Tensor, width: float) -> Tensor:
    """For groups = 1."""
    n = channels(m.out_channels, width)
    return _convolve(m, x, m.weight[:n, : x.shape[1]], None if m.bias is None else m.bias[:n])


CONV2D = Layer(
    fits=_pads_with_zeros,
    stacked=_stacked_convolution,
    squares=_convolution_squares,
    obstacle=lambda m: None if _pads_with_zeros(m) else f"pads in mode {m.padding_mode!r}",
    slim=_slim_convolution,
    channels_last=True,
)


# Batch-norm, and the slim form of group-norm


def _uses_batch_statistics(m: Any) -> bool:
    """Also in eval mode."""
    return m.running_mean is None


def _uses_running_statistics(m: Any) -> bool:
    """So it is an affine layer."""
    return m.running_mean is not None and not m.training


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


RELU = Layer(
    stacked=apply_layer,
    obstacle=no_obstacle,
)
LEAKY_RELU = Layer(obstacle=no_obstacle)
#: Piecewise linear, with more than one kink.
CLIPPED = Layer(obstacle=no_obstacle)
SMOOTH = Layer(stacked=apply_layer)


# Pooling over positions of an image


MAX_POOL = Layer(
    fits=lambda m: not m.return_indices,
    stacked=apply_layer,
    obstacle=no_obstacle,
)
AVERAGE_POOL = Layer(stacked=apply_layer, obstacle=no_obstacle)
ADAPTIVE_MAX_POOL = Layer(obstacle=no_obstacle)


# Layers that rearrange, copy or pass on their input, and dropout, which passes it on in eval mode


def _flattens_all_but_examples(m: nn.Flatten) -> bool:
    return (m.start_dim, m.end_dim) == (1, -1)


def _stacked_flatten(m: nn.Flatten, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    if x.dim() == 5:
        return x.flatten(2)
    if x.dim() == 3:
        return x
    return x.reshape(x.shape[0], rows, -1).transpose(0, 1)


def _upsample_obstacle(m: Any) -> str | None:
    return None if m.mode in ("nearest", "bilinear") else f"(Upsample {m.mode})"


FLATTEN = Layer(
    fits=_flattens_all_but_examples,
    stacked=_stacked_flatten,
    takes_rows=True,
    obstacle=no_obstacle,
)
IDENTITY = Layer(stacked=apply_layer, obstacle=no_obstacle)
DROPOUT = Layer(
    fits=lambda m: not m.training,
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
        if (type(chain[i][1]), type(chain[i + 1][1])) == (nn.ReLU, nn.MaxPool2d):
            chain[i], chain[i + 1] = chain[i + 1], chain[i]
    return chain
