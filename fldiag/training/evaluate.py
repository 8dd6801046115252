"""Accuracy and loss of the global model on the official test set."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fldiag import losses
from fldiag.data import Dataset
from fldiag.data.arrays import ready
from fldiag.models.network import Network
from fldiag.results.table import Row

BATCH = 500  # fixed, so the bits do not depend on the memory at hand


def evaluate(network: Network, w: Tensor, buffers: dict[str, Tensor], dataset: Dataset) -> dict[str, float]:
    """``loss`` (mean) and, for class labels, ``accuracy`` (share in [0, 1]) in eval mode; ``n``."""
    loss, correct, n = 0.0, 0, len(dataset.test_y)
    with torch.no_grad():
        bound = network.bind(w.unsqueeze(0), {k: b.unsqueeze(0).clone() for k, b in buffers.items()})
        for i in range(0, n, BATCH):
            x = ready(dataset.normalise(dataset.test_x[i: i + BATCH]), w.device, w.dtype).unsqueeze(0)
            y = dataset.test_y[i: i + BATCH].to(w.device).unsqueeze(0)
            y = y.to(w.dtype) if y.is_floating_point() else y
            logits = bound(x)
            loss += float(losses.per_example(logits, y).double().sum())
            if not y.is_floating_point():
                correct += int((logits.argmax(-1) == y).sum())
    scores = {"loss": loss / n, "n": n}
    return scores if dataset.test_y.is_floating_point() else {"accuracy": correct / n, **scores}


def tested(network: Network, state: Mapping[str, Tensor], dataset: Dataset) -> list[Row]:
    """The same of a state_dict, as rows of a run's metrics. Buffers that it lacks are the network's."""
    own = {n: state[n].to(b.dtype) if n in state else b for n, b in network.buffers.items()}
    scores = evaluate(network, network.layout.row({n: state[n].float() for n in network.layout.names}), own, dataset)
    n = int(scores.pop("n"))
    return [{"moment": "aggregated", "scope": "global", "slice": "test", "metric": metric, "value": value, "n_examples": n,
             "estimator": "exact"} for metric, value in scores.items()]
