"""A sequential network as links (see ``models/layers/links.py``)."""

from __future__ import annotations

from torch import nn

from fldiag.models.layers import rules
from fldiag.models.layers.links import Link, Views, Weighted
from fldiag.models.layers.sequence import leaves, pool_first


def links(module: nn.Module, buffers: Views) -> list[Link | Weighted] | None:
    """The links of a sequential network in eval mode, None when some layer has no rule or weights are shared."""
    found: list[Link | Weighted] = []
    for name, m in pool_first(leaves(module) or []):
        known = rules(m)
        made = known.links(m, name, buffers) if known.links is not None and known.fits(m) else None
        if made is None:
            return None
        found += made
    return found if any(isinstance(link, Weighted) for link in found) else None
