"""Who hurts whom: the change of the loss on every client's data, and on every class, by every update."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.round_weights import Stored


def harm(history: History, stored: Stored, where: str) -> list[Row]:
    """Exact, by evaluating every model; and to first order, by one gradient a slice at the received weights.

    ``stored`` has finite clients only. ``where``: the split that the classes are of.
    """
    assert stored.received is not None and stored.clients is not None
    models = [stored.client(j) for j in range(len(stored.ids))] + [
        (stored.aggregated, stored.buffers)
    ]
    scores = history.evaluate([stored.start, *models])
    updates: list[tuple[Row, Tensor]] = [
        ({"moment": "trained", "scope": "client", "client": k}, stored.clients[j] - stored.received)
        for j, k in enumerate(stored.ids)
    ]
    updates.append(
        ({"moment": "aggregated", "scope": "global"}, stored.aggregated - stored.received)
    )
    rows: list[Row] = []
    for metric, to, index in [*_clients(history, stored), *_classes(history, where)]:
        n = len(index)
        g = history.problem(stored.start, index, str(to["slice"])).gradient() if n else None
        for j, (by, d) in enumerate(updates, start=1):
            if "client_b" in to and by["scope"] == "global":
                continue
            change = scores.loss[j, index.numpy()] - scores.loss[0, index.numpy()]
            about = {**by, **to, "n_examples": n}
            rows += [
                {
                    **about,
                    "metric": metric,
                    "estimator": "exact",
                    "value": float(change.mean()) if n else None,
                    "stderr": float(change.std(ddof=1) / n**0.5) if n > 1 else None,
                },
                {
                    **about,
                    "metric": f"linear_{metric}",
                    "estimator": "first-order",
                    "value": None if g is None else float(g @ d.double()),
                },
            ]
    return rows


def _clients(history: History, stored: Stored) -> Iterator[tuple[str, Row, Tensor]]:
    for b in stored.ids:
        own = history.pool.train_slice(b)
        yield (
            "harm",
            {"scope": "pair", "client_b": b, "slice": f"client:{b}/train"},
            torch.arange(own.start, own.stop),
        )


def _classes(history: History, where: str) -> Iterator[tuple[str, Row, Tensor]]:
    if history.dataset.regression:
        return
    stretch = history.stretch(where)
    y = history.pool.y[stretch]
    for c in range(history.dataset.classes):
        yield (
            "class_harm",
            {"index": c, "slice": f"{where}/class:{c}"},
            stretch.start + (y == c).nonzero().flatten(),
        )
