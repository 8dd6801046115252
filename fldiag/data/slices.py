"""Which examples a number was measured on: a named, fixed, ordered slice of a data set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.data.arrays import spread
from fldiag.data.dataset import Dataset, rows
from fldiag.errors import FldiagError, nearest
from fldiag.seeding import numpy_rng

_SPEC = re.compile(r"(train|test)|client:(\d+)(?:/(train|test|own))?")


@dataclass(frozen=True, eq=False)
class Slice:
    """Examples in a fixed order: raw inputs ``x_raw`` [n, ...] as stored, targets ``y`` [n] or [n, out]."""

    name: str
    n: int
    x_raw: Any = field(repr=False)
    y: Tensor = field(repr=False)
    dataset: Dataset = field(repr=False)

    @property
    def inputs(self) -> str:
        """What becomes of the stored inputs before a model sees them, in words."""
        return self.dataset.scaling

    def batch(self, start: int, stop: int) -> tuple[Any, Tensor]:
        """Model inputs (evaluation transform, never augmented) and targets of examples start..stop-1."""
        part = slice(start, stop)
        return self.dataset.normalise(rows(self.x_raw, part)), self.y[part]

    def tensors(self) -> tuple[Any, Tensor]:
        """The whole slice as one batch."""
        return self.batch(0, self.n)


def take(
    dataset: Dataset,
    spec: str,
    partition: Sequence[np.ndarray] | None = None,
    samples: int | None = None,
    tests: Sequence[np.ndarray] | None = None,
) -> Slice:
    """A slice of a data set, in data set order.

    Args:
        dataset: The data.
        spec: ``train``, ``test``, ``client:7`` or ``client:7/train`` (the training examples of client 7), ``client:7/test``
            (its own test examples in ``tests``, else ``personal_test``), ``client:7/own`` (all test examples of the classes
            that the client has).
        partition: Training indices of every client.
        samples: Keep so many, or all when there are fewer, as ``spread`` chooses them.
        tests: Test indices of every client, where it has such of its own.

    Raises:
        FldiagError: An unknown slice, a client outside the partition, no partition, or an empty slice.

    >>> from fldiag.data import load
    >>> take(load("digits"), "test", samples=20)
    Slice(name='test', n=20)
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        examples = ("train", "test", "client:7", "client:7/test", "client:7/own")
        raise FldiagError(f"unknown slice {spec!r}", nearest(spec, examples), usage=True)
    split, client, kind = match.groups()
    index: Any = slice(None)  # the whole split is not copied
    if client is not None:
        spec, split = (
            f"client:{int(client)}/{kind or 'train'}",
            "test" if kind in TESTS else "train",
        )
        index = torch.from_numpy(_of_client(dataset, spec, int(client), partition, tests))
    x, y = getattr(dataset, f"{split}_x"), getattr(dataset, f"{split}_y")
    n = len(y[index])
    if samples is not None and samples < n:
        chosen = spread(y[index], samples)
        index = chosen if client is None else index[chosen]
    if not n:
        raise FldiagError(
            f"slice {spec} of data set {dataset.name!r} is empty: it has no {split} examples",
            "choose the slice train, or another client; or give test examples",
            usage=True,
        )
    return Slice(spec, len(y[index]), rows(x, index), y[index], dataset)


def _of_client(
    dataset: Dataset,
    name: str,
    client: int,
    partition: Sequence[np.ndarray] | None,
    tests: Sequence[np.ndarray] | None,
) -> np.ndarray:
    """Indices of a client's examples in its split."""
    clients, kind = len(partition or ()), name.rpartition("/")[2]
    if partition is None or client >= clients:
        raise FldiagError(
            f"slice {name} needs a partition with this client, and it has {clients} clients",
            "diagnose a run, which has one, and one of its clients; or use train or test",
            usage=True,
        )
    index = np.asarray(partition[client], dtype=np.int64)
    if kind == "train":
        return index
    if kind == "test" and tests is not None:
        return np.asarray(tests[client], dtype=np.int64)
    if dataset.regression:
        raise FldiagError(
            f"slice {name}: the targets of {dataset.name!r} are no classes", usage=True
        )
    return TESTS[kind](dataset.train_y.cpu()[index], dataset.test_y.cpu(), client)


def personal_test(train_labels: Any, test_labels: Any, client: int) -> np.ndarray:
    """Test examples with a client's own class mixture, about 1,000.

    Of class c, min(available, floor(1000 q_c)) without replacement, q the shares of the classes in the client's labels. The draw
    is fixed by the client's number.

    Args:
        train_labels: The client's, [n_k].
        test_labels: Of the test split, [n].
        client: Its number.

    Returns:
        Sorted indices into the test split.
    """
    labels, pool = np.asarray(train_labels), np.asarray(test_labels)
    rng = numpy_rng(0, "personal test set", client)
    indices = [np.empty(0, dtype=np.int64)]
    for c, n in zip(*np.unique(labels, return_counts=True), strict=True):
        members = np.flatnonzero(pool == c)
        count = min(len(members), 1000 * int(n) // len(labels))  # whole: 1000 * 0.57 is 569.99...
        indices.append(rng.choice(members, size=count, replace=False))
    return np.sort(np.concatenate(indices))


def own_classes(train_labels: Any, test_labels: Any, client: int = 0) -> np.ndarray:
    """All test examples of the classes in a client's ``train_labels`` [n_k] (the personal test of FedProj), sorted indices into
    the test split; nothing is drawn, so ``client`` does not matter."""
    return np.flatnonzero(np.isin(np.asarray(test_labels), np.asarray(train_labels)))


TESTS = {"test": personal_test, "own": own_classes}
