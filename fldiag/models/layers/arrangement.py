"""Layers that rearrange, copy or pass on their input, and dropout, which passes it on in eval mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fldiag.models.layers.entry import Layer, Units, as_it_is, kept, no_obstacle
from fldiag.models.layers.links import Link, Views, Weighted, layout_of, single


def _all_but_examples(m: nn.Flatten) -> bool:
    return (m.start_dim, m.end_dim) == (1, -1)


def _stacked_flatten(m: nn.Flatten, name: str, views: Views, x: Tensor, rows: int) -> Tensor:
    if x.dim() == 5:
        return x.flatten(2)
    if x.dim() == 3:
        return x
    return x.reshape(x.shape[0], rows, -1).transpose(0, 1)


class Flat(Link):
    def forward(self, a: Tensor) -> tuple[Tensor, tuple[torch.Size, torch.memory_format]]:
        return a.flatten(1), (a.shape, layout_of(a))

    def tangent(self, saved: tuple[torch.Size, torch.memory_format], t: Tensor) -> Tensor:
        return t.flatten(1)

    def back(self, saved: tuple[torch.Size, torch.memory_format], g: Tensor) -> Tensor:
        shape, memory_format = saved
        return g.reshape(len(g), *shape[1:]).contiguous(memory_format=memory_format)


def _no_links(m: nn.Module, name: str, buffers: Views) -> list[Link | Weighted]:
    return []


def _asleep(m: nn.Module) -> bool:
    return not m.training


def _flat(m: nn.Flatten) -> Units | None:
    return "flat" if _all_but_examples(m) else None


def _upsample_obstacle(m: Any) -> str | None:
    return None if m.mode in ("nearest", "bilinear") else f"(Upsample {m.mode})"


FLATTEN = Layer(
    fits=_all_but_examples,
    stacked=_stacked_flatten,
    takes_rows=True,
    links=single(lambda m: Flat()),
    obstacle=no_obstacle,
    units=_flat,
)
IDENTITY = Layer(stacked=as_it_is, links=_no_links, obstacle=no_obstacle, units=kept)
DROPOUT = Layer(fits=_asleep, links=_no_links, obstacle=no_obstacle, random=True, units=kept)
#: Linear, with neither a stacked form nor links.
UNFLATTEN = Layer(obstacle=no_obstacle)
PADDING = Layer(obstacle=no_obstacle, units=kept)
UPSAMPLE = Layer(obstacle=_upsample_obstacle, units=kept)
