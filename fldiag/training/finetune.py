"""Fine-tuning: every client trains a model of its own from the final one, by the same local loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fldiag.config import Config
from fldiag.execution.pools import open_pool
from fldiag.local import Local
from fldiag.method import Method, Part, Personal
from fldiag.registry import Progress
from fldiag.results.kept_units import KeptUnits
from fldiag.sections import Train
from fldiag.seeding import seed_for
from fldiag.step import Step
from fldiag.training.schedule import Batches, Seeded
from fldiag.training.setup import Setup, Unit


@dataclass
class Models:
    """Models of a cohort's clients after e epochs of fine-tuning."""

    e: int
    ids: list[int]
    rows: Tensor  # [K, P]
    buffers: dict[str, Tensor]  # name -> [K, ...]


def tuned(
    setup: Setup,
    plan: Personal,
    w: Tensor,
    buffers: dict[str, Tensor],
    states: Mapping[int, dict[str, Tensor]],
    rounds: int,
    ids: Sequence[int],
    seed: int,
    look: Callable[[Models], Any],
    executor: Any = "serial",
    kept: KeptUnits | None = None,
    run: str = "",
    progress: Progress | None = None,
) -> list[Any]:
    """What ``look`` finds in the clients' models, cohort by cohort, e by e: one training of max(epochs) epochs, looked at on the
    way. ``kept``: what was found of finished cohorts; they are told apart by their clients and ``run``."""
    config = setup.config.replace(seed=seed_for(seed, "fine-tuning"))
    config = config.replace(train__lr_decay=1.0) if plan.lr == "initial" else config
    config = config.replace(
        train__local_decay=1.0, train__local_decay_after=0.5
    )  # a schedule of a round's epochs
    schedule = Epochs(config, max(plan.epochs), plan.steps)
    stops = {
        e: {i: schedule.count(e, int(setup.sizes[i])) for i in ids}
        for e in sorted(set(plan.epochs))
    }
    method = plan.method or Method()
    worker = copy.copy(setup)
    worker.config, worker.schedule, worker.method = config, schedule, Method(*method, Stops(stops))  # type: ignore[assignment]
    initial = method.client_init(setup.initial())
    needed = (
        {i: {name: states.get(i, initial)[name] for name in initial} for i in ids}
        if initial
        else {}
    )
    units = worker.units(rounds, list(ids), w, buffers, {}, needed)

    def looked(unit: Unit, uploads: dict[str, Tensor]) -> list[Any]:
        return [
            look(
                Models(
                    e, unit.ids, uploads[f"{e}"], {name: uploads[f"{e}/{name}"] for name in buffers}
                )
            )
            for e in stops
        ]

    def name(unit: Unit) -> str:
        return f"{run}: clients {', '.join(map(str, unit.ids))}"

    def tell(done: int, total: int, text: str) -> None:
        if progress:
            progress(done, total, "groups of clients")

    tell(0, len(units), "")
    with open_pool(executor, _uploads, worker, name=_name, most=len(units)) as pool:
        each = (kept or KeptUnits(None, str)).results(pool, units, tell, looked, name)
    return [found for cohort in each for found in cohort]


def _uploads(worker: Setup, unit: Unit) -> dict[str, Tensor]:
    return worker.train(unit).uploads


def _name(unit: Unit) -> str:
    return f"fine-tuning of clients {', '.join(map(str, unit.ids[:5]))}{', …' if len(unit.ids) > 5 else ''}"


class Epochs:
    """Minibatches of fine-tuning: an epoch is ``steps(n, train)`` of them, or one pass over the n examples."""

    def __init__(self, config: Config, epochs: int, steps: Callable[[int, Train], int] | None):
        train = config.train
        self.config, self.epochs, self.steps = config, epochs, steps
        self.passes = Seeded(config.seed, 0, 0, 1, train.batch_size, train.drop_last)

    def _pass(self, n: int) -> int:
        size = self.config.train.batch_size
        return n // size if self.config.train.drop_last else math.ceil(n / size)

    def count(self, epochs: int, n: int) -> int:
        """Local steps of so many epochs."""
        a_pass = self._pass(n)
        return epochs * (self.steps(n, self.config.train) if self.steps and a_pass else a_pass)

    def batches(self, t: int, client: int, n: int) -> Batches:
        wanted = self.count(self.epochs, n)
        passes = math.ceil(wanted / max(self._pass(n), 1))
        return replace(self.passes, epochs=passes).batches(t, client, n)[:wanted]


class Stops(Part):
    """Keeps each client's weights and batch-norm statistics after ``at[e][client]`` local steps, for every e."""

    def __init__(self, at: dict[int, dict[int, int]]):
        self.at = at

    def begin(self, local: Local) -> None:
        self.s = 0
        self.kept = {
            e: (local.w.clone(), {n: b.clone() for n, b in local.buffers.items()}) for e in self.at
        }

    def batch(self, step: Step) -> None:
        self._keep(step.local, [self.s] * step.k)
        self.s += 1

    def finish(self, local: Local) -> dict[str, Tensor]:
        self._keep(local, local.steps.tolist())
        uploads = {f"{e}": w for e, (w, _) in self.kept.items()}
        return uploads | {
            f"{e}/{n}": b for e, (_, buffers) in self.kept.items() for n, b in buffers.items()
        }

    def _keep(self, local: Local, done: list[int]) -> None:
        for e, (w, buffers) in self.kept.items():
            for j, steps in enumerate(done):
                if steps and self.at[e][local.ids[j]] == steps:
                    w[j] = local.w[j]
                    for name, rows in local.buffers.items():
                        buffers[name][j] = rows[j]
