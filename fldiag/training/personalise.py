"""After the last round: every client trains a model of its own from the final one, by the same local loop, and is tested on its
own mixture of classes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fldiag.config import Config
from fldiag.data import slices
from fldiag.data.arrays import ready
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.local import Local
from fldiag.method import Method, Neighbours, Part, Personal
from fldiag.results.means import sample_mean, share
from fldiag.results.table import PERSONAL, check, table
from fldiag.runs.run import Run
from fldiag.sections import TrainSection
from fldiag.seeding import numpy_rng, seed_for
from fldiag.step import Step
from fldiag.training.client import Batches
from fldiag.training.evaluate import BATCH
from fldiag.training.setup import Cohort, Seeded, Setup, load_weights

T = TypeVar("T")
#: Epochs of fine-tuning when neither the caller nor the method says so.
EPOCHS = (0, 1, 5)
#: Fine-tuning for longer is a slip of the pen.
MOST_EPOCHS = 10_000


@dataclass(frozen=True)
class GlobalModel:
    """What the clients start from: weights ``w`` [P] and buffers after ``rounds`` rounds, and the states of the clients that
    have trained, where the plan's method reads them."""

    w: Tensor
    buffers: dict[str, Tensor]
    states: Mapping[int, dict[str, Tensor]]
    rounds: int


@dataclass
class TunedModels:
    """Models of a cohort's clients after e epochs of fine-tuning."""

    e: int
    ids: list[int]
    rows: Tensor  # [K, P]
    buffers: dict[str, Tensor]  # name -> [K, ...]


def of_run(
    run: Run,
    setup: Setup,
    *,
    epochs: Sequence[int] | None = None,
    lr: Literal["decayed", "initial"] | None = None,
    seed: int | None = None,
) -> pd.DataFrame:
    """The table of the diagnostic ``personalise``, of one run and its setup.

    Raises FldiagError for data without classes and wrong epochs.
    """
    plan = setup.method.personal or Personal(EPOCHS)
    plan = replace(
        plan,
        epochs=_check_epochs(plan.epochs if epochs is None else epochs),
        lr=lr or plan.lr,
    )
    check_plan(setup, plan)
    w, buffers = load_weights(run, setup)
    states = run.states if plan.method and plan.method.client_init(w) else {}
    rows = measure(
        setup,
        plan,
        GlobalModel(w, buffers, states, run.done),
        seed=seed,
        run=run.name,
    )
    return check(table(rows, **run.common))


def personal_plan(setup: Setup) -> Personal | None:
    """What the run's method does after the last round, if anything; nothing on data without classes.

    Raises FldiagError for a plan that the model cannot follow."""
    plan = setup.method.personal
    if plan is None or setup.dataset.regression:
        return None
    check_plan(setup, plan)
    return plan


def check_plan(setup: Setup, plan: Personal) -> None:
    """Raises FldiagError for what cannot be measured on this data and model: better before training than after."""
    if setup.dataset.regression:
        raise FldiagError(
            f"data set {setup.dataset.name!r} has real targets, and a client's own test examples are chosen by "
            "class",
            "personalise a run on data with class labels",
            usage=True,
        )
    if plan.neighbours is not None and not setup.network.has_split:
        raise FldiagError(
            "neighbours are found by the features that the head sees, but this model does not expose them",
            "use a model that is head(features(x)), with a method features, or leave out the neighbours",
            usage=True,
        )


def _check_epochs(epochs: Sequence[int]) -> tuple[int, ...]:
    epochs = tuple(epochs)
    if not epochs or not all(
        isinstance(e, int | np.integer) and not isinstance(e, bool) and e >= 0 for e in epochs
    ):
        raise FldiagError(
            f"epochs = {list(epochs)}",
            "give whole numbers of at least 0, such as 0, 1 and 5",
            usage=True,
        )
    if max(epochs) > MOST_EPOCHS:
        raise FldiagError(f"epochs = {max(epochs):,}", f"give at most {MOST_EPOCHS:,}", usage=True)
    return tuple(sorted({int(e) for e in epochs}))


