"""After the last round: every client trains a model of its own from the final one, by the same local loop, and is tested on its
own mixture of classes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.data import slices
from fldiag.data.arrays import ready
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.method import Method, Neighbours, Personal
from fldiag.results.means import sample_mean, share
from fldiag.results.table import PERSONAL
from fldiag.sections import TrainSection
from fldiag.seeding import numpy_rng, seed_for
from fldiag.training.client import Batches
from fldiag.training.evaluate import BATCH
from fldiag.training.setup import Cohort, Seeded, Setup


@dataclass(frozen=True)
class GlobalModel:
    """What the clients start from: weights ``w`` [P] and buffers after ``rounds`` rounds, and the states of the clients that
    have trained, where the plan's method reads them."""

    w: Tensor
    buffers: dict[str, Tensor]
    states: Mapping[int, dict[str, Tensor]]
    rounds: int


def measure(
    setup: Setup, plan: Personal, model: GlobalModel, *, seed: int | None = None
) -> list[dict[str, Any]]:
    """Fine-tune and test every client's model, wherever the workspace computes.

    Args:
        setup: Of the run.
        plan: How the clients train and predict, once for each of its numbers of epochs.
        model: What they start from.
        seed: Of minibatches and of the examples that vote; by default the run's.

    Returns:
        Rows of the result table: each client's accuracy after each number of epochs (its binomial standard error and Wilson's
        95 % interval), and their mean and deviation over the clients that have test examples.

    Raises:
        FldiagError: Data without classes.
    """
    if setup.dataset.regression:
        raise FldiagError(
            "a client's test examples are chosen by class, and the data have no classes", usage=True
        )
    seed = setup.config.seed if seed is None else seed
    # Local decay is a schedule of a round's epochs.
    config = setup.config.replace(seed=seed_for(seed, "fine-tuning"), train__local_decay=1.0)
    config = config.replace(train__lr_decay=1.0) if plan.lr == "initial" else config
    train = config.train
    tuning, ids, units = copy.copy(setup), [*range(len(setup.parts))], []
    tuning.config, tuning.method = config, plan.method or Method()
    initial = tuning.method.client_init(setup.initial())
    states = {
        i: {name: model.states.get(i, initial)[name] for name in initial} for i in ids if initial
    }
    clients = Cohort(t=model.rounds, ids=ids, w_g=model.w, buffers=model.buffers)
    for e in sorted({*plan.epochs}):
        passes = config.seed, 0, 0, e, train.batch_size, train.drop_last
        tuning.schedule = EpochSchedule(*passes, train=train, steps=plan.steps)
        cohorts = tuning.cohorts(clients, states)
        units += [(e, cohort) for cohort in cohorts]
    predictor = Predictor(setup, plan.neighbours, seed)
    tests = workspace().map(_test, (tuning, predictor), units, name=lambda unit: str(unit[1]))
    own = sorted(itertools.chain(*tests), key=lambda row: (row["index"], row["client"]))
    common = {"round": model.rounds, "moment": "trained", "estimator": "exact"}
    common["prediction"] = "model" if plan.neighbours is None else "model and neighbours"
    rows = [{"scope": "client", "metric": PERSONAL, **row} for row in own]
    for e in sorted({*plan.epochs}):
        tested = [row for row in own if row["index"] == e and "value" in row]
        group = {"scope": "global", "slice": "clients/test", "index": e}
        group["n_examples"] = sum(row["n_examples"] for row in tested)
        if values := [row["value"] for row in tested]:
            rows.append({**group, "metric": PERSONAL, **sample_mean(values)})
            rows.append({**group, "metric": f"{PERSONAL}_std", "value": float(np.std(values))})
    return [{**common, **row} for row in rows]


