"""Which examples a number was measured on: a named, fixed, ordered slice of a data set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.data.arrays import spread
from fldiag.data.dataset import Dataset
from fldiag.errors import FldiagError, nearest
from fldiag.seeding import numpy_rng

_CLIENT = re.compile(r"client:(\d+)(?:/(\w*))?")
_SPECS = ("train", "test", "client:7", "client:7/test", "client:7/own")


@dataclass(frozen=True, eq=False)
class Slice:
    """Examples in a fixed order: raw inputs ``x_raw`` [n, ...] as stored, targets ``y`` [n] or [n, out]."""

    name: str
    n: int
    x_raw: Tensor
    y: Tensor
    dataset: Dataset

    @property
    def inputs(self) -> str:
        """What becomes of the stored inputs before a model sees them, in words."""
        return self.dataset.scaling

    def batch(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Model inputs (evaluation transform, never augmented) and targets of examples start..stop-1."""
        return self.dataset.normalise(self.x_raw[start:stop]), self.y[start:stop]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The whole slice as one batch."""
        return self.batch(0, self.n)


def take(
    dataset: Dataset,
    spec: str,
    partition: Sequence[np.ndarray] | None = None,
    samples: int | None = None,
    tests: Sequence[np.ndarray] | None = None,
) -> Slice:
    """The slice ``spec`` of a data set: ``train``, ``test``, ``client:7`` (the training examples of client 7,
    in full ``client:7/train``), ``client:7/test`` (``personal_test`` of that client) or ``client:7/own`` (all
    test examples of the classes the client has), in data set order.

    ``samples`` keeps so many, or all when there are fewer: evenly spaced through the examples sorted by
    class, so that each class keeps its share within one example and the choice involves no chance. Of a data set that is made
    client by client, ``train`` is what the clients of the partition have. ``tests``: the test examples of every client, where
    it has such of its own, which then are ``client:7/test``.

    Raises FldiagError for an unknown spec, a client outside the partition, no partition, or an empty slice.
    """
    is_whole = isinstance(samples, (int, np.integer)) and not isinstance(samples, bool)
    if samples is not None and not (is_whole and samples >= 1):
        raise FldiagError(
            f"samples = {samples!r}",
            "use a whole number of at least 1, or leave it out",
            usage=True,
        )
    name, split, index = _select(dataset, spec, partition, tests)
    x, y = (
        (dataset.train_x, dataset.train_y) if split == "train" else (dataset.test_x, dataset.test_y)
    )
    at = None if index is None else torch.as_tensor(index, dtype=torch.int64, device=x.device)
    y = y if at is None else y.index_select(0, at)
    if split == "test" and not dataset.tested:
        raise FldiagError(
            f"data set {dataset.name!r} has no test examples",
            "give them: test= of fldiag.Recorder, or --data with a test split; or choose the slice train",
            usage=True,
        )
    if len(y) == 0:
        raise FldiagError(
            f"slice {name} of data set {dataset.name!r} is empty", "choose another client or slice"
        )
    if samples is not None and samples < len(y):
        subset = spread(y, int(samples))
        y, at = y.index_select(0, subset), subset if at is None else at[subset]
    x = x if at is None else x.index_select(0, at)
    return Slice(name, len(y), x, y, dataset)


def personal_test(
    train_labels: Any, test_labels: Any, client: int, examples: int = 1000
) -> np.ndarray:
    """Test examples with a client's own class mixture, sorted indices into the test split.

    Of class c, min(available, floor(examples * q_c)) without replacement, q the shares of the classes in the
    client's ``train_labels`` [n_k]. The draw is fixed by the client's number.
    """
    labels, pool = (
        np.asarray(v.cpu() if isinstance(v, Tensor) else v) for v in (train_labels, test_labels)
    )
    rng = numpy_rng(0, "personal test set", client)
    examples_of_classes = []
    for c in np.unique(labels):
        members = np.flatnonzero(pool == c)
        # In whole numbers, since 1000 * 0.57 is 569.99...
        count = min(len(members), examples * int(np.count_nonzero(labels == c)) // len(labels))
        examples_of_classes.append(rng.choice(members, size=count, replace=False))
    return np.sort(np.concatenate(examples_of_classes)).astype(np.int64)


def own_classes(train_labels: Any, test_labels: Any, client: int) -> np.ndarray:
    """All test examples of the classes in a client's ``train_labels`` [n_k] (the personal test of FedProj), sorted
    indices into the test split; nothing is drawn, so ``client`` does not matter."""
    labels, pool = (
        np.asarray(v.cpu() if isinstance(v, Tensor) else v) for v in (train_labels, test_labels)
    )
    return np.flatnonzero(np.isin(pool, labels))


def _select(
    dataset: Dataset,
    spec: str,
    partition: Sequence[np.ndarray] | None,
    tests: Sequence[np.ndarray] | None = None,
) -> tuple[str, str, Any]:
    """The slice's full name, its split, and its indices there (None: all)."""
    if spec in ("train", "test"):
        return spec, spec, None
    match = _CLIENT.fullmatch(spec) if isinstance(spec, str) else None
    if match is None or match[2] not in (None, "train", "test", "own"):
        raise FldiagError(f"unknown slice {spec!r}", nearest(str(spec), _SPECS), usage=True)
    client, split = int(match[1]), match[2] or "train"
    name = f"client:{client}/{split}"
    if partition is None:
        raise FldiagError(
            f"slice {name} needs a partition, and there is none",
            "diagnose a run (its partition is saved with it), or use train or test",
            usage=True,
        )
    if client >= len(partition):
        raise FldiagError(
            f"slice {name}: the partition has {len(partition)} clients",
            f"use client:0 to client:{len(partition) - 1}",
            usage=True,
        )
    if split == "test" and tests is not None:
        return name, split, np.asarray(tests[client], dtype=np.int64)
    index = np.asarray(partition[client], dtype=np.int64)
    total = len(dataset.train_y)
    outside = index[(index < 0) | (index >= total)]
    if len(outside):
        raise FldiagError(
            f"slice {name}: the partition refers to example {outside[0]}, and data set "
            f"{dataset.name!r} has {total} training examples",
            "use the data set and the partition of the same run",
        )
    if split == "train" or len(index) == 0:
        return name, split, index
    if dataset.regression:
        raise FldiagError(
            f"slice {name}: data set {dataset.name!r} has no classes to mix",
            f"use client:{client}/train or test",
            usage=True,
        )
    labels = dataset.train_y[torch.from_numpy(index)]
    return (
        name,
        split,
        (personal_test if split == "test" else own_classes)(labels, dataset.test_y, client),
    )
