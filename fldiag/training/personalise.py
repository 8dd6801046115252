"""After the last round: every client trains a model of its own from the final one, by the same local loop, and is tested on its
own mixture of classes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.config import Config
from fldiag.data import slices
from fldiag.data.arrays import ready
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.method import Method, Neighbours, Personal
from fldiag.results.means import sample_mean, share
from fldiag.results.table import PERSONAL
from fldiag.runs.run import ClientStates
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
    states: ClientStates | dict[int, dict[str, Tensor]]
    rounds: int


def check_plan(setup: Setup) -> None:
    """Raises FldiagError for data without classes. (What neighbours need, the method asks of the model.)"""
    if setup.dataset.regression:
        raise FldiagError(
            "a client's test examples are chosen by class, and the data have no classes", usage=True
        )


def measure(
    setup: Setup, plan: Personal, model: GlobalModel, *, seed: int | None = None, run: str = ""
) -> list[dict[str, Any]]:
    """Fine-tune and test every client's model, wherever the workspace computes.

    Args:
        setup: Of the run.
        plan: How the clients train and predict, once for each of its numbers of epochs.
        model: What they start from.
        seed: Of minibatches and of the examples that vote; by default the run's.
        run: Tells the cohorts of several runs apart.

    Returns:
        Rows of the result table: each client's accuracy after each number of epochs (its binomial standard error and Wilson's
        95 % interval), and their mean and deviation over the clients that have test examples.
    """
    seed = setup.config.seed if seed is None else seed
    tuning, units = _fine_tuning(setup, plan, model, seed)
    counts = workspace().map(
        _count,
        (tuning, Predictor(setup, plan.neighbours, seed)),
        units,
        name=lambda unit: f"{run}: clients {', '.join(map(str, unit[1].ids))}",
    )
    clients = sorted(count for unit in counts for count in unit)
    rows: list[dict[str, Any]] = [
        {
            "scope": "client",
            "client": i,
            "slice": f"client:{i}/test",
            "metric": PERSONAL,
            "index": e,
            "n_examples": n,
            **(share(right, n) if n else {}),
        }
        for e, i, right, n in clients
    ]
    for e in sorted({*plan.epochs}):
        values = np.array([right / n for e_, _, right, n in clients if e_ == e and n])
        total = sum(n for e_, _, _, n in clients if e_ == e)
        group = {"scope": "global", "slice": "clients/test", "index": e, "n_examples": total}
        if len(values):
            rows.append({**group, "metric": PERSONAL, **sample_mean(values)})
            rows.append({**group, "metric": f"{PERSONAL}_std", "value": float(values.std())})
    common = {"round": model.rounds, "moment": "trained", "estimator": "exact"}
    common |= {"prediction": "model"}
    if plan.neighbours is not None:
        common |= {"prediction": "model and neighbours", "voters": plan.neighbours.described}
    return [{**common, **row} for row in rows]


def _fine_tuning(
    setup: Setup, plan: Personal, model: GlobalModel, seed: int
) -> tuple[Setup, list[tuple[int, Cohort]]]:
    """A setup in which every client trains on from the global model, and its cohorts for each number of epochs."""
    config = setup.config.replace(seed=seed_for(seed, "fine-tuning"))
    config = config.replace(train__lr_decay=1.0) if plan.lr == "initial" else config
    # Local decay is a schedule of a round's epochs.
    config = config.replace(train__local_decay=1.0, train__local_decay_after=0.5)
    tuning, ids = copy.copy(setup), [*range(len(setup.parts))]
    tuning.config, tuning.method = config, plan.method or Method()
    initial = tuning.method.client_init(setup.initial())
    states = {
        i: {name: model.states.get(i, initial)[name] for name in initial} for i in ids if initial
    }
    units = []
    for e in sorted({*plan.epochs}):
        tuning.schedule = EpochSchedule(config, e, plan.steps)  # type: ignore[assignment]  # nobody is sampled
        cohorts = tuning.cohorts(model.rounds, ids, model.w, model.buffers, {}, states)
        units += [(e, cohort) for cohort in cohorts]
    return tuning, units


def _count(
    shared: tuple[Setup, Predictor], unit: tuple[int, Cohort]
) -> list[tuple[int, int, int, int]]:
    """(e, client, right, n) of a cohort."""
    tuning, predictor = shared
    e, cohort = unit
    result = tuning.train(cohort)
    return [
        (e, i, *predictor(result.rows[j], {n: b[j] for n, b in result.buffers.items()}, i))
        for j, i in enumerate(cohort.ids)
    ]


class EpochSchedule:
    """Minibatches of fine-tuning: an epoch is ``steps(n, train)`` of them, or one pass over the n examples."""

    def __init__(
        self, config: Config, epochs: int, steps: Callable[[int, TrainSection], int] | None
    ):
        train = config.train
        self.train, self.epochs, self.steps = train, epochs, steps
        self.passes = Seeded(config.seed, 0, 0, 1, train.batch_size, train.drop_last)

    def batches(self, t: int, client: int, n: int) -> Batches:
        size = self.train.batch_size
        steps = n // size if self.train.drop_last else math.ceil(n / size)
        count = self.epochs * (self.steps(n, self.train) if self.steps and steps else steps)
        passes = math.ceil(count / max(steps, 1))
        return replace(self.passes, epochs=passes).batches(t, client, n)[:count]


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
        if self.neighbours is not None:
            examples = part[self.voters(client, len(part), self.neighbours.capacity)]
            _, store = self.outputs(w, buffers, data.train_x[examples])
            labels = data.train_y[examples].to(w.device)
            scores = mix(scores, features, store, labels, self.neighbours)
        y = data.test_y[index].to(w.device)
        return int(((scores.argmax(-1) == y) & scores.isfinite().all(-1)).sum()), len(index)

    def voters(self, client: int, n: int, capacity: int) -> np.ndarray:
        """Positions of the training examples that vote: a random subset of the client's n, sorted."""
        rng = numpy_rng(self.seed, "neighbours", client)
        return np.sort(rng.choice(n, min(capacity, n), replace=False))

    def outputs(self, w: Tensor, buffers: dict[str, Tensor], raw: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, C] and, where neighbours are asked for, features [n, d] (else none), in eval mode."""
        logits, features = [], []
        with torch.no_grad():
            rows = {name: b.unsqueeze(0).clone() for name, b in buffers.items()}
            bound = self.network.bind(w.unsqueeze(0), rows)
            for chunk in raw.split(BATCH):
                x = ready(self.dataset.normalise(chunk), w.device, w.dtype).unsqueeze(0)
                if self.neighbours is None:
                    logits.append(bound(x)[0])
                else:
                    z = bound.features(x)
                    logits.append(bound.head(z)[0])
                    features.append(z[0].flatten(1).to(w.dtype))
        return torch.cat(logits), torch.cat(features or [w[:0]])


def mix(logits: Tensor, features: Tensor, store: Tensor, labels: Tensor, n: Neighbours) -> Tensor:
    """weight p_knn + (1 - weight) p_model, [n, C], from features [n, d], stored features [m, d] and labels [m]."""
    d2 = torch.cdist(features, store, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest, index = d2.topk(min(n.k, len(store)), largest=False)
    # s_j / sum s is a softmax, which does not underflow where every neighbour is far
    votes = torch.softmax(-nearest / (features.shape[1] * n.scale), dim=-1)
    p_knn = torch.zeros_like(logits).scatter_add_(1, labels[index], votes.to(logits.dtype))
    model = logits if n.logits else torch.softmax(logits, dim=-1)
    return n.weight * p_knn + (1 - n.weight) * model
