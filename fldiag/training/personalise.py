"""After the last round: every client makes a model of its own and is tested on its own mixture of classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fldiag.checkpoint.run import Run
from fldiag.data import slices
from fldiag.data.arrays import ready
from fldiag.errors import FldiagError
from fldiag.method import Neighbours, Personal
from fldiag.registry import Progress
from fldiag.results.kept_units import KeptUnits
from fldiag.results.shares import share
from fldiag.results.table import PERSONAL, check, table
from fldiag.seeding import numpy_rng
from fldiag.training.evaluate import BATCH
from fldiag.training.finetune import Models, tuned
from fldiag.training.setup import Setup
from fldiag.training.setup_of_run import weights

#: Epochs of fine-tuning when neither the caller nor the method says so.
EPOCHS = (0, 1, 5)
#: Fine-tuning for longer is a slip of the pen.
MOST_EPOCHS = 10_000
#: What tests a client: test examples in the proportions of its training labels, or all of the classes it has.
TESTS = {"test": slices.personal_test, "own": slices.own_classes}


def of_run(
    run: Run,
    setup: Setup,
    *,
    epochs: Sequence[int] | None = None,
    lr: Literal["decayed", "initial"] | None = None,
    neighbours: Neighbours | None = None,
    clients: Sequence[int] | None = None,
    test: str = "test",
    seed: int | None = None,
    executor: Any = "serial",
    progress: Progress | None = None,
    kept: KeptUnits | None = None,
) -> pd.DataFrame:
    """The table of the diagnostic ``personalise``, of one run and its setup. ``neighbours``: mix the prediction with that of the
    nearest training examples. ``kept``: what finished clients got right.

    Raises FldiagError for data without classes, wrong epochs or clients, and neighbours without features.
    """
    plan = setup.method.personal or Personal(EPOCHS)
    plan = replace(
        plan,
        epochs=_epochs(plan.epochs if epochs is None else epochs),
        lr=lr or plan.lr,
        neighbours=neighbours or plan.neighbours,
    )
    check_plan(setup, plan)
    total, seed = len(setup.parts), run.config.seed if seed is None else seed
    ids = sorted({int(i) for i in (range(total) if clients is None else clients)})
    if not ids or not all(0 <= i < total for i in ids):
        raise FldiagError(
            f"clients {ids} are not among the run's 0..{total - 1}",
            "name some of those",
            usage=True,
        )
    w, buffers = weights(run, setup)
    states = run.states if plan.method and plan.method.client_init(w) else {}
    rows = measure(
        setup,
        plan,
        w,
        buffers,
        states,
        run.done,
        ids=ids,
        test=test,
        seed=seed,
        executor=executor,
        progress=progress,
        kept=kept,
        run=run.name,
    )
    return check(table(rows, **run.common))


def planned(setup: Setup) -> Personal | None:
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


def measure(
    setup: Setup,
    plan: Personal,
    w: Tensor,
    buffers: dict[str, Tensor],
    states: Mapping[int, dict[str, Tensor]],
    rounds: int,
    *,
    ids: Sequence[int] | None = None,
    test: str = "test",
    seed: int | None = None,
    executor: Any = "serial",
    progress: Progress | None = None,
    kept: KeptUnits | None = None,
    run: str = "",
) -> list[dict[str, Any]]:
    """Rows of the result table after ``rounds`` rounds of training.

    ``w`` [P], ``buffers``: the global model. ``states``: of the clients that have trained, where the plan's method
    reads them.
    """
    ids = range(len(setup.parts)) if ids is None else ids
    seed = setup.config.seed if seed is None else seed
    predict = Predictor(setup, plan.neighbours, test, seed)

    def right(models: Models) -> list[tuple[int, int, int, int]]:
        """(e, client, right, n) of each."""
        return [
            (
                models.e,
                i,
                *predict(models.rows[j], {name: b[j] for name, b in models.buffers.items()}, i),
            )
            for j, i in enumerate(models.ids)
        ]

    found = tuned(
        setup, plan, w, buffers, states, rounds, ids, seed, right, executor, kept, run, progress
    )
    rows = [
        {
            "scope": "client",
            "client": i,
            "slice": f"client:{i}/{test}",
            "metric": PERSONAL,
            "index": e,
            **_share(correct, n),
        }
        for each in found
        for e, i, correct, n in each
    ]
    rows.sort(key=lambda row: (row["index"], row["client"]))
    rows += [
        row
        for e in sorted(plan.epochs)
        for row in _summary([r for r in rows if r["index"] == e], e, test)
    ]
    common = {
        "round": rounds,
        "moment": "trained",
        "estimator": "exact",
        **(
            {"prediction": "model"}
            if plan.neighbours is None
            else {"prediction": "model and neighbours", "voters": plan.neighbours.described}
        ),
    }
    return [{**common, **row} for row in rows]


def _share(correct: int, n: int) -> dict[str, Any]:
    """Accuracy with its binomial standard error and Wilson's 95 % interval."""
    return {**share(correct, n), "n_examples": n} if n else {"n_examples": 0}


