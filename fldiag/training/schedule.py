"""Who trains in a round, on which minibatches: seeded by default, or given (to replay somebody's run)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fldiag.seeding import numpy_rng

Batches = list[np.ndarray]  # positions within the client's examples, one array a local step


@dataclass(frozen=True)
class Seeded:
    """Clients without replacement; each epoch a new permutation cut into minibatches (the last may be short)."""

    seed: int
    total: int
    per_round: int
    epochs: int
    batch_size: int
    drop_last: bool = False
    sampling: Literal["fixed", "by_round", "independent"] = "fixed"  # as config.clients.sampling

    def sampled(self, t: int) -> list[int]:
        """Ids of round t's clients. The same for every method: only the seed and the round enter, or the round alone."""
        if self.sampling == "by_round":
            return sorted(
                np.random.RandomState(t).choice(self.total, self.per_round, replace=False).tolist()
            )
        rng = numpy_rng(self.seed, "clients", t)
        while self.sampling == "independent":  # drawn again when nobody joins
            joined = np.flatnonzero(rng.random(self.total) < self.per_round / self.total)
            if len(joined):
                return joined.tolist()
        return sorted(rng.choice(self.total, self.per_round, replace=False).tolist())

    def batches(self, t: int, client: int, n: int) -> Batches:
        rng = numpy_rng(self.seed, "batches", t, client)
        orders = (rng.permutation(n) for _ in range(self.epochs))
        end = n - n % self.batch_size if self.drop_last else n
        return [
            order[i : i + self.batch_size]
            for order in orders
            for i in range(0, end, self.batch_size)
        ]


@dataclass(frozen=True)
class Given:
    """A recorded schedule: ``clients[t]`` ids, ``positions[t][client]`` one list of positions a step."""

    clients: Sequence[Sequence[int]]
    positions: Sequence[Mapping[int, Sequence[Sequence[int]]]]

    def sampled(self, t: int) -> list[int]:
        return list(self.clients[t])

    def batches(self, t: int, client: int, n: int) -> Batches:
        return [np.asarray(b, dtype=np.int64) for b in self.positions[t][client]]


Schedule = Seeded | Given
