"""How long and how much disk the missing runs take here: a step of every kind is timed, nothing is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fldiag.errors import FldiagError
from fldiag.execution.worker import threads
from fldiag.params import Layout
from fldiag.training.forecast import PUBLIC, wall
from fldiag.training.server import Federation
from fldiag.training.setup import STACK, Setup
from fldiag_papers.plan import Plan, Task, finished


@dataclass
class Forecast:
    """``parts``: seconds of each run on one core; ``bytes``: at the end; ``unknown``: tasks that cannot be timed, and why;
    ``cohorts``: of a single run, how many units its round has for several workers; ``shared``: the seconds of these in all."""

    runs: int
    finished: int
    rounds: int
    parts: list[float]
    bytes: float
    unknown: dict[str, str]
    cohorts: int = 1
    shared: float = 0.0

    @property
    def phases(self) -> list[list[float]]:
        """Seconds of what is done side by side: the runs, or the clients of a single one, after what is not shared out of it."""
        if self.runs - self.finished != 1 or not self.parts:
            return [self.parts]
        return [[self.parts[0] - self.shared], [self.shared / self.cohorts] * self.cohorts]

    @property
    def seconds(self) -> float:
        """On one core."""
        return sum(self.parts)

    def wall(self, at_a_time: int) -> float:
        """Seconds with so many runs at a time, or clients of a single one."""
        return sum(wall(phase, at_a_time) for phase in self.phases)


def forecast(
    plan: Plan, download: bool = False, progress: Callable[[int, int, str], None] | None = None
) -> Forecast:
    """The forecast of what ``make`` would train, without its diagnostics; runs that are there count nothing."""
    todo = [t for t in plan.tasks.values() if not t.done(t.folder(plan.store))]
    kinds: dict[tuple[Any, ...], Timed] = {}
    estimate = Forecast(
        len(plan.tasks),
        len(plan.tasks) - len(todo),
        sum(_rounds(t, plan) for t in todo),
        [],
        0.0,
        {},
    )
    for i, task in enumerate(todo):
        c = task.config
        kind = (c.data.name, c.model.name, c.method.name, c.train.batch_size, c.data.public)
        if progress:
            progress(i, len(todo), f"timing {c.method.name}, {c.model.name}")
        try:
            if kind not in kinds:
                with threads(1):
                    kinds[kind] = _step(task, download)
            timed = kinds[kind]
            estimate.parts.append(_seconds(task, plan, timed))
            estimate.cohorts = 1 if task.timed else -(-c.clients.per_round // timed.cohort)
            estimate.shared = _training(task, plan, timed)
        except FldiagError as error:
            estimate.unknown[f"{c.method.name}, {c.model.name} on {c.data.name}"] = error.what
            continue
        clients = c.clients.per_round if c.checkpoint.clients != "none" else 0
        stored_rounds = len(task.rounds) or 1
        estimate.bytes += (
            4 * timed.layout.size * (stored_rounds * (1 + (1 + clients if clients else 0)) + 2)
        )
    return estimate


@dataclass(frozen=True)
class Timed:
    """``step``: seconds of a local step; ``server``: of the server's work in a round; ``layout``: of the weights; ``train``,
    ``test``: examples; ``cohort``: clients that are trained together."""

    step: float
    server: float
    layout: Layout
    train: int
    test: int
    cohort: int


def _step(task: Task, download: bool) -> Timed:
    """What a step takes in the middle of the training, where methods that begin late do all they do, and once it is warm."""
    setup = Setup(task.config, download=download)
    if not setup.stack and setup.public is None:  # one client's step is like another's
        setup = Setup(task.config.replace(clients__per_round=1), download=download)
    public_examples = 0 if setup.public is None else len(setup.public)
    if setup.public is not None:
        setup.public = setup.public[:PUBLIC]
    federation = Federation(setup)
    federation.t = max(0, task.config.rounds // 2 - 1)
    local: list[float] = []
    steps = 0

    def execute(units: list[Any]) -> Iterator[Any]:
        nonlocal steps
        for unit in units:
            unit.batches = [b[:1] for b in unit.batches]
            steps += sum(map(len, unit.batches))
            began = time.process_time()  # one thread's work, whatever else the machine is doing
            yield setup.train(unit)
            local.append(time.process_time() - began)

    federation.round(execute)  # warms up, and leaves the server's state as a round finds it
    local.clear()
    steps = 0
    began = time.process_time()
    federation.round(execute)
    server = time.process_time() - began - sum(local)
    return Timed(
        sum(local) / max(1, steps),
        server * max(1.0, public_examples / PUBLIC) if public_examples else 0.0,
        setup.network.layout,
        sum(map(len, setup.parts)),
        len(setup.dataset.test_y),
        STACK if setup.stack else 1,
    )


def _training(task: Task, plan: Plan, timed: Timed) -> float:
    """Of the clients and of evaluation, which workers can share."""
    c = task.config
    local = timed.train / c.clients.total * c.train.epochs * c.clients.per_round
    return _rounds(task, plan) * (local + timed.test / 3) * timed.step / c.train.batch_size


def _seconds(task: Task, plan: Plan, timed: Timed) -> float:
    example = timed.step / task.config.train.batch_size
    total = _training(task, plan, timed) + _rounds(task, plan) * timed.server
    for ask in task.asks.values():
        options = plan.scale.options(ask)
        if ask.name == "personal":
            total += max(options["epochs"]) * timed.train * example
    return total


def _rounds(task: Task, plan: Plan) -> int:
    """Rounds to train: none of a run that is there and only asked."""
    return 0 if finished(task.folder(plan.store)) else task.config.rounds


def machine_words() -> str:
    from fldiag.results.machine import machine

    return f"{machine()}, torch {torch.__version__}"
