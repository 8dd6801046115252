"""All examples of a federation in one row, and what models do on them.

The test split comes first, then every client's own training examples. Where there are no test examples the training split stands
first instead, and is called so (``ExamplePool.split``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fldiag import data, losses
from fldiag.data import Dataset
from fldiag.data.arrays import spread
from fldiag.data.dataset import Slice
from fldiag.device import threads
from fldiag.models.network import Network
from fldiag.problem.data import convert

#: Examples in a batch of one model; as in training's own evaluation, so that the numbers are the run's.
BATCH = 500

Weights = tuple[Tensor, dict[str, Tensor]]  # a vector [P] and the buffers that go with it


@dataclass(frozen=True)
class ExampleScores:
    """What models do on the pool: ``loss`` [R, n] of each example, ``right`` [R, n] (None: no classes).

    A model with weights or outputs that are not a number has NaN losses and is not ``valid`` [R].
    """

    loss: np.ndarray
    right: np.ndarray | None
    valid: np.ndarray


class ExamplePool:
    """``x_raw`` and ``y`` of the test split and of every client's training examples, one after the other.

    ``split``: the name of what stands first, "test" or "train"; ``test``: where that lies; ``clients``: where the training
    examples of all clients lie. ``segments``: "test" and "client:7/train" -> where they lie. ``samples``: at most so many test
    examples, and so many training examples of all clients together (each keeps its share, and its classes theirs).
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
            if n:
                count = max(1, round(min(samples or total, total) * n / total))
                slices.append(data.take(dataset, f"client:{k}", parts, count))
        ends = np.cumsum([s.n for s in slices]).tolist()
        self.segments = {s.name: slice(end - s.n, end) for s, end in zip(slices, ends, strict=True)}
        self.n, self.test = ends[-1], slice(0, ends[0])
        self.clients = slice(ends[0], self.n)
        self.x_raw, self.y = torch.cat([s.x_raw for s in slices]), torch.cat([s.y for s in slices])

    def train_slice(self, client: int) -> slice:
        """Where the client's training examples lie (an empty slice for a client without any)."""
        return self.segments.get(f"client:{client}/train", slice(self.n, self.n))

    def places(self, examples: np.ndarray) -> np.ndarray:
        """Where those of the test split's examples lie in the pool that it holds."""
        positions = spread(self.dataset.evaluation[2], self.test.stop).cpu().numpy()
        return np.flatnonzero(np.isin(positions, examples))

    def take(self, examples: slice | Tensor, name: str) -> Slice:
        """A segment of the pool, or some of its examples (indices), as a slice for a Problem."""
        y = self.y[examples]
        return Slice(name, len(y), self.x_raw[examples], y, self.dataset)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of examples start..stop-1, ready for a model."""
        x, y = self.dataset.normalise(self.x_raw[start:stop]), self.y[start:stop]
        return convert((x, y), self.dtype, self.device)  # type: ignore[no-any-return]

    def batches(self, where: slice, size: int, mixed: bool = True) -> Iterator[slice]:
        """The examples ``where`` in batches; without ``mixed``, no batch holds examples of two segments."""
        for part in [where] if mixed else self.segments.values():
            stop = min(part.stop, where.stop)
            for i in range(max(part.start, where.start), stop, size):
                yield slice(i, min(i + size, stop))


def evaluate(
    network: Network, pool: ExamplePool, models: Sequence[Weights], first: int
) -> ExampleScores:
    """Loss and correctness of every model [P] on the ``first`` so many examples of the pool, in eval mode.

    A network whose outputs depend on the batch sees batches of one segment only, so that a client's number does
    not depend on the others. Models are shared out among threads with one of torch's each: on a busy machine torch's own
    threads spend most of the time waiting for each other.
    """
    loss = np.empty((len(models), first))
    right = None if pool.dataset.regression else np.empty(loss.shape, dtype=bool)

    def score(i: int) -> None:
        w, buffers = models[i]
        rows = w[None].to(pool.device, pool.dtype)
        bound = network.bind(rows, {n: b[None].clone() for n, b in buffers.items()})
        for batch in pool.batches(slice(0, first), BATCH, mixed=not network.batch_dependent):
            x, y = pool.read(batch.start, batch.stop)
            with torch.no_grad():
                outputs = bound(x[None])
                loss[i, batch] = losses.per_example(outputs, y[None])[0].double().cpu().numpy()
                if right is not None:
                    right[i, batch] = (losses.predicted(outputs)[0] == y).cpu().numpy()

    # another module than a chain of layers is called with its parameters put in place, one call at a time
    is_shared = pool.device.type == "cpu" and network.stackable and len(models) > 1
    workers = torch.get_num_threads() if is_shared else 1
    if workers > 1:
        own = partial(torch.set_num_threads, 1)
        with threads(workers), ThreadPoolExecutor(workers, initializer=own) as each:
            list(each.map(score, range(len(models))))
    else:
        list(map(score, range(len(models))))
    loss[[not torch.isfinite(w).all() for w, _ in models]] = np.nan
    valid = ~np.isnan(loss.sum(1))
    loss[~valid] = np.nan
    return ExampleScores(loss, right, valid)
