"""``nn.Conv2d``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.models.layers import per_example_squares
from fldiag.models.layers.entry import Layer, Units
from fldiag.models.layers.links import Link, Views, Weighted, by_model, layout_of
from fldiag.models.layers.patches import Patches
from fldiag.models.layers.width import channels

_convolution_backward: Any = torch.ops.aten.convolution_backward


def zero_padding(layer: nn.Conv2d) -> tuple[int, ...]:
    """Padding in rows and columns. Raises ValueError where one side would be padded more than the other."""
    if isinstance(layer.padding, str):
        wide = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        if layer.padding == "valid":
            return 0, 0
        if any(p % 2 for p in wide):
            raise ValueError(
                f"padding = {layer.padding!r} with a kernel of size {list(layer.kernel_size)} pads one side more "
                "than the other"
            )
        return tuple(p // 2 for p in wide)
    return layer.padding


def _pads_with_zeros(m: nn.Conv2d) -> bool:
    return m.padding_mode == "zeros"


def _convolve(
    m: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None, rows: int = 1
) -> Tensor:
    """``m`` with these weights, of ``rows`` models side by side."""
    return F.conv2d(x, weight, bias, m.stride, m.padding, m.dilation, rows * m.groups)


def _call(m: nn.Conv2d, name: str, views: Views, x: Tensor) -> Tensor:
    return _convolve(m, x, views[f"{name}.weight"], views.get(f"{name}.bias"))


def _stacked(m: nn.Conv2d, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    w, b = views[f"{name}.weight"], views.get(f"{name}.bias")
    return _convolve(m, x, w.flatten(0, 1), None if b is None else b.flatten(), rows)


class ConvLink(Weighted):
    def __init__(self, name: str, layer: nn.Conv2d):
        super().__init__(name, layer.bias is not None)
        self.layer, self.padding = layer, zero_padding(layer)
        self.side_by_side = Patches(layer, self.padding)

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.ndim == 5:
            return self.side_by_side.apply(a, weight, bias)
        return _convolve(self.layer, a, weight, bias)

    def _backward(self, g: Tensor, a: Tensor, weight: Tensor, wanted: list[bool]) -> list[Tensor]:
        m = self.layer
        return _convolution_backward(
            g, a, weight, None, m.stride, self.padding, m.dilation, False, [0, 0], m.groups, wanted
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


def _links(m: nn.Conv2d, name: str, buffers: Views) -> list[Link | Weighted] | None:
    try:
        return [ConvLink(name, m)]
    except ValueError:
        return None


def _squares(m: nn.Conv2d, a: Tensor, g: Tensor, total: bool) -> dict[str, Tensor]:
    patches = F.unfold(a, m.kernel_size, m.dilation, zero_padding(m), m.stride)  # [b, I * k * k, L]
    g = g.flatten(3)
    parts = [
        per_example_squares.positions(gp, up, total)
        for gp, up in zip(g.chunk(m.groups, 2), patches.chunk(m.groups, 1), strict=True)
    ]
    found = {
        "weight": torch.stack(parts).sum(0) if total else torch.cat(parts).reshape(m.weight.shape)
    }
    return found if m.bias is None else {**found, "bias": per_example_squares.bias(g, total)}


def _obstacle(m: nn.Conv2d) -> str | None:
    return None if _pads_with_zeros(m) else f"pads in mode {m.padding_mode!r}"


def _macs(m: nn.Conv2d, out: Tensor) -> int:
    return out[0].numel() * (m.in_channels // m.groups) * math.prod(m.kernel_size)


def _slim(m: nn.Conv2d, x: Tensor, width: float) -> Tensor:
    """For groups = 1."""
    n = channels(m.out_channels, width)
    return _convolve(m, x, m.weight[:n, : x.shape[1]], None if m.bias is None else m.bias[:n])


def _units(m: nn.Conv2d) -> Units | None:
    return "new" if m.groups == 1 else None


CONV2D = Layer(
    fits=_pads_with_zeros,
    call=_call,
    stacked=_stacked,
    links=_links,
    squares=_squares,
    obstacle=_obstacle,
    macs=_macs,
    slim=_slim,
    channels_last=True,
    units=_units,
)
