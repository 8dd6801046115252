"""Accuracy and loss of the global model on the official test set (a recorded run without one: on its training examples)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fldiag import losses
from fldiag.data import Dataset
from fldiag.data.arrays import ready
from fldiag.models.network import Network
from fldiag.results.table import Row

BATCH = 500  # fixed, so the bits do not depend on the memory at hand


#: Batches in a unit of work, at least: 10,000 test images are four units; and units at most, as each carries the weights.
UNIT, MOST = 5, 16


@dataclass(frozen=True)
class Tested:
    """A unit of work: some batches of the test set, ``n`` examples in all, under the global model after round ``t``."""

    t: int
    batches: range
    n: int
    w: Tensor
    buffers: dict[str, Tensor]

    def __str__(self) -> str:
        return f"round {self.t}, test examples {self.batches.start * BATCH} to {min(self.batches.stop * BATCH, self.n) - 1}"


#: Of a batch: the sum of the losses, and how many are right (0 for targets that are no classes).
Sums = list[tuple[float, int]]


def units(t: int, w: Tensor, buffers: dict[str, Tensor], dataset: Dataset) -> list[Tested]:
    """The whole split by which models are judged. ``evaluate`` puts the results together again."""
    n = len(dataset.evaluation[2])
    count = -(-n // BATCH)
    size = max(UNIT, -(-count // MOST))
    w, buffers = w.cpu(), {name: b.cpu() for name, b in buffers.items()}
    return [Tested(t, range(i, min(i + size, count)), n, w, buffers) for i in range(0, count, size)]


def sums(network: Network, unit: Tested, dataset: Dataset, device: torch.device) -> Sums:
    """What ``evaluate`` adds up, batch by batch, in eval mode."""
    found, w = Sums(), unit.w.to(device)
    _, inputs, targets = dataset.evaluation
    with torch.no_grad():
        bound = network.bind(
            w.unsqueeze(0), {k: b.to(device).unsqueeze(0).clone() for k, b in unit.buffers.items()}
        )
        for i in (number * BATCH for number in unit.batches):
            x = ready(dataset.normalise(inputs[i : i + BATCH]), w.device, w.dtype).unsqueeze(0)
            y = targets[i : i + BATCH].to(w.device).unsqueeze(0)
            y = y.to(w.dtype) if y.is_floating_point() else y
            logits = bound(x)
            right = 0 if y.is_floating_point() else int((losses.predicted(logits) == y).sum())
            found.append((float(losses.per_example(logits, y).double().sum()), right))
    return found


def evaluate(parts: Iterable[Sums], dataset: Dataset) -> dict[str, float]:
    """``loss`` (mean) and, for class labels, ``accuracy`` (share in [0, 1]); ``n``. ``parts``: of ``units``, in their order,
    whoever computed them."""
    loss, correct, n = 0.0, 0, len(dataset.evaluation[2])
    for more, right in itertools.chain.from_iterable(parts):
        loss, correct = loss + more, correct + right
    scores = {"loss": loss / n, "n": n}
    return scores if dataset.regression else {"accuracy": correct / n, **scores}


def tested(network: Network, state: Mapping[str, Tensor], dataset: Dataset) -> list[Row]:
    """The same of a state_dict, as rows of a run's metrics. Buffers that it lacks are the network's."""
    own = {n: state[n].to(b.dtype) if n in state else b for n, b in network.buffers.items()}
    w = network.layout.row({n: state[n].float() for n in network.layout.names})
    scores = evaluate(
        (sums(network, unit, dataset, w.device) for unit in units(0, w, own, dataset)), dataset
    )
    n, split = int(scores.pop("n")), dataset.evaluation[0]
    return [
        {
            "moment": "aggregated",
            "scope": "global",
            "slice": split,
            "metric": metric,
            "value": value,
            "n_examples": n,
            "estimator": "exact",
        }
        for metric, value in scores.items()
    ]
