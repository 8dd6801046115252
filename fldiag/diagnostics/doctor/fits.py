"""Whose recorded data the training of each client fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fldiag.diagnostics.doctor.models import Models


#: Clients in a round from which on they are compared with each other, and rounds in which one must be odd.
CLIENTS, ROUNDS = 4, 3
#: Random assignments against which one is compared.
ASSIGNMENTS = 400


@dataclass(frozen=True)
class RoundFit:
    """``gain`` [K, N]: by how much the training of client ``ids[k]`` lowers the mean loss on the recorded data of client j (NaN:
    none); ``advantage``: the same less the median over the round's clients, so that every client's data count alike."""

    ids: tuple[int, ...]
    gain: np.ndarray

    @cached_property
    def advantage(self) -> np.ndarray:
        return self.gain - np.median(self.gain, axis=0, keepdims=True)

    @cached_property
    def on_own_data(self) -> dict[int, float]:
        """Client -> its advantage on its own data."""
        values = {i: float(self.advantage[k, i]) for k, i in enumerate(self.ids)}
        return {i: value for i, value in values.items() if np.isfinite(value)}


def fits_of(models: Models) -> dict[int, RoundFit]:
    """Round -> how its clients fit each other's data, in rounds of at least ``CLIENTS``."""
    pool, fits = models.history.pool, {}
    for r, scored in models.scores.items():
        if scored.clients is None or scored.received is None or len(scored.ids) < CLIENTS:
            continue
        gain = np.full((len(scored.ids), len(models.history.parts)), np.nan)
        for j in range(gain.shape[1]):
            stretch = pool.train_slice(j)
            if stretch.stop > stretch.start:
                gain[:, j] = (scored.received[:, stretch] - scored.clients[:, stretch]).mean(1)
        if np.isfinite(gain).any(1).all():
            fits[r] = RoundFit(scored.ids, gain)
    return fits


def excess(matrix: np.ndarray, columns: Sequence[int], seed: int = 0) -> float:
    """z of the mean of ``matrix[k, columns[k]]`` among random assignments of different columns to the rows."""
    usable = np.flatnonzero(np.isfinite(matrix).all(0))
    rows = [k for k, j in enumerate(columns) if j in set(usable.tolist())]
    if len(rows) < CLIENTS or len(usable) < len(rows):
        return 0.0
    rng = np.random.default_rng(seed)
    value = float(np.mean([matrix[k, columns[k]] for k in rows]))
    random = [
        float(np.mean(matrix[rows, rng.permutation(usable)[: len(rows)]]))
        for _ in range(ASSIGNMENTS)
    ]
    deviation = float(np.std(random))
    return (value - float(np.mean(random))) / deviation if deviation > 0 else 0.0


def mean_advantage(fits: Sequence[RoundFit], ids: Sequence[int]) -> np.ndarray:
    """[clients, N], over the rounds in which each took part."""
    rows = [[f.advantage[f.ids.index(i)] for f in fits if i in f.ids] for i in ids]
    return np.array([np.mean(advantages, axis=0) for advantages in rows])


def find_assignment(fits: Sequence[RoundFit]) -> dict[int, int]:
    """Client -> whose data it fits best if each fits another's, from every second round."""
    from scipy.optimize import linear_sum_assignment

    half = fits[::2]
    ids = sorted({i for f in half for i in f.ids})
    matrix = mean_advantage(half, ids)
    usable = np.flatnonzero(np.isfinite(matrix).all(0))
    rows, columns = linear_sum_assignment(-matrix[:, usable])
    return {ids[k]: int(usable[j]) for k, j in zip(rows, columns, strict=True)}
