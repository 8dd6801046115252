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
    return _onednn(a, weight, bias) if by_onednn(a, weight) else F.linear(a, weight, bias)


def products(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``product`` of K models: a [K, b, I], weight [K, O, I], bias [K, O] -> [K, b, O]."""
    if by_onednn(a, weight):
        return torch.stack(
            [
                _onednn(*one)
                for one in zip(a, weight, [None] * len(a) if bias is None else bias, strict=True)
            ]
        )
    return (
        torch.bmm(a, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), a, weight.mT)
    )


def _onednn(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dense = None if bias is None else bias.contiguous()  # it reads a bias as one stretch of memory
    return torch.ops.mkldnn._linear_pointwise(a, weight, dense, "none", [], "")


def by_onednn(a: Tensor, weight: Tensor) -> bool:
    """Whether a product [..., b, I] by [..., O, I] is oneDNN's: large ones in float32 without a graph on a CPU, as MKL's take
    up to twice as long on processors that are not Intel's. (PyTorch asks oneDNN for bfloat16 by itself, also under autocast,
    which the kernel itself would not follow.)"""
    return (
        a.shape[-2] * weight.shape[-2] * weight.shape[-1]
        >= LARGE  # first, as most products of small models end here
        and a.dtype == weight.dtype == torch.float32
        and a.device.type == "cpu"
        and not torch.is_grad_enabled()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


def _call(m: nn.Linear, name: str, views: Views, x: Tensor) -> Tensor:
    return F.linear(x, views[f"{name}.weight"], views.get(f"{name}.bias"))


def _stacked(m: nn.Linear, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
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
        return (
            product(g, weight.T)
            if weight.ndim == 2
            else products(by_model(g, weight), weight.mT).flatten(0, 1)
        )

    def weigh(self, g: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        return (
            product(g.T, a.T)
            if weight.ndim == 2
            else products(by_model(g, weight).mT, by_model(a, weight).mT)
        )

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


def _links(m: nn.Linear, name: str, buffers: Views) -> list[Link | Weighted]:
    return [LinearLink(name, m.bias is not None)]


def _squares(m: nn.Linear, a: Tensor, g: Tensor, total: bool) -> dict[str, Tensor]:
    if a.ndim == 2:
        found = {"weight": per_example_squares.outer(g, a, total)}
        g = g.unsqueeze(3)
    else:
        g = g.flatten(2, -2).transpose(2, 3)
        found = {
            "weight": per_example_squares.positions(g, a.flatten(1, -2).transpose(1, 2), total)
        }
    return found if m.bias is None else {**found, "bias": per_example_squares.bias(g, total)}


def _macs(m: Any, out: Tensor) -> int:
    return out.numel() * m.in_features


def _slim(m: nn.Linear, x: Tensor, width: float) -> Tensor:
    n = channels(m.out_features, width)
    return F.linear(x, m.weight[:n, : x.shape[1]], None if m.bias is None else m.bias[:n])


def _units(m: nn.Linear) -> Units | None:
    return "new"


LINEAR = Layer(
    call=_call,
    stacked=_stacked,
    links=_links,
    squares=_squares,
    obstacle=no_obstacle,
    macs=_macs,
    slim=_slim,
    units=_units,
)
