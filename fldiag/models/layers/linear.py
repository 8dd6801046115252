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


def _call(m: nn.Linear, name: str, views: Views, x: Tensor) -> Tensor:
    return F.linear(x, views[f"{name}.weight"], views.get(f"{name}.bias"))


def _stacked(m: nn.Linear, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    w, b = views[f"{name}.weight"], views.get(f"{name}.bias")
    if rows == 1:
        return F.linear(x[0], w[0], None if b is None else b[0]).unsqueeze(0)
    return _affine(x, w, b)


def _affine(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of K models: a [K, b, I], weight [K, O, I], bias [K, O] -> [K, b, O]."""
    return torch.bmm(a, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), a, weight.mT)


class LinearLink(Weighted):
    stacks = True

    def apply(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.ndim == 2:
            return F.linear(a, weight, bias)
        return _affine(by_model(a, weight), weight, bias).flatten(0, 1)

    def back(self, g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        return g @ weight if weight.ndim == 2 else torch.bmm(by_model(g, weight), weight).flatten(0, 1)

    def weigh(self, g: Tensor, a: Tensor, weight: Tensor) -> Tensor:
        return g.T @ a if weight.ndim == 2 else torch.bmm(by_model(g, weight).mT, by_model(a, weight))

    def shift(self, g: Tensor, weight: Tensor) -> Tensor:
        return g.sum(0) if weight.ndim == 2 else by_model(g, weight).sum(1)

    def write(self, g: Tensor, a: Tensor, views: Views, into: Views) -> None:
        """Without a copy: the matrix product goes straight into its place."""
        weight, place = views[self.weight], into[self.weight]
        if g.dtype != place.dtype:
            return super().write(g, a, views, into)
        if weight.ndim == 2:
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
