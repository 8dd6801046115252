"""Rows of weights meet a minibatch, and gradients come back, without autograd (for networks with ``Network.pieces``).

The same numbers as ``Network.bind`` and autograd give, up to rounding: a test holds the two together. Autograd is left what
a method makes of logits and features.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from fldiag.models.chain import Pass
from fldiag.models.layers.links import Views
from fldiag.models.network import Network


class ByHand:
    """The body at rows w [k, P] on inputs x [k, B, ...]; ``output`` adds the head.

    ``alone``: the row has no others beside it, so convolutions are those of one model. ``named``: where views of w are kept
    by k, for rows that change in place and come again.
    """

    def __init__(
        self,
        network: Network,
        w: Tensor,
        x: Tensor,
        alone: bool,
        named: dict[int, Views] | None = None,
    ):
        assert network.pieces is not None
        self.network, self.w, self.alone, self.cut = network, w, alone, network.cut
        self.dtype = torch.bfloat16 if network.precision == "bf16" else w.dtype
        a = x.flatten(0, 1).to(self.dtype)
        with torch.no_grad():
            self.views = self._named(w, {} if named is None or self.dtype != w.dtype else named)
            self.body = Pass.of(
                network.pieces[0],
                self.views,
                a.to(memory_format=torch.channels_last) if a.dim() == 4 else a,
            )

    def _named(self, w: Tensor, kept: dict[int, Views]) -> Views:
        if len(w) not in kept:
            kept[len(w)] = self.network.layout.views(self._rows(w))
        return kept[len(w)]

    def _rows(self, w: Tensor) -> Tensor:
        return (w[0] if self.alone else w).to(self.dtype)

    def output(self, head: Tensor | None = None) -> Logits:
        """``head`` [k, H]: in place of the head's own weights."""
        layout = self.network.layout
        views = (
            self.views
            if head is None
            else layout.part(self.cut, layout.size).views(self._rows(head))
        )
        with torch.no_grad():
            return Logits(self, Pass.of(self.network.pieces[1], views, self.body.out))  # type: ignore[index]


class Logits:
    """``features`` and ``logits`` [k, B, ...] and the weights ``leaf`` [k, P], each a leaf: autograd differentiates what is made
    of them. ``values``: the logits as numbers."""

    def __init__(self, run: ByHand, head: Pass):
        self.run, self.head = run, head
        values = head.out.unflatten(0, (len(run.w), -1))
        self.values = values.float() if run.dtype == torch.bfloat16 else values

    @cached_property
    def leaf(self) -> Tensor:
        return self.run.w.detach().requires_grad_()

    @cached_property
    def logits(self) -> Tensor:
        return self.values.detach().requires_grad_()

    @cached_property
    def features(self) -> Tensor | None:
        if not self.run.network.has_split:
            return None
        return self.run.body.out.unflatten(0, (len(self.run.w), -1)).detach().requires_grad_()

    def gradient(self, values: Tensor) -> Tensor:
        """The gradient [k, P] of values [k]."""
        if not values.requires_grad:
            return torch.zeros_like(self.run.w)
        leaves = (
            [self.leaf, self.logits]
            if self.features is None
            else [self.leaf, self.logits, self.features]
        )
        own, *slopes = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
        g = self.back(*slopes)
        return g if own is None else g.add_(own)

    def back(self, logits: Tensor | None, features: Tensor | None = None) -> Tensor:
        """The gradient [k, P] from those in logits and features."""
        run, g = self.run, torch.empty_like(self.run.w)
        into = run.network.layout.views(g[0] if run.alone else g)
        with torch.no_grad():
            slope = self._slope(logits, self.head.out)
            slope = self.head.gradient(slope, into, through=True)
            if features is not None:
                slope = slope + self._slope(features, slope)
            run.body.gradient(slope, into)
        return g

    def head_gradient(self, values: Tensor) -> Tensor:
        """The gradient [k, H] of values [k] in the head's weights, with the features as they are."""
        run, layout = self.run, self.run.network.layout
        g = run.w.new_empty(len(run.w), layout.head_size)
        (slope,) = torch.autograd.grad(values.sum(), self.logits)
        into = layout.part(run.cut, layout.size).views(g[0] if run.alone else g)
        with torch.no_grad():
            self.head.gradient(self._slope(slope, self.head.out), into)
        return g

    @staticmethod
    def _slope(g: Tensor | None, like: Tensor) -> Tensor:
        return torch.zeros_like(like) if g is None else g.flatten(0, 1).to(like.dtype)
