"""Accuracy and loss of the global model on the official test set."""

from __future__ import annotations

import torch
from torch import Tensor

from fldiag import losses
from fldiag.data import Dataset
from fldiag.models.network import Network

BATCH = 500  # fixed, so the bits do not depend on the memory at hand


def evaluate(network: Network, w: Tensor, buffers: dict[str, Tensor], dataset: Dataset) -> dict[str, float]:
    """``loss`` (mean) and, for class labels, ``accuracy`` (share in [0, 1]) in eval mode; ``n``."""
    loss, correct, n = 0.0, 0, len(dataset.test_y)
    with torch.no_grad():
        bound = network.bind(w.unsqueeze(0), {k: b.unsqueeze(0).clone() for k, b in buffers.items()})
        for i in range(0, n, BATCH):
            x = dataset.normalise(dataset.test_x[i: i + BATCH])
            x = x.to(w.device, w.dtype if x.is_floating_point() else x.dtype).unsqueeze(0)
            y = dataset.test_y[i: i + BATCH].to(w.device).unsqueeze(0)
            y = y.to(w.dtype) if y.is_floating_point() else y
            logits = bound(x)
            loss += float(losses.per_example(logits, y).double().sum())
            if not y.is_floating_point():
                correct += int((logits.argmax(-1) == y).sum())
    scores = {"loss": loss / n, "n": n}
    return scores if dataset.test_y.is_floating_point() else {"accuracy": correct / n, **scores}