def measure(
    setup: Setup,
    plan: Personal,
    model: GlobalModel,
    *,
    seed: int | None = None,
    run: str = "",
) -> list[dict[str, Any]]:
    """Rows of the result table: each client's accuracy after each number of epochs, and their mean and deviation."""
    seed = setup.config.seed if seed is None else seed
    predictor = Predictor(setup, plan.neighbours, seed)
    ids = range(len(setup.parts))
    counts = fine_tune(setup, plan, model, ids, seed, predictor.counts, run)
    rows = [
        {
            "scope": "client",
            "client": i,
            "slice": f"client:{i}/test",
            "metric": PERSONAL,
            "index": e,
            # Accuracy with its binomial standard error and Wilson's 95 % interval.
            **(share(right, n) if n else {}),
            "n_examples": n,
        }
        for cohort in counts
        for e, i, right, n in cohort
    ]
    rows.sort(key=lambda row: (row["index"], row["client"]))
    for e in sorted(plan.epochs):
        rows += _mean_rows([row for row in rows if row["index"] == e], e)
    common = {
        "round": model.rounds,
        "moment": "trained",
        "estimator": "exact",
        **(
            {"prediction": "model"}
            if plan.neighbours is None
            else {"prediction": "model and neighbours", "voters": plan.neighbours.described}
        ),
    }
    return [{**common, **row} for row in rows]


def _mean_rows(rows: list[dict[str, Any]], e: int) -> list[dict[str, Any]]:
    """Mean and deviation over the clients that have test examples."""
    values = np.array([row["value"] for row in rows if row["n_examples"]])
    if not len(values):
        return []
    common = {
        "scope": "global",
        "slice": "clients/test",
        "index": e,
        "n_examples": sum(row["n_examples"] for row in rows),
    }
    return [
        {**common, "metric": PERSONAL, **sample_mean(values)},
        {**common, "metric": f"{PERSONAL}_std", "value": float(values.std())},
    ]


# -- fine-tuning


def fine_tune(
    setup: Setup,
    plan: Personal,
    model: GlobalModel,
    ids: Sequence[int],
    seed: int,
    measure_models: Callable[[TunedModels], T],
    run: str = "",
) -> list[T]:
    """What ``measure_models`` says of the clients' models, cohort by cohort, e by e: one training of max(epochs) epochs, measured
    on the way, wherever the workspace computes. ``run``: tells the cohorts of several runs apart."""
    config = setup.config.replace(seed=seed_for(seed, "fine-tuning"))
    config = config.replace(train__lr_decay=1.0) if plan.lr == "initial" else config
    # Local decay is a schedule of a round's epochs.
    config = config.replace(train__local_decay=1.0, train__local_decay_after=0.5)
    schedule = EpochSchedule(config, max(plan.epochs), plan.steps)
    stops = {
        e: {i: schedule.count(e, int(setup.sizes[i])) for i in ids}
        for e in sorted(set(plan.epochs))
    }
    method = plan.method or Method()
    tuning = copy.copy(setup)
    tuning.config, tuning.schedule = config, schedule  # type: ignore[assignment]  # nobody is sampled
    tuning.method = Method(*method, Snapshots(stops))
    initial = method.client_init(setup.initial())
    states = {
        i: {name: model.states.get(i, initial)[name] for name in initial} for i in ids if initial
    }
    cohorts = tuning.cohorts(model.rounds, list(ids), model.w, model.buffers, {}, states)
    results = workspace().map(
        _tune,
        (tuning, measure_models),
        cohorts,
        name=lambda cohort: f"{run}: clients {', '.join(map(str, cohort.ids))}",
        epochs=list(stops),
    )
    return [value for values in results for value in values]


def _tune(
    shared: tuple[Setup, Callable[[TunedModels], T]], cohort: Cohort, epochs: Sequence[int]
) -> list[T]:
    tuning, measure_models = shared
    uploads = tuning.train(cohort).uploads
    return [
        measure_models(
            TunedModels(
                e,
                cohort.ids,
                uploads[f"{e}"],
                {name: uploads[f"{e}/{name}"] for name in cohort.buffers},
            )
        )
        for e in epochs
    ]


class EpochSchedule:
    """Minibatches of fine-tuning: an epoch is ``steps(n, train)`` of them, or one pass over the n examples."""

    def __init__(
        self, config: Config, epochs: int, steps: Callable[[int, TrainSection], int] | None
    ):
        train = config.train
        self.config, self.epochs, self.steps = config, epochs, steps
        self.passes = Seeded(config.seed, 0, 0, 1, train.batch_size, train.drop_last)

    def _pass_steps(self, n: int) -> int:
        size = self.config.train.batch_size
        return n // size if self.config.train.drop_last else math.ceil(n / size)

    def count(self, epochs: int, n: int) -> int:
        """Local steps of so many epochs."""
        steps = self._pass_steps(n)
        return epochs * (self.steps(n, self.config.train) if self.steps and steps else steps)

    def batches(self, t: int, client: int, n: int) -> Batches:
        count = self.count(self.epochs, n)
        passes = math.ceil(count / max(self._pass_steps(n), 1))
        return replace(self.passes, epochs=passes).batches(t, client, n)[:count]


