"""Layers that rearrange, copy or pass on their input, and dropout, which passes it on in eval mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fldiag.models.layers.entry import Layer, as_it_is, no_obstacle
from fldiag.models.layers.links import Link, Views, Weighted, single


def _all_but_examples(m: nn.Flatten) -> bool:
    return (m.start_dim, m.end_dim) == (1, -1)


def _stacked_flatten(m: nn.Flatten, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    if x.dim() == 5:
        return x.flatten(2)
    if x.dim() == 3:
        return x
    return x.reshape(x.shape[0], rows, -1).transpose(0, 1)


class Flat(Link):
    def forward(self, a: Tensor) -> tuple[Tensor, torch.Size]:
        return a.flatten(1), a.shape

    def tangent(self, saved: torch.Size, t: Tensor) -> Tensor:
        return t.flatten(1)

    def back(self, saved: torch.Size, g: Tensor) -> Tensor:
        return g.reshape(len(g), *saved[1:])


def _no_links(m: nn.Module, name: str, buffers: Views) -> list[Link | Weighted]:
    return []


def _asleep(m: nn.Module) -> bool:
    return not m.training


def _upsample_obstacle(m: Any) -> str | None:
    return None if m.mode in ("nearest", "bilinear") else f"(Upsample {m.mode})"


FLATTEN = Layer(fits=_all_but_examples, stacked=_stacked_flatten, takes_rows=True, links=single(lambda m: Flat()),
                obstacle=no_obstacle)
IDENTITY = Layer(stacked=as_it_is, links=_no_links, obstacle=no_obstacle)
DROPOUT = Layer(fits=_asleep, links=_no_links, obstacle=no_obstacle, random=True)
#: Linear, with neither a stacked form nor links.
PADDING = UNFLATTEN = Layer(obstacle=no_obstacle)
UPSAMPLE = Layer(obstacle=_upsample_obstacle)
