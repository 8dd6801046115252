"""Stored models at work: what some rounds' weights do on test and training examples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from fldiag.losses import predicted
from fldiag.results.select import spread

if TYPE_CHECKING:
    from fldiag.runs.history import History
    from fldiag.runs.round_weights import Stored

#: So many rounds are evaluated, evenly spread: the global model in many, the clients' in few.
MANY, FEW = 12, 6


@dataclass(frozen=True)
class Scored:
    """A round's models on the pool's examples: loss and right [n] of the aggregated model, and (None: not stored) loss of
    the received one and [K, n] of the clients' ``ids``."""

    loss: np.ndarray
    right: np.ndarray | None
    received: np.ndarray | None = None
    clients: np.ndarray | None = None
    ids: tuple[int, ...] = ()


class Models:
    """What is evaluated once for all checks."""

    def __init__(self, history: History):
        self.history = history

    @cached_property
    def rounds(self) -> list[int]:
        """Those that are evaluated."""
        return sorted({*spread(self.history.rounds, MANY), *self.full})

    @cached_property
    def full(self) -> list[int]:
        """Those whose clients are evaluated too."""
        return spread(self.history.rounds, FEW)

    @cached_property
    def scores(self) -> dict[int, Scored]:
        """Round -> what its models do; rounds that cannot be read are left out."""
        from fldiag.errors import FldiagError

        found = {}
        for r in self.rounds:
            try:
                found[r] = self._scored(self.history.stored(r), r in self.full)
            except FldiagError:
                continue
        return found

    def _scored(self, stored: Stored, full: bool) -> Scored:
        models = [(stored.aggregated, stored.buffers)]
        full = full and stored.complete and all(k < len(self.history.parts) for k in stored.ids)
        if full:
            models += [stored.start, *(stored.client(j) for j in range(len(stored.ids)))]
        scores = self.history.evaluate(models)
        right = scores.right
        one = None if right is None else right[0]
        if not full:
            return Scored(scores.loss[0], one)
        return Scored(scores.loss[0], one, scores.loss[1], scores.loss[2:], stored.ids)

    @cached_property
    def own(self) -> dict[int, dict[int, tuple[float, float]]]:
        """Client -> round -> the mean loss on its own training examples before and after its training."""
        found: dict[int, dict[int, tuple[float, float]]] = {}
        for r, scored in self.scores.items():
            for j, i in enumerate(scored.ids):
                where = self.history.pool.own(i)
                if scored.clients is None or scored.received is None or where.stop <= where.start:
                    continue
                both = float(scored.received[where].mean()), float(scored.clients[j, where].mean())
                if np.isfinite(both).all():
                    found.setdefault(i, {})[r] = both
        return found

    def own_of(self, client: int, r: int) -> tuple[float, float]:
        """The same of any round."""
        stored, where = self.history.stored(r), self.history.pool.own(client)
        before, after = (
            self.history.evaluate([stored.start, stored.client(stored.ids.index(client))])
            .loss[:, where]
            .mean(1)
        )
        return float(before), float(after)

    def entropy(self, client: int) -> float:
        """Of the classes of a client's training examples, in nats: its loss, if only the classes' shares were known. Below every
        loss where there are no classes."""
        if self.history.dataset.regression:
            return -math.inf
        count = np.unique(self.labels[self.history.pool.own(client)], return_counts=True)[1]
        return float(stats.entropy(count))

    @property
    def gains(self) -> dict[int, dict[int, float]]:
        """Client -> round -> by how much its own training lowered its own loss."""
        return {
            i: {r: before - after for r, (before, after) in found.items()}
            for i, found in self.own.items()
        }

    @property
    def losses(self) -> dict[int, float]:
        """Client -> its own loss at what it received, mean over the rounds."""
        return {
            i: float(np.mean([before for before, _ in found.values()]))
            for i, found in self.own.items()
        }

    @property
    def gain(self) -> float | None:
        """The median of these; None where none is known."""
        values = [gain for found in self.gains.values() for gain in found.values()]
        return float(np.median(values)) if values else None

    @cached_property
    def labels(self) -> np.ndarray:
        """Of all examples of the pool."""
        return np.asarray(self.history.pool.y.cpu())

    def predictions(self, r: int) -> np.ndarray:
        """Classes that the aggregated model of a round gives the test examples."""
        import torch

        stored, network, pool = self.history.stored(r), self.history.network, self.history.pool
        bound = network.bind(
            stored.aggregated[None], {n: b[None].clone() for n, b in stored.buffers.items()}
        )
        with torch.no_grad():
            found = [
                predicted(bound(pool.read(s.start, s.stop)[0][None])[0])
                for s in pool.batches(pool.test, 500)
            ]
        return torch.cat(found).cpu().numpy()