class Snapshots(Part):
    """Uploads each client's weights and batch-norm statistics after ``stops[e][client]`` local steps, for every e."""

    def __init__(self, stops: dict[int, dict[int, int]]):
        self.stops = stops

    def begin(self, local: Local) -> None:
        self.s = 0
        self.models = {
            e: (local.w.clone(), {n: b.clone() for n, b in local.buffers.items()})
            for e in self.stops
        }

    def batch(self, step: Step) -> None:
        self._copy(step.local, [self.s] * step.k)
        self.s += 1

    def finish(self, local: Local) -> dict[str, Tensor]:
        self._copy(local, local.steps.tolist())
        uploads = {}
        for e, (w, buffers) in self.models.items():
            uploads[f"{e}"] = w
            uploads |= {f"{e}/{n}": b for n, b in buffers.items()}
        return uploads

    def _copy(self, local: Local, done: list[int]) -> None:
        for e, (w, buffers) in self.models.items():
            for j, steps in enumerate(done):
                if steps and self.stops[e][local.ids[j]] == steps:
                    w[j] = local.w[j]
                    for name, rows in local.buffers.items():
                        buffers[name][j] = rows[j]


# -- testing


class Predictor:
    """Counts what a client's model gets right on its own test examples."""

    def __init__(self, setup: Setup, neighbours: Neighbours | None, seed: int):
        self.network, self.dataset, self.parts = setup.network, setup.dataset, setup.parts
        self.neighbours, self.seed = neighbours, seed

    def counts(self, models: TunedModels) -> list[tuple[int, int, int, int]]:
        """(e, client, right, n) of every client of a cohort."""
        return [
            (models.e, i, *self(w, {n: b[j] for n, b in models.buffers.items()}, i))
            for j, (i, w) in enumerate(zip(models.ids, models.rows, strict=True))
        ]

    def __call__(self, w: Tensor, buffers: dict[str, Tensor], client: int) -> tuple[int, int]:
        """(right, n) for weights [P] on the client's n test examples; a prediction that is not finite is wrong."""
        data, part = self.dataset, torch.as_tensor(self.parts[client])
        if not len(part):
            return 0, 0
        index = torch.from_numpy(slices.personal_test(data.train_y[part], data.test_y, client))
        if not len(index):
            return 0, 0
        scores, features = self.outputs(w, buffers, data.test_x[index])
        if self.neighbours is not None:
            examples = part[self.store(client, len(part))]
            _, store = self.outputs(w, buffers, data.train_x[examples])
            labels = data.train_y[examples].to(w.device)
            scores = mix(scores, features, store, labels, self.neighbours)
        y = data.test_y[index].to(w.device)
        return int(((scores.argmax(-1) == y) & scores.isfinite().all(-1)).sum()), len(index)

    def store(self, client: int, n: int) -> np.ndarray:
        """Positions of the training examples in the client's store: a random subset of its capacity, sorted."""
        capacity = min(self.neighbours.capacity, n) if self.neighbours else n
        return np.sort(
            numpy_rng(self.seed, "neighbours", client).choice(n, capacity, replace=False)
        )

    def outputs(self, w: Tensor, buffers: dict[str, Tensor], raw: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, C] and, where neighbours are asked for, features [n, d] (else none), in eval mode."""
        logits, features = [], [torch.empty(0, device=w.device)]
        with torch.no_grad():
            bound = self.network.bind(
                w.unsqueeze(0), {k: b.unsqueeze(0).clone() for k, b in buffers.items()}
            )
            for chunk in raw.split(BATCH):
                x = ready(self.dataset.normalise(chunk), w.device, w.dtype).unsqueeze(0)
                if self.neighbours is None:
                    logits.append(bound(x)[0])
                    continue
                z = bound.features(x)
                logits.append(bound.head(z)[0])
                features.append(z[0].flatten(1).to(w.dtype))
        return torch.cat(logits), torch.cat(features[1:] or features)


def mix(logits: Tensor, features: Tensor, store: Tensor, labels: Tensor, n: Neighbours) -> Tensor:
    """weight p_knn + (1 - weight) p_model, [n, C], from features [n, d], stored features [m, d] and labels [m]."""
    d2 = torch.cdist(features, store, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest, index = d2.topk(min(n.k, len(store)), largest=False)
    # s_j / sum s is a softmax, which does not underflow where every neighbour is far
    votes = torch.softmax(-nearest / (features.shape[1] * n.scale), dim=-1)
    p_knn = torch.zeros_like(logits).scatter_add_(1, labels[index], votes.to(logits.dtype))
    model = logits if n.logits else torch.softmax(logits, dim=-1)
    return n.weight * p_knn + (1 - n.weight) * model
