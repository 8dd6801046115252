"""What the Iris toy measures of a round's models: accuracy, forgetting, and where in the plane they disagree.

``models`` [2 + K, P] are, in this order everywhere: the one received, those trained by clients 0, 1, ..., K - 1, and
the aggregated one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fldiag.data import Dataset
from fldiag.models.network import Network
from fldiag.results.table import Row

CLASSES = 3
LETTERS = "abc"  # of classes 0, 1, 2 in the lines of a region
BLOCK = 8192  # inputs a forward


def predict(network: Network, models: Tensor, x: Tensor) -> Tensor:
    """Classes [2 + K, n] that the models give the inputs x [n, 2]."""
    bound = network.bind(models)
    with torch.no_grad():
        return torch.cat(
            [bound(b.expand(len(models), *b.shape)).argmax(-1) for b in x.split(BLOCK)], 1
        )


def accuracies(predicted: Tensor, y: Tensor) -> list[Row]:
    """Rows ``accuracy``, ``class_accuracy`` of all models, ``drop`` and ``forgetting`` of the clients', and the means over
    the clients, from the classes ``predicted`` [2 + K, n] of examples with labels y [n]."""
    right = (predicted == y).double()
    classes = torch.stack([right[:, y == c].mean(1) for c in range(CLASSES)], 1)
    accuracy = right.mean(1)
    measures = {
        "accuracy": accuracy,
        "drop": accuracy[0] - accuracy,
        "forgetting": (classes[0] - classes).amax(1),
    }
    rows: list[Row] = []
    for i in range(len(right)):
        model = _model(i, len(right))
        values = measures if model["moment"] == "trained" else {"accuracy": accuracy}
        rows += [{**model, "metric": m, "value": float(v[i])} for m, v in values.items()]
        rows += [
            {**model, "metric": "class_accuracy", "index": c, "value": float(classes[i, c])}
            for c in range(CLASSES)
        ]
    mean = {"moment": "trained", "scope": "global"}
    rows += [{**mean, "metric": m, "value": float(v[1:-1].mean())} for m, v in measures.items()]
    return [{"n_examples": len(y), **row} for row in rows]


def differences(regions: Tensor) -> list[Row]:
    """Rows ``disagreement``: share of the plane in which a client's model and the global one (``reference``: received or
    aggregated) give other classes, of each client and in the mean; from the classes ``regions`` [2 + K, points]."""
    rows: list[Row] = []
    for reference, other in (("received", regions[0]), ("aggregated", regions[-1])):
        shares = (regions[1:-1] != other).double().mean(1)
        common = {
            "metric": "disagreement",
            "moment": "trained",
            "reference": reference,
            "n_examples": regions.shape[1],
        }
        rows += [
            {**common, "scope": "client", "client": k, "value": float(v)}
            for k, v in enumerate(shares)
        ]
        rows.append({**common, "scope": "global", "value": float(shares.mean())})
    return rows


def lines(regions: Tensor, x: np.ndarray, y: np.ndarray) -> list[Row]:
    """Rows ``region`` of all models but the received: one for each line of the grid (``index``, at height ``y``, from
    ``x`` to ``x_last``); ``regions`` [2 + K, len(y) len(x)], line after line.

    ``line`` has its classes by run length: 57a143c are 57 points of class 0, then 143 of class 2. The value is the
    share of the line in which the model disagrees with the aggregated one: its mean is ``disagreement``.
    """
    maps = regions.view(len(regions), len(y), len(x)).numpy()
    shares = (maps != maps[-1]).mean(2)
    return [
        {
            **_model(i, len(maps)),
            "metric": "region",
            "index": j,
            "x": float(x[0]),
            "x_last": float(x[-1]),
            "y": float(y[j]),
            "line": "".join(
                f"{sum(1 for _ in run)}{LETTERS[c]}" for c, run in itertools.groupby(maps[i, j])
            ),
            "value": float(shares[i, j]),
        }
        for i in range(1, len(maps))
        for j in range(len(y))
    ]


def points(data: Dataset, parts: Sequence[np.ndarray]) -> list[Row]:
    """Rows ``point``: ``x``, ``y``, value = class, and the ``client`` that trains on it (none: a test example)."""
    owner = {int(i): k for k, part in enumerate(parts) for i in part}
    splits = [("train", data.train_x, data.train_y)]
    if not torch.equal(data.test_x, data.train_x):
        splits.append(("test", data.test_x, data.test_y))
    return [
        {
            "metric": "point",
            "slice": name,
            "index": i,
            "client": owner[i] if name == "train" else None,
            "x": float(at[0]),
            "y": float(at[1]),
            "value": float(c),
        }
        for name, xs, ys in splits
        for i, (at, c) in enumerate(zip(xs, ys, strict=True))
    ]


def _model(i: int, n: int) -> Row:
    """What row i of n models is."""
    if 0 < i < n - 1:
        return {"moment": "trained", "scope": "client", "client": i - 1}
    return {"moment": "aggregated" if i else "received", "scope": "global"}
