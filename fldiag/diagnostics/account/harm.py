"""Who hurts whom: the change of the loss on every client's data, and on every class, by every update."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fldiag.results.means import sample_mean
from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.round_weights import Stored


def harm(history: History, cohort: Stored, slice_name: str) -> list[Row]:
    """Exact, by evaluating every model; and to first order, by one gradient a slice at the received weights.

    ``cohort`` has finite clients only. ``slice_name``: the split that the classes are of.
    """
    assert cohort.received is not None and cohort.clients is not None
    models = [cohort.client(j) for j in range(len(cohort.ids))] + [
        (cohort.aggregated, cohort.buffers)
    ]
    scores = history.evaluate([cohort.start, *models])
    updates: list[tuple[Row, Tensor]] = [
        ({"moment": "trained", "scope": "client", "client": k}, cohort.clients[j] - cohort.received)
        for j, k in enumerate(cohort.ids)
    ]
    updates.append(
        ({"moment": "aggregated", "scope": "global"}, cohort.aggregated - cohort.received)
    )
    rows: list[Row] = []
    for metric, to, index in [*_clients(history, cohort), *_classes(history, slice_name)]:
        n = len(index)
        g = history.problem(cohort.start, index, str(to["slice"])).gradient() if n else None
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
                    **sample_mean(change),
                },
                {
                    **about,
                    "metric": f"linear_{metric}",
                    "estimator": "first-order",
                    "value": None if g is None else float(g @ d.double()),
                },
            ]
    return rows


def _clients(history: History, cohort: Stored) -> Iterator[tuple[str, Row, Tensor]]:
    for b in cohort.ids:
        stretch = history.pool.train_slice(b)
        yield (
            "harm",
            {"scope": "pair", "client_b": b, "slice": f"client:{b}/train"},
            torch.arange(stretch.start, stretch.stop),
        )


def _classes(history: History, slice_name: str) -> Iterator[tuple[str, Row, Tensor]]:
    if history.dataset.regression:
        return
    stretch = history.stretch(slice_name)
    y = history.pool.y[stretch]
    for c in range(history.dataset.classes):
        yield (
            "class_harm",
            {"index": c, "slice": f"{slice_name}/class:{c}"},
            stretch.start + (y == c).nonzero().flatten(),
        )
