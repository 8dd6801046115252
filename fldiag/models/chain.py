"""Forward and backward passes of a sequential network by hand, over links (see ``models/layers/links.py``).

The local loop takes its gradients here, and the R-operator what its products share. No graph is recorded, and every
gradient is written where it belongs in a row of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fldiag.models.layers import rules
from fldiag.models.layers.links import Link, Views, Weighted
from fldiag.models.layers.sequence import leaves, pool_first

Links = Sequence[Link | Weighted]


def links(module: nn.Module, buffers: Views) -> list[Link | Weighted] | None:
    """The links of a sequential network in eval mode, None when some layer has no rule or weights are shared."""
    found = links_of(pool_first(leaves(module) or []), buffers)
    return found if found and any(isinstance(link, Weighted) for link in found) else None


def links_of(
    chain: Sequence[tuple[str, nn.Module]], buffers: Views
) -> list[Link | Weighted] | None:
    """The links of these layers, None when some layer has no rule."""
    found: list[Link | Weighted] = []
    for name, m in chain:
        known = rules(m)
        made = known.links(m, name, buffers) if known.links is not None and known.fits(m) else None
        if made is None:
            return None
        found += made
    return found


@dataclass
class Pass:
    """Inputs carried through links: the output, and per link its input (weighted links) or what it saved."""

    links: Links
    views: Mapping[str, Tensor]
    saved: list[Any]
    out: Tensor

    @staticmethod
    def of(links: Links, views: Mapping[str, Tensor], a: Tensor) -> Pass:
        saved: list[Any] = []
        for link in links:
            if isinstance(link, Weighted):
                saved.append(a)
                a = link.forward(a, views)
            else:
                a, keep = link.forward(a)
                saved.append(keep)
        return Pass(links, views, saved, a)

    def back(
        self, g: Tensor, at: Callable[[int, Tensor], None], *, through: bool = False
    ) -> Tensor:
        """Carry the cotangent g of the output back. ``at`` is told the place of every weighted link and the cotangent of
        its output. The way ends at the first of them; ``through``: at the input, whose cotangent is returned."""
        weighted = (j for j, link in enumerate(self.links) if isinstance(link, Weighted))
        first = 0 if through else next(weighted, len(self.links))
        for j in range(len(self.links) - 1, first - 1, -1):
            link = self.links[j]
            if not isinstance(link, Weighted):
                g = link.back(self.saved[j], g)
                continue
            at(j, g)
            if through or j > first:
                g = link.back(g, self.views[link.weight], self.saved[j])
        return g

    def gradient(self, g: Tensor, into: Mapping[str, Tensor], *, through: bool = False) -> Tensor:
        """As ``back``, and the gradients of the weights are written to ``into``, by name. To be called where autograd is off."""

        def write(j: int, g: Tensor) -> None:
            link = self.links[j]
            assert isinstance(link, Weighted)
            link.write(g, self.saved[j], self.views, into)

        return self.back(g, write, through=through)
