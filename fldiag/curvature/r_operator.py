"""Curvature products of sequential networks by hand: the R-operator (Pearlmutter 1994, section 4).

Activations, masks and the deltas of the gradient do not depend on the vector, so they are computed once per
batch; a product is then one tangent pass and one cotangent pass, each with two terms per layer (one for the
moved input, one for the moved weights): 1.2 to 1.7 gradients. The Gauss-Newton product (Schraudolph 2002)
leaves out the terms with deltas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fldiag.choices import Matrix
from fldiag.curvature.cross_entropy import ClosedForm
from fldiag.curvature.operator import Operator
from fldiag.models.links import Link, Pass, Weighted
from fldiag.params import Layout


@dataclass
class Prepared:
    """A batch at fixed weights: per link its input (weighted links) or what it saved, and for weighted links
    the derivative of the loss in their output; the loss's slope in the network's outputs with its graph."""

    saved: list[Any]
    deltas: list[Tensor | None]
    outputs: Tensor
    slope: Tensor

    @property
    def nbytes(self) -> int:
        sizes = {
            t.data_ptr(): t.untyped_storage().nbytes()
            for item in [*self.saved, *self.deltas, self.outputs, self.slope]
            for t in (item if isinstance(item, tuple) else (item,))
            if isinstance(t, Tensor)
        }
        return sum(sizes.values())


class ChainOperator(Operator):
    """The Hessian or Gauss-Newton matrix of the mean loss of a sequential network at ``w``.

    ``batches[i]()`` gives (x, y) of batch i, ``criterion(outputs, y)`` its mean loss. Prepared batches stay
    from one product to the next as far as ``room`` bytes reach.
    """

    form = "r-operator"

    def __init__(
        self,
        links: Sequence[Link | Weighted],
        criterion: Callable[[Tensor, Tensor], Tensor],
        batches: Sequence[Callable[[], tuple[Tensor, Tensor]]],
        shares: Sequence[float],
        w: Tensor,
        layout: Layout,
        *,
        matrix: Matrix = "hessian",
        room: int = 0,
    ):
        super().__init__(w, shares)
        self._links, self._criterion, self._batches = list(links), criterion, list(batches)
        self._layout, self._matrix, self._room = layout, matrix, room
        self._views = layout.views(self._w)
        self._bytes = 0

    def release(self) -> None:
        super().release()
        self._bytes = 0

    def _worth_keeping(self, i: int, prepared: Prepared) -> bool:
        if self._bytes + prepared.nbytes > self._room:
            return False
        self._bytes += prepared.nbytes
        return True

    def _prepare(self, i: int) -> Prepared:
        x, y = self._batches[i]()
        with torch.no_grad():
            run = Pass.of(self._links, self._views, x)
        with torch.enable_grad(), ClosedForm():
            z = run.out.detach().requires_grad_()
            slope = torch.autograd.grad(self._criterion(z, y), z, create_graph=True)[0]
        deltas: list[Tensor | None] = [None] * len(self._links)
        if self._matrix == "hessian":
            run.back(slope.detach(), deltas.__setitem__)
        return Prepared(run.saved, deltas, z, slope)

    @property
    def _first(self) -> int:
        return next(j for j, link in enumerate(self._links) if isinstance(link, Weighted))

    def _product(self, p: Prepared, v: Tensor) -> Tensor | None:
        if self._matrix == "ggn" and not p.slope.requires_grad:  # a loss linear in the outputs
            return None
        with torch.no_grad():
            moved = self._layout.views(v)
            tangents, t = self._forward(p, moved)
        if t is None:
            return None
        g = torch.zeros_like(p.outputs)
        if p.slope.requires_grad:
            g = torch.autograd.grad(p.slope, p.outputs, t, retain_graph=True)[0]
        with torch.no_grad():
            grads = self._backward(p, moved, tangents, g)
        lead = v.shape[:-1]
        return torch.cat(
            [
                grads[n].reshape(*lead, -1) if n in grads else v.new_zeros(*lead, size)
                for n, size in zip(self._layout.names, self._layout.sizes, strict=True)
            ],
            dim=-1,
        )

    def _forward(
        self, p: Prepared, moved: dict[str, Tensor]
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """The tangents of the weighted links' inputs (None: zero), and that of the outputs."""
        tangents: list[Tensor | None] = []
        t: Tensor | None = None
        for link, saved in zip(self._links, p.saved, strict=True):
            tangents.append(t)
            if isinstance(link, Weighted):
                out = link.forward(saved, moved)
                t = out if t is None else out.add_(link.apply(t, self._views[link.weight]))
            elif t is not None:
                t = link.tangent(saved, t)
        return tangents, t

    def _backward(
        self, p: Prepared, moved: dict[str, Tensor], tangents: list[Tensor | None], g: Tensor
    ) -> dict[str, Tensor]:
        grads: dict[str, Tensor] = {}
        first = self._first
        for j in range(len(self._links) - 1, first - 1, -1):
            link, saved, delta, tangent = self._links[j], p.saved[j], p.deltas[j], tangents[j]
            if not isinstance(link, Weighted):
                g = link.back(saved, g)
                continue
            weight = self._views[link.weight]
            grad = link.weigh(g, saved, weight)
            if delta is not None and tangent is not None:
                grad += link.weigh(delta, tangent, weight)
            grads[link.weight] = grad
            if link.bias is not None:
                grads[link.bias] = link.shift(g, weight)
            if j > first:
                g = link.back(g, weight, saved)
                if delta is not None:
                    g += link.back(delta, moved[link.weight], saved)
        return grads
