"""All examples of a federation in one row: the test split, then every client's own training examples.

Where there are no test examples the training split stands first instead, and is called so (``ExamplePool.split``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag import data, losses
from fldiag.data import Dataset
from fldiag.data.arrays import ready, spread
from fldiag.data.slices import Slice
from fldiag.errors import FldiagError
from fldiag.models.network import Network, forward_macs

#: Examples in a batch of one model; as in training's own evaluation, so that the numbers are the run's.
BATCH = 500
#: Stack models whose forward pass has fewer multiply-adds an example: above, a
#: convolution of one model fills the processor better than a grouped one of many.
STACK_BELOW = 100_000
#: Models in one stack, and multiply-adds of one stacked batch: larger ones leave the processor's caches.
STACK, STACK_WORK = 16, 200_000_000
#: Normalised inputs are kept when they take less than this, else made anew for every round.
KEEP_BYTES = 256 * 2**20

Weights = tuple[Tensor, dict[str, Tensor]]  # a vector [P] and the buffers that go with it


@dataclass(frozen=True)
class CohortScores:
    """What models do on the pool: ``loss`` [R, n] of each example, ``right`` [R, n] (None: no classes).

    A model with weights or outputs that are not a number has NaN losses and is not ``valid`` [R].
    """

    loss: np.ndarray
    right: np.ndarray | None
    valid: np.ndarray


class ExamplePool:
    """``x_raw`` and ``y`` of the test split and of every client's training examples, one after the other.

    ``split``: the name of what stands first, "test" or "train"; ``test``: where that lies. ``segments``: "test" and
    "client:7/train" -> where they lie. ``samples``: at most so many test examples, and so many training examples of all
    clients together (each keeps its share, and its classes theirs).
    """

    def __init__(
        self,
        dataset: Dataset,
        parts: Sequence[np.ndarray],
        samples: int | None,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.dataset, self.device, self.dtype = dataset, device, dtype
        self.split = dataset.evaluation[0]
        total, slices = sum(map(len, parts)), [data.take(dataset, self.split, None, samples)]
        for k, n in enumerate(map(len, parts)):
            count = None
            if samples is not None and samples < total:
                count = max(1, round(samples * n / total))
            slices += [data.take(dataset, f"client:{k}", parts, count)] if n else []
        self.segments, at = {}, 0
        for s in slices:
            self.segments[s.name] = slice(at, at + s.n)
            at += s.n
        self.n, self.test = at, self.segments[self.split]
        self.x_raw, self.y = torch.cat([s.x_raw for s in slices]), torch.cat([s.y for s in slices])
        self._x: Tensor | None = None

    def train_slice(self, client: int) -> slice:
        """Where the client's training examples lie (an empty slice for a client without any)."""
        return self.segments.get(f"client:{client}/train", slice(self.n, self.n))

    @property
    def clients(self) -> slice:
        """Where the training examples of all clients lie."""
        return slice(self.test.stop, self.n)

    def places(self, examples: np.ndarray) -> np.ndarray:
        """Where those of the test split's examples lie in the pool that it holds."""
        positions = spread(self.dataset.evaluation[2], self.test.stop).cpu().numpy()
        return np.flatnonzero(np.isin(positions, examples))

    def take(self, examples: slice | Tensor, name: str) -> Slice:
        """A stretch of the pool, or some of its examples (indices), as a slice for a Problem."""
        y = self.y[examples]
        if not len(y):
            raise FldiagError(f"slice {name} is empty", "choose a client with examples")
        return Slice(name, len(y), self.x_raw[examples], y, self.dataset)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of examples start..stop-1, ready for a model."""
        if self._x is None and 4 * self.n * math.prod(self.dataset.shape) <= KEEP_BYTES:
            self._x = ready(self.dataset.normalise(self.x_raw), self.device, self.dtype)
        x = self._x
        x = self.dataset.normalise(self.x_raw[start:stop]) if x is None else x[start:stop]
        y = self.y[start:stop].to(self.device)
        return ready(x, self.device, self.dtype), y.to(self.dtype) if y.is_floating_point() else y

    def batches(self, stretch: slice, size: int, mixed: bool = True) -> Iterator[slice]:
        """The stretch in batches; without ``mixed``, no batch holds examples of two segments."""
        parts = [slice(0, self.n)] if mixed else self.segments.values()
        for part in parts:
            stop = min(part.stop, stretch.stop)
            for i in range(max(part.start, stretch.start), stop, size):
                yield slice(i, min(i + size, stop))


def stacked(network: Network, dataset: Dataset, stack: str) -> bool:
    """Whether models are evaluated side by side: a fixed rule on the architecture, never timed."""
    if stack == "on" and not network.stackable:
        raise FldiagError(
            "stack = 'on', and this model cannot be stacked",
            "use stack = 'auto' or 'off'",
            usage=True,
        )
    if not network.stackable or stack == "off":
        return False
    return stack == "on" or forward_macs(network.module, dataset.shape) < STACK_BELOW


def evaluate(
    network: Network,
    pool: ExamplePool,
    models: Sequence[Weights],
    *,
    stack: bool,
    first: int | None = None,
) -> CohortScores:
    """Loss and correctness of every model [P] on every example of the pool, or on its ``first`` so many, in eval mode.

    A network whose outputs depend on the batch sees batches of one segment only, so that a client's number does
    not depend on the others.
    """
    count, n = len(models), pool.n if first is None else first
    loss = np.empty((count, n))
    right = None if pool.dataset.regression else np.empty((count, n), dtype=bool)
    valid = np.array([bool(torch.isfinite(w).all()) for w, _ in models], dtype=bool)
    # only a chain of layers: another module is called with its parameters put in place, one call at a time
    threads = (
        max(1, min(torch.get_num_threads(), count))
        if pool.device.type == "cpu" and network.stackable
        else 1
    )
    size, groups = BATCH, [[i] for i in range(count)]
    if stack:
        work = forward_macs(network.module, pool.dataset.shape) * min(count, STACK)
        size = min(BATCH, max(100, STACK_WORK // max(work, 1)))
        each = max(1, min(STACK, -(-count // threads)))
        groups = [list(range(i, min(i + each, count))) for i in range(0, count, each)]
    bound = []
    for group in groups:
        rows = torch.stack([models[i][0] for i in group]).to(pool.device, pool.dtype)
        buffers = {n: b.unsqueeze(0).clone() for n, b in models[group[0]][1].items()}
        bound.append(network.bind(rows, buffers))
    with workers(threads) as run:
        for batch in pool.batches(slice(0, n), size, mixed=not network.batch_dependent):
            x, y = pool.read(batch.start, batch.stop)

            def score(
                group: list[int], model: Network, batch: slice = batch, x: Tensor = x, y: Tensor = y
            ) -> None:
                with torch.no_grad():
                    outputs = model(x.expand(len(group), *x.shape))
                    labels = y.expand(len(group), *y.shape)
                    values = losses.per_example(outputs, labels)
                    loss[group, batch] = values.double().cpu().numpy()
                    if right is not None:
                        right[group, batch] = (losses.predicted(outputs) == y).cpu().numpy()

            list(run(score, groups, bound))
    valid &= ~np.isnan(loss).any(1)
    loss[~valid] = np.nan
    return CohortScores(loss, right, valid)


@contextmanager
def workers(threads: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A ``map`` in so many threads with one of torch's each.

    Small layers of one model do not fill two cores, and on a busy machine torch's own threads spend most of the time
    waiting for each other; a model a thread does not. Afterwards torch has as many threads
    as before.
    """
    if threads == 1:
        yield map
        return
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(before)
