"""Accuracy and loss of the global model on the official test set (a recorded run without one: on its training examples)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fldiag import losses
from fldiag.data import Dataset
from fldiag.data.arrays import ready
from fldiag.models.network import Network
from fldiag.results.table import Row

#: Examples in a batch; fixed, so the bits do not depend on the memory at hand.
BATCH = 500
#: Batches in a block, at least: 10,000 test images are four blocks. And blocks at most, as each carries the weights.
BLOCK, MOST = 5, 16
#: Of a batch: the sum of the losses, and how many are right (0 for targets that are no classes).
Sums = list[tuple[float, int]]


@dataclass(frozen=True)
class EvaluationBlock:
    """Some batches of the test set, ``n`` examples in all, and the global model after round ``t``: work for one worker."""

    t: int
    batches: range
    n: int
    w: Tensor
    buffers: dict[str, Tensor]

    def __str__(self) -> str:
        return f"round {self.t}, test examples {self.batches.start * BATCH} to {min(self.batches.stop * BATCH, self.n) - 1}"


def evaluate(
    network: Network,
    dataset: Dataset,
    w: Tensor,
    buffers: dict[str, Tensor],
    t: int = 0,
    execute: Callable[[list[Any]], Iterable[Sums]] | None = None,
) -> dict[str, float]:
    """``loss`` (mean) and, for class labels, ``accuracy`` (share in [0, 1]) on the split by which models are judged; ``n``.

    ``execute``: does the blocks elsewhere where there are several. Whoever does them, the numbers are the same."""
    n = len(dataset.evaluation[2])
    units = split_blocks(t, w, buffers, n)
    if execute is not None and len(units) > 1:
        parts = execute(units)
    else:
        parts = (evaluate_block(network, dataset, block, w.device) for block in units)
    loss, right = 0.0, 0
    for batch_loss, batch_right in itertools.chain.from_iterable(parts):
        loss, right = loss + batch_loss, right + batch_right
    scores = {"loss": loss / n, "n": n}
    return scores if dataset.regression else {"accuracy": right / n, **scores}


def split_blocks(t: int, w: Tensor, buffers: dict[str, Tensor], n: int) -> list[EvaluationBlock]:
    """The n examples in blocks of whole batches."""
    count = -(-n // BATCH)
    size = max(BLOCK, -(-count // MOST))
    w, buffers = w.cpu(), {name: b.cpu() for name, b in buffers.items()}
    return [
        EvaluationBlock(t, range(i, min(i + size, count)), n, w, buffers)
        for i in range(0, count, size)
    ]


def evaluate_block(
    network: Network, dataset: Dataset, block: EvaluationBlock, device: torch.device
) -> Sums:
    """What ``evaluate`` adds up, batch by batch, in eval mode."""
    totals, w = Sums(), block.w.to(device)
    buffers = {k: b.to(device).unsqueeze(0).clone() for k, b in block.buffers.items()}
    _, inputs, targets = dataset.evaluation
    with torch.no_grad():
        bound = network.bind(w.unsqueeze(0), buffers)
        for i in (number * BATCH for number in block.batches):
            x = ready(dataset.normalise(inputs[i : i + BATCH]), w.device, w.dtype).unsqueeze(0)
            y = targets[i : i + BATCH].to(w.device).unsqueeze(0)
            y = y.to(w.dtype) if y.is_floating_point() else y
            logits = bound(x)
            right = 0 if dataset.regression else int((losses.predicted(logits) == y).sum())
            values = losses.of_examples(losses.per_example(logits, y), y, 2)
            totals.append((float(values.double().sum()), right))
    return totals


def evaluate_state(network: Network, state: Mapping[str, Tensor], dataset: Dataset) -> list[Row]:
    """The same of a state_dict, as rows of a run's metrics. Buffers that it lacks are the network's."""
    buffers = {n: state[n].to(b.dtype) if n in state else b for n, b in network.buffers.items()}
    w = network.layout.row({n: state[n].float() for n in network.layout.names})
    return score_rows(evaluate(network, dataset, w, buffers), dataset.evaluation[0])


def score_rows(scores: Mapping[str, float], split: str) -> list[Row]:
    """What ``evaluate`` returns, as rows."""
    return [
        {
            "moment": "aggregated",
            "scope": "global",
            "slice": split,
            "metric": metric,
            "value": scores[metric],
            "n_examples": int(scores["n"]),
            "estimator": "exact",
        }
        for metric in ("accuracy", "loss")
        if metric in scores
    ]
