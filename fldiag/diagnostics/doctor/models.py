"""Stored models at work: what some rounds' weights do on test and training examples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import stats
from torch.nn import functional as F

from fldiag.diagnostics.doctor.statistics import CLIENTS
from fldiag.errors import FldiagError
from fldiag.losses import predicted
from fldiag.results.select import spread

if TYPE_CHECKING:
    from fldiag.runs.history import History
    from fldiag.runs.pool import Weights
    from fldiag.runs.round_weights import Stored

#: So many rounds are evaluated, evenly spread: the global model in many, the clients' in few.
MANY, FEW = 12, 6


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


@dataclass(frozen=True)
class Scored:
    """A round's models on the pool's examples: loss and right [n] of the aggregated model, and (None: not stored) loss of
    the received one [1, n], or of what each client received [K, n], and [K, n] of the clients' ``ids``."""

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
        scored_rounds = {}
        for r in self.rounds:
            try:
                scored_rounds[r] = self._scored(self.history.stored(r), r in self.full)
            except FldiagError:
                continue
        return scored_rounds

    def _scored(self, cohort: Stored, full: bool) -> Scored:
        models = [(cohort.aggregated, cohort.buffers)]
        full = full and cohort.complete and all(k < len(self.history.parts) for k in cohort.ids)
        if full:
            rows = range(len(cohort.ids))
            starts = [cohort.start_of(j) for j in (rows if cohort.starts is not None else rows[:1])]
            models += [*starts, *(cohort.client(j) for j in rows)]
        scores = self.history.evaluate(models)
        right = scores.right
        one = None if right is None else right[0]
        if not full:
            return Scored(scores.loss[0], one)
        before, after = np.split(scores.loss[1:], [len(starts)])
        return Scored(scores.loss[0], one, before, after, cohort.ids)

    @cached_property
    def fits(self) -> dict[int, RoundFit]:
        """Round -> how its clients fit each other's data, in rounds of at least ``CLIENTS``."""
        pool, fits = self.history.pool, {}
        for r, scored in self.scores.items():
            if scored.clients is None or scored.received is None or len(scored.ids) < CLIENTS:
                continue
            gain = np.full((len(scored.ids), len(self.history.parts)), np.nan)
            for j in range(gain.shape[1]):
                stretch = pool.train_slice(j)
                if stretch.stop > stretch.start:
                    gain[:, j] = (scored.received[:, stretch] - scored.clients[:, stretch]).mean(1)
            if np.isfinite(gain).any(1).all():
                fits[r] = RoundFit(scored.ids, gain)
        return fits

    @cached_property
    def own_losses(self) -> dict[int, dict[int, tuple[float, float]]]:
        """Client -> round -> the mean loss on its own training examples before and after its training."""
        losses: dict[int, dict[int, tuple[float, float]]] = {}
        for r, scored in self.scores.items():
            for j, i in enumerate(scored.ids):
                stretch = self.history.pool.train_slice(i)
                if (
                    scored.clients is None
                    or scored.received is None
                    or stretch.stop <= stretch.start
                ):
                    continue
                both = (
                    float(scored.received[min(j, len(scored.received) - 1), stretch].mean()),
                    float(scored.clients[j, stretch].mean()),
                )
                if np.isfinite(both).all():
                    losses.setdefault(i, {})[r] = both
        return losses

    def own_losses_of(self, client: int, r: int) -> tuple[float, float]:
        """The same of any round."""
        cohort, stretch = self.history.stored(r), self.history.pool.train_slice(client)
        j = cohort.ids.index(client)
        models = [cohort.start_of(j), cohort.client(j)]
        before, after = self.history.evaluate(models).loss[:, stretch].mean(1)
        return float(before), float(after)

    def entropy(self, client: int) -> float:
        """Of the classes of a client's training examples, in nats: its loss, if only the classes' shares were known. Below every
        loss where there are no classes."""
        if self.history.dataset.regression:
            return -math.inf
        count = np.unique(self.labels[self.history.pool.train_slice(client)], return_counts=True)[1]
        return float(stats.entropy(count))

    @property
    def gains(self) -> dict[int, dict[int, float]]:
        """Client -> round -> by how much its own training lowered its own loss."""
        return {
            i: {r: before - after for r, (before, after) in by_round.items()}
            for i, by_round in self.own_losses.items()
        }

    @property
    def losses(self) -> dict[int, float]:
        """Client -> its own loss at what it received, mean over the rounds."""
        return {
            i: float(np.mean([before for before, _ in by_round.values()]))
            for i, by_round in self.own_losses.items()
        }

    @property
    def gain(self) -> float | None:
        """The median of these; None where none is known."""
        values = [gain for by_round in self.gains.values() for gain in by_round.values()]
        return float(np.median(values)) if values else None

    @cached_property
    def labels(self) -> np.ndarray:
        """Of all examples of the pool."""
        return np.asarray(self.history.pool.y.cpu())

    def log_probabilities(self, weights: Weights, stretch: slice) -> np.ndarray:
        """Of every class, for the examples of a stretch of the pool [n, C]; one output is the logit of label 1."""
        vector, buffers = weights
        bound = self.history.network.bind(
            vector[None], {n: b[None].clone() for n, b in buffers.items()}
        )
        rows = []
        with torch.no_grad():
            for s in self.history.pool.batches(stretch, 500):
                outputs = bound(self.history.pool.read(s.start, s.stop)[0][None])[0].double()
                if outputs.shape[-1] == 1:
                    outputs = torch.cat([torch.zeros_like(outputs), outputs], -1)
                rows.append(F.log_softmax(outputs, -1))
        return torch.cat(rows).cpu().numpy()

    def predictions(self, r: int) -> np.ndarray:
        """Classes that the aggregated model of a round gives the test examples."""
        cohort, network, pool = self.history.stored(r), self.history.network, self.history.pool
        bound = network.bind(
            cohort.aggregated[None], {n: b[None].clone() for n, b in cohort.buffers.items()}
        )
        with torch.no_grad():
            classes = [
                predicted(bound(pool.read(s.start, s.stop)[0][None])[0])
                for s in pool.batches(pool.test, 500)
            ]
        return torch.cat(classes).cpu().numpy()