def _summary(rows: list[dict[str, Any]], e: int, test: str) -> list[dict[str, Any]]:
    values = np.array([row["value"] for row in rows if row["n_examples"]])
    if not len(values):
        return []
    common = {
        "scope": "global",
        "slice": f"clients/{test}",
        "index": e,
        "n_examples": sum(row["n_examples"] for row in rows),
    }
    stderr = (
        {"stderr": float(values.std(ddof=1) / math.sqrt(len(values)))} if len(values) > 1 else {}
    )
    return [
        {**common, "metric": PERSONAL, "value": float(values.mean()), **stderr},
        {**common, "metric": f"{PERSONAL}_std", "value": float(values.std())},
    ]


class Predictor:
    """Counts what a client's model gets right on its own test examples."""

    def __init__(self, setup: Setup, neighbours: Neighbours | None, test: str, seed: int):
        self.setup, self.neighbours, self.test, self.seed = setup, neighbours, test, seed

    def __call__(self, w: Tensor, buffers: dict[str, Tensor], client: int) -> tuple[int, int]:
        """(right, n) for weights [P] on the client's n test examples; a prediction that is not finite is wrong."""
        data, part = self.setup.dataset, torch.as_tensor(self.setup.parts[client])
        if not len(part):
            return 0, 0
        index = torch.from_numpy(TESTS[self.test](data.train_y[part], data.test_y, client))
        if not len(index):
            return 0, 0
        scores, features = self.outputs(w, buffers, data.test_x[index])
        if self.neighbours is not None:
            kept = part[self.store(client, len(part))]
            labels = data.train_y[kept].to(w.device)
            scores = mix(
                scores,
                features,
                self.outputs(w, buffers, data.train_x[kept])[1],
                labels,
                self.neighbours,
            )
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
            bound = self.setup.network.bind(
                w.unsqueeze(0), {k: b.unsqueeze(0).clone() for k, b in buffers.items()}
            )
            for chunk in raw.split(BATCH):
                x = ready(self.setup.dataset.normalise(chunk), w.device, w.dtype).unsqueeze(0)
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
    nearest, where = d2.topk(min(n.k, len(store)), largest=False)
    # s_j / sum s is a softmax, which does not underflow where every neighbour is far
    votes = torch.softmax(-nearest / (features.shape[1] * n.scale), dim=-1)
    p_knn = torch.zeros_like(logits).scatter_add_(1, labels[where], votes.to(logits.dtype))
    model = logits if n.logits else torch.softmax(logits, dim=-1)
    return n.weight * p_knn + (1 - n.weight) * model


def _epochs(epochs: Sequence[int]) -> tuple[int, ...]:
    found = tuple(epochs)
    if not found or not all(
        isinstance(e, int | np.integer) and not isinstance(e, bool) and e >= 0 for e in found
    ):
        raise FldiagError(
            f"epochs = {list(found)}",
            "give whole numbers of at least 0, such as 0, 1 and 5",
            usage=True,
        )
    if max(found) > MOST_EPOCHS:
        raise FldiagError(f"epochs = {max(found):,}", f"give at most {MOST_EPOCHS:,}", usage=True)
    return tuple(sorted({int(e) for e in found}))
