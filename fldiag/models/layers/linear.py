"""``nn.Linear``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fldiag.models.layers import per_example_squares
from fldiag.models.layers.entry import Layer, Units, no_obstacle
from fldiag.models.layers.links import Link, Views, Weighted, by_model
from fldiag.models.layers.width import channels

LARGE = 2**20  # multiplications from which on a kernel's choice shows


def product(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [b, I], weight [O, I], bias [O] -> [b, O]."""
    if by_onednn(a, weight):
        dense = None if bias is None else bias.contiguous()  # it reads a bias as one stretch of memory
        return torch.ops.mkldnn._linear_pointwise(a, weight, dense, "none", [], "")
    return F.linear(a, weight, bias)


def by_onednn(a: Tensor, weight: Tensor) -> bool:
    """Large float32 products without a graph on a CPU are oneDNN's: MKL's take twice as long on processors that are not
    Intel's. (PyTorch asks oneDNN for bfloat16 by itself, also under autocast, which the kernel itself would not follow.)"""
    return (a.dtype == weight.dtype == torch.float32 and a.device.type == "cpu" and not torch.is_grad_enabled()
            and len(a) * weight.numel() >= LARGE and hasattr(torch.ops.mkldnn, "_linear_pointwise")
            and not torch.is_autocast_enabled("cpu")
            and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled))


def _call(m: nn.Linear, name: str, views: Views, x: Tensor) -> Tensor:
    return F.linear(x, views[f"{name}.weight"], views.get(f"{name}.bias"))


def _stacked(m: nn.Linear, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    w, b = views[f"{name}.weight"], views.get(f"{name}.bias")
    if rows == 1:
        return product(x[0], w[0], None if b is None else b[0]).unsqueeze(0)
    return _affine(x, w, b)


def _affine(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of K models: a [K, b, I], weight [K, O, I], bias [K, O] -> [K, b, O]."""
    return torch.bmm(a, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), a, weight.mT)


class LinearLink(Weighted):
    stacks = True

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.ndim == 2:
            return product(a, weight, bias)
        return _affine(by_model(a, weight), weight, bias).flatten(0, 1)

    def back(self, g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        return product(g, weight.T) if weight.ndim == 2 else torch.bmm(by_model(g, weight), weight).flatten(0, 1)

    def weigh(self, g: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        return product(g.T, a.T) if weight.ndim == 2 else torch.bmm(by_model(g, weight).mT, by_model(a, weight))

    def shift(self, g: Tensor, weight: Tensor) -> Tensor:
        return g.sum(0) if weight.ndim == 2 else by_model(g, weight).sum(1)

    def write(self, g: Tensor, a: Tensor, views: Views, into: Views) -> None:
        """Without a copy, where the product can go straight into its place."""
        weight, place = views[self.weight], into[self.weight]
        if g.dtype != place.dtype:
            return super().write(g, a, views, into)
        if weight.ndim == 2 and by_onednn(g.T, a.T):
            place.copy_(self.weigh(g, a, weight))
        elif weight.ndim == 2:
            torch.mm(g.T, a, out=place)
        else:
            g = by_model(g, weight)
            torch.bmm(g.mT, by_model(a, weight), out=place)
        if self.bias is not None:
            torch.sum(g, weight.ndim - 2, out=into[self.bias])


def _links(m: nn.Linear, name: str, buffers: Views) -> list[Link | Weighted]:
    return [LinearLink(name, m.bias is not None)]


def _squares(m: nn.Linear, a: Tensor, g: Tensor, total: bool) -> dict[str, Tensor]:
    if a.ndim == 2:
        found = {"weight": per_example_squares.outer(g, a, total)}
        g = g.unsqueeze(3)
    else:
        g = g.flatten(2, -2).transpose(2, 3)
        found = {"weight": per_example_squares.positions(g, a.flatten(1, -2).transpose(1, 2), total)}
    return found if m.bias is None else {**found, "bias": per_example_squares.bias(g, total)}


def _macs(m: Any, out: Tensor) -> int:
    return out.numel() * m.in_features


def _slim(m: nn.Linear, x: Tensor, width: float) -> Tensor:
    n = channels(m.out_features, width)
    return F.linear(x, m.weight[:n, : x.shape[1]], None if m.bias is None else m.bias[:n])


def _units(m: nn.Linear) -> Units | None:
    return "new"


LINEAR = Layer(call=_call, stacked=_stacked, links=_links, squares=_squares, obstacle=no_obstacle, macs=_macs, slim=_slim,
               units=_units)
