"""The merge tree of a surface: its minima, and over which saddle each can be left for a deeper one.

As the level rises, the points below it (the sublevel set) form valleys; two valleys become one at a saddle, and the one with the
higher minimum ends there. Idea and summary (SMAD) of Landscaper (arXiv 2602.07135), of which only the abstract was read: the
definitions here are operational.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Place = tuple[int, int]


@dataclass(frozen=True)
class Valley:
    """``minimum`` and ``saddle``: (row, column) of the deepest point, and of the first point through which a deeper valley is
    reached (None for the deepest of all)."""

    minimum: Place
    low: float
    saddle: Place | None = None
    high: float = np.inf

    @property
    def depth(self) -> float:
        """Its persistence."""
        return self.high - self.low


def valleys(surface: np.ndarray, error: np.ndarray | float = 0.0) -> list[Valley]:
    """The valleys of a surface [rows, columns] whose points have 8 neighbours, the deepest first, then by depth.

    Left out are those less deep than the ``error`` of the surface at their saddle: interpolation may have made them.
    Of equal values the first in the order of rows counts as lower, so that a flat place is one minimum. Points at the edge count;
    infinite and undefined values are no points.
    """
    errors = np.broadcast_to(np.asarray(error, dtype=float), surface.shape)
    order = [divmod(int(i), surface.shape[1]) for i in np.argsort(surface, axis=None, kind="stable")
             if np.isfinite(surface.flat[i])]
    parent: dict[Place, Place] = {}
    born = {place: rank for rank, place in enumerate(order)}

    def root(place: Place) -> Place:
        while parent[place] != place:
            parent[place] = place = parent[parent[place]]
        return place

    ended = []
    for row, column in order:
        here = (row, column)
        parent[here] = here
        square = ((row + r, column + c) for r in (-1, 0, 1) for c in (-1, 0, 1))
        around = {root(near) for near in square if near in parent and near != here}
        if not around:
            continue
        deepest, *others = sorted(around, key=lambda place: born[place])  # a valley's root is its minimum
        parent[here] = deepest
        for place in others:
            parent[place] = deepest
            valley = Valley(place, float(surface[place]), here, float(surface[here]))
            if valley.depth > errors[here]:
                ended.append(valley)
    roots = [place for place in order if parent[place] == place]  # several where infinite values part the surface
    kept = [Valley(place, float(surface[place])) for place in roots]
    return [*kept, *sorted(ended, key=lambda v: -v.depth)]


def smad(found: list[Valley]) -> float:
    """Saddle-minimum average distance: the mean depth of all valleys but the deepest; 0 for one alone."""
    depths = [v.depth for v in found if v.saddle is not None]
    return float(np.mean(depths)) if depths else 0.0
