"""Several models side by side: chains of common layers, and how each of these is evaluated for all rows of weights at once.

Affine layers are one batched product, convolutions one grouped convolution. A new type of layer is one entry of ``STACKED``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.models.lora import frozen_weights

Chain = list[tuple[str, nn.Module]]
Views = Mapping[str, Tensor]
#: (layer, its name, the network's weights by full name [rows, ...], inputs, rows) -> outputs. Images are [B, rows * C, H, W],
#: anything else is [rows, B, ...].
Rule = Callable[[Any, str, Views, Tensor, int], Tensor]


def chain_of(module: nn.Module) -> Chain | None:
    """Names and layers of nested ``nn.Sequential``s, in order; None of any other module.

    None, too, where a layer has no rule, hooks change what it computes, or weights are shared or frozen.
    """
    if type(module).forward is not nn.Sequential.forward or frozen_weights(module):
        return None
    chain = _leaves(module, "")
    separate = sum(len(list(m.parameters())) for _, m in chain)
    fits = separate == len(list(module.parameters())) and all(map(_has_rule, dict(chain).values()))
    return chain if fits and not any(map(hooked, module.modules())) else None


def hooked(m: nn.Module) -> bool:
    """Whether calling the module does more than its type says."""
    hooks = m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
    return bool(hooks) or "forward" in vars(m)


def pool_first(chain: Chain) -> Chain:
    """ReLU after max-pooling instead of before: the same values and gradients to the bit (the maximum commutes with a monotone
    function), on a quarter of the entries. Saves 5-10 % of a step of the FedAvg CNNs."""
    chain = list(chain)
    for i in range(len(chain) - 1):
        if (type(chain[i][1]), type(chain[i + 1][1])) == (nn.ReLU, nn.MaxPool2d):
            chain[i], chain[i + 1] = chain[i + 1], chain[i]
    return chain


def _leaves(module: nn.Module, prefix: str) -> Chain:
    if type(module).forward is not nn.Sequential.forward:
        return [(prefix.removesuffix("."), module)]
    # named_children() would drop a second use of the same layer
    children = module._modules.items()
    return [leaf for name, m in children if m for leaf in _leaves(m, f"{prefix}{name}.")]


def _has_rule(m: Any) -> bool:
    """By the exact type: a subclass may compute anything."""
    if type(m) is nn.Flatten:
        return (m.start_dim, m.end_dim) == (1, -1)
    pads = getattr(m, "padding_mode", "zeros") == "zeros"
    return type(m) in STACKED and pads and not getattr(m, "return_indices", False)


def _linear(m: nn.Linear, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    w, b = views[f"{name}.weight"], views.get(f"{name}.bias")
    if rows == 1:
        return F.linear(x[0], w[0], None if b is None else b[0]).unsqueeze(0)
    return torch.bmm(x, w.mT) if b is None else torch.baddbmm(b.unsqueeze(1), x, w.mT)


def _convolution(m: nn.Conv2d, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    w, b = views[f"{name}.weight"].flatten(0, 1), views.get(f"{name}.bias")
    b = None if b is None else b.flatten()
    return F.conv2d(x, w, b, m.stride, m.padding, m.dilation, rows * m.groups)


def _flatten(m: nn.Flatten, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    """Also of images as [rows, B, C, H, W], where it is the first layer."""
    if x.dim() == 5:
        return x.flatten(2)
    return x if x.dim() == 3 else x.reshape(x.shape[0], rows, -1).transpose(0, 1)


def _alike(m: nn.Module, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    """Of a layer without weights that treats examples and channels alike."""
    out: Tensor = m(x)
    return out


STACKED: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.Flatten: _flatten,
    nn.ReLU: _alike,
    nn.Tanh: _alike,
    nn.GELU: _alike,
    nn.Sigmoid: _alike,
    nn.MaxPool2d: _alike,
    nn.AvgPool2d: _alike,
    nn.AdaptiveAvgPool2d: _alike,
    nn.Identity: _alike,
}