def _test(shared: tuple[Setup, Predictor], unit: tuple[int, Cohort]) -> list[dict[str, Any]]:
    """What of a client's row differs, for the clients of a cohort."""
    tuning, predictor = shared
    e, cohort = unit
    result, rows = tuning.train(cohort), []
    for j, i in enumerate(cohort.ids):
        right, n = predictor(result.rows[j], {n: b[j] for n, b in result.buffers.items()}, i)
        row = {"index": e, "client": i, "slice": f"client:{i}/test", "n_examples": n}
        rows.append({**row, **(share(right, n) if n else {})})
    return rows


@dataclass(frozen=True)
class EpochSchedule(Seeded):
    """Minibatches of fine-tuning: an epoch is ``steps(n, train)`` of them, or one pass over the n examples."""

    train: TrainSection = field(default_factory=TrainSection)
    steps: Callable[[int, TrainSection], int] | None = None

    def batches(self, t: int, client: int, n: int) -> Batches:
        if self.steps is None:
            return super().batches(t, client, n)
        count = self.epochs * self.steps(n, self.train)  # as many passes are more than enough
        return Seeded.batches(replace(self, epochs=count), t, client, n)[:count]


class Predictor:
    """Counts what a client's model gets right on its own test examples."""

    def __init__(self, setup: Setup, neighbours: Neighbours | None, seed: int):
        self.network, self.dataset, self.parts = setup.network, setup.dataset, setup.parts
        self.neighbours, self.seed = neighbours, seed

    def __call__(self, w: Tensor, buffers: dict[str, Tensor], client: int) -> tuple[int, int]:
        """(right, n) for weights [P] on the client's n test examples; a prediction that is not finite is wrong."""
        data, part = self.dataset, torch.as_tensor(self.parts[client])
        index = torch.from_numpy(slices.personal_test(data.train_y[part], data.test_y, client))
        if not len(index):
            return 0, 0
        scores, features = self.outputs(w, buffers, data.test_x[index])
        if self.neighbours is not None:  # a random subset of the client's examples votes
            rng, count = numpy_rng(self.seed, "neighbours", client), len(part)
            voters = rng.choice(count, min(self.neighbours.capacity, count), replace=False)
            examples = part[np.sort(voters)]
            _, store = self.outputs(w, buffers, data.train_x[examples])
            labels = data.train_y[examples].to(w.device)
            scores = mix(scores, features, store, labels, self.neighbours)
        y = data.test_y[index].to(w.device)
        return int(((scores.argmax(-1) == y) & scores.isfinite().all(-1)).sum()), len(index)

    @torch.no_grad()
    def outputs(self, w: Tensor, buffers: dict[str, Tensor], raw: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, C] and, where neighbours are asked for, features [n, d], in eval mode."""
        bound = self.network.bind(
            w.unsqueeze(0), {name: b.unsqueeze(0) for name, b in buffers.items()}
        )
        chunks = (self.dataset.normalise(chunk) for chunk in raw.split(BATCH))
        inputs = [ready(chunk, w.device, w.dtype).unsqueeze(0) for chunk in chunks]
        if self.neighbours is None:
            return torch.cat([bound(x)[0] for x in inputs]), w
        features = [bound.features(x) for x in inputs]
        logits = torch.cat([bound.head(z)[0] for z in features])
        return logits, torch.cat([z[0].flatten(1).to(w.dtype) for z in features])


def mix(logits: Tensor, features: Tensor, store: Tensor, labels: Tensor, n: Neighbours) -> Tensor:
    """weight p_knn + (1 - weight) p_model, [n, C], from features [n, d], stored features [m, d] and labels [m]."""
    d2 = torch.cdist(features, store, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest, index = d2.topk(min(n.k, len(store)), largest=False)
    # s_j / sum s is a softmax, which does not underflow where every neighbour is far
    votes = torch.softmax(-nearest / (features.shape[1] * n.scale), dim=-1)
    p_knn = torch.zeros_like(logits).scatter_add_(1, labels[index], votes.to(logits.dtype))
    model = logits if n.logits else torch.softmax(logits, dim=-1)
    return n.weight * p_knn + (1 - n.weight) * model
