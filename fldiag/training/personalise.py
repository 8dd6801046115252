"""After the last round: every client trains a model of its own from the final one, by the same local loop, and is tested on its
own mixture of classes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.data.dataset import personal_test
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.method import Method, Neighbours, PersonalPlan
from fldiag.results.statistics import sample_mean, share
from fldiag.results.table import PERSONAL, Row
from fldiag.sections import TrainSection
from fldiag.seeding import numpy_rng, seed_for
from fldiag.training.client import Batches
from fldiag.training.record import outputs
from fldiag.training.server import Federation
from fldiag.training.setup import Schedule, Setup


def fine_tune(federation: Federation, plan: PersonalPlan, *, seed: int | None = None) -> list[Row]:
    """Fine-tune every client's model, wherever the workspace computes, and test it.

    Args:
        federation: After the last round, with the clients' states where the plan's method reads them.
        plan: How the clients train and predict, once for each of its numbers of epochs.
        seed: Of minibatches and of the examples that vote; by default the run's.

    Returns:
        Rows of the result table: each client's accuracy after each number of epochs (its binomial standard error and Wilson's
        95 % interval), and their mean and deviation over the clients that have test examples.

    Raises:
        FldiagError: Data without classes.
    """
    setup, lengths = federation.setup, sorted({*plan.epochs})
    if setup.dataset.regression:
        raise FldiagError(
            "a client's test examples are chosen by class, and the data have no classes", usage=True
        )
    seed = setup.config.seed if seed is None else seed
    start = copy.copy(federation)
    start.setup = tuning = copy.copy(setup)
    # Local decay is a schedule of a round's epochs.
    changes: Any = {"seed": seed_for(seed, "fine-tuning"), "train__local_decay": 1.0}
    if plan.lr == "initial":
        changes["train__lr_decay"] = 1.0
    tuning.config, tuning.method = setup.config.replace(**changes), plan.method or Method()
    start.initial_state = tuning.method.client_init(setup.initial())
    units = []
    for e in lengths:
        train = tuning.config.train.model_copy(update={"epochs": e})
        tuning.schedule = EpochSchedule(tuning.config.seed, setup.config.clients, train, plan.steps)
        units += [(e, cohort) for cohort in start.cohorts([*range(len(setup.parts))])]
    results = workspace().map(Setup.train, tuning, [cohort for _, cohort in units])
    own: dict[tuple[int, int], Row] = {}
    for (e, cohort), result in zip(units, results, strict=True):
        for j, i in enumerate(cohort.ids):
            buffers = {name: b[j : j + 1] for name, b in result.buffers.items()}
            w = result.rows[j : j + 1]
            right, n = count_right(setup, i, w, buffers, plan.neighbours, seed)
            row = {"index": e, "client": i, "slice": f"client:{i}/test", "n_examples": n}
            own[e, i] = {**row, **(share(right, n) if n else {})}
    own = dict(sorted(own.items()))
    rows = [{"scope": "client", "metric": PERSONAL, **row} for row in own.values()]
    for e in lengths:
        tested = [row for (length, _), row in own.items() if length == e and "value" in row]
        group = {"scope": "global", "slice": "clients/test", "index": e}
        group["n_examples"] = sum(row["n_examples"] for row in tested)
        if values := [row["value"] for row in tested]:
            rows.append({**group, "metric": PERSONAL, **sample_mean(values)})
            rows.append({**group, "metric": f"{PERSONAL}_std", "value": float(np.std(values))})
    common = {"round": federation.t, "moment": "trained", "estimator": "exact"}
    common["prediction"] = "model" if plan.neighbours is None else "model and neighbours"
    return [{**common, **row} for row in rows]


@dataclass(frozen=True)
class EpochSchedule(Schedule):
    """Minibatches of fine-tuning: an epoch is ``steps(n, train)`` of them, or one pass over the n examples."""

    steps: Callable[[int, TrainSection], int] | None

    def batches(self, t: int, client: int, n: int) -> Batches:
        if self.steps is None:
            return super().batches(t, client, n)
        count = self.train.epochs * self.steps(n, self.train)  # as many passes are more than enough
        passes = self.train.model_copy(update={"epochs": count})
        return Schedule(self.seed, self.clients, passes).batches(t, client, n)[:count]


def count_right(
    setup: Setup,
    client: int,
    w: Tensor,
    buffers: dict[str, Tensor],
    neighbours: Neighbours | None = None,
    seed: int = 0,
) -> tuple[int, int]:
    """(right, n) of the weights [1, P] on the client's n test examples; a prediction that is not finite is wrong."""
    data, part = setup.dataset, torch.as_tensor(setup.parts[client])
    index = torch.from_numpy(personal_test(data.train_y[part], data.test_y, client))
    if not len(index):
        return 0, 0
    bound, inputs = setup.network.bind(w, buffers), data.test_x[index]
    scores = outputs(bound, data, inputs, w)
    if neighbours is not None:  # a random subset of the client's examples votes
        rng, count = numpy_rng(seed, "neighbours", client), len(part)
        voters = rng.choice(count, min(neighbours.capacity, count), replace=False)
        examples = part[np.sort(voters)]
        features, store = (
            outputs(bound.features, data, x, w).flatten(1).to(w.dtype)
            for x in (inputs, data.train_x[examples])
        )
        scores = mix(scores, features, store, data.train_y[examples].to(w.device), neighbours)
    y = data.test_y[index].to(w.device)
    return int(((scores.argmax(-1) == y) & scores.isfinite().all(-1)).sum()), len(index)


def mix(logits: Tensor, features: Tensor, store: Tensor, labels: Tensor, n: Neighbours) -> Tensor:
    """weight p_knn + (1 - weight) p_model, [n, C], from features [n, d], stored features [m, d] and labels [m]."""
    d2 = torch.cdist(features, store, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest, index = d2.topk(min(n.k, len(store)), largest=False)
    # s_j / sum s is a softmax, which does not underflow where every neighbour is far
    votes = torch.softmax(-nearest / (features.shape[1] * n.scale), dim=-1)
    p_knn = torch.zeros_like(logits).scatter_add_(1, labels[index], votes.to(logits.dtype))
    model = logits if n.logits else torch.softmax(logits, dim=-1)
    return n.weight * p_knn + (1 - n.weight) * model
