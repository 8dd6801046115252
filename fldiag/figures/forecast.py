"""How long and how much disk the missing runs take here: a step of every kind is timed, nothing is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fldiag.errors import FldiagError
from fldiag.execution.forecast import wall
from fldiag.figures.plan import Plan, Task
from fldiag.figures.workers import one_thread
from fldiag.training.federation import Federation
from fldiag.training.setup import Setup

#: Rough cost of a question in gradients of its slice, for one model (times the clients where it looks at each).
GRADIENTS = {"spectrum": 60, "landscape": 140, "matching": 30, "drift": 3, "forgetting": 1,
             "personal": 0}


#: Questions that look at each client with its own examples, not with all.
OF_CLIENTS = ("drift",)
#: Public inputs with which the server's work is timed; it grows with their number.
PUBLIC = 128


@dataclass
class Forecast:
    """``parts``: seconds of each run on one core; ``bytes``: at the end; ``unknown``: tasks that cannot be timed, and why."""

    runs: int
    there: int
    rounds: int
    parts: list[float]
    bytes: float
    unknown: dict[str, str]

    @property
    def seconds(self) -> float:
        """On one core."""
        return sum(self.parts)

    def wall(self, at_a_time: int) -> float:
        """Seconds with so many runs at a time."""
        return wall(self.parts, at_a_time)


def forecast(plan: Plan, download: bool = False, progress: Callable[[int, int, str], None] | None = None) -> Forecast:
    """The forecast of what ``make`` would train; runs that are there count nothing."""
    todo = [t for t in plan.tasks.values() if not t.done(t.where(plan.store))]
    kinds: dict[tuple[Any, ...], Timed] = {}
    found = Forecast(len(plan.tasks), len(plan.tasks) - len(todo), sum(t.config.rounds for t in todo), [], 0.0, {})
    for i, task in enumerate(todo):
        c = task.config
        kind = (c.data.name, c.model.name, c.method.name, c.train.batch_size, c.data.public)
        if progress:
            progress(i, len(todo), f"timing {c.method.name}, {c.model.name}")
        try:
            if kind not in kinds:
                with one_thread():
                    kinds[kind] = _step(task, download)
        except FldiagError as error:
            found.unknown[f"{c.method.name}, {c.model.name} on {c.data.name}"] = error.what
            continue
        timed = kinds[kind]
        found.parts.append(_seconds(task, plan, timed))
        clients = c.clients.per_round if c.checkpoint.clients != "none" else 0
        kept = len(task.rounds) or 1
        found.bytes += 4 * timed.size * (kept * (1 + (1 + clients if clients else 0)) + 2)
    return found


@dataclass(frozen=True)
class Timed:
    """``step``: seconds of a local step; ``server``: of the server's work in a round; ``size``: parameters; ``train``,
    ``test``: examples."""

    step: float
    server: float
    size: int
    train: int
    test: int


def _step(task: Task, download: bool) -> Timed:
    """What a step takes in the middle of the training, where methods that begin late do all they do, and once it is warm."""
    setup = Setup(task.config, download=download)
    if not setup.stack and setup.public is None:  # one client's step is like another's
        setup = Setup(task.config.replace(clients__per_round=1), download=download)
    every = 0 if setup.public is None else len(setup.public)
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
    return Timed(sum(local) / max(1, steps), server * max(1.0, every / PUBLIC) if every else 0.0, setup.network.size,
                 sum(map(len, setup.parts)), len(setup.dataset.test_y))


def _seconds(task: Task, plan: Plan, timed: Timed) -> float:
    c = task.config
    example = timed.step / c.train.batch_size
    local = timed.train / c.clients.total * c.train.epochs * c.clients.per_round
    total = c.rounds * ((local + timed.test / 3) * example + timed.server)
    for ask in task.asks.values():
        options = plan.scale.options(ask)
        n = options.get("samples") or timed.train
        if ask.name in OF_CLIENTS:
            n = min(n, timed.train / c.clients.total)
        models = c.clients.per_round + 1 if ask.name == "matching" else 1
        models *= len(task.rounds) * c.clients.per_round if ask.needs == "rounds" else 1
        total += GRADIENTS.get(ask.name, 0) * models * n * example
        if ask.name == "drift" and options.get("gradients", True):  # the global gradient, once a round
            total += len(task.rounds) * timed.train * example
        if ask.name == "personal":
            total += max(options["epochs"]) * timed.train * example
    return total


def machine_words() -> str:
    from fldiag.results.machine import machine

    return f"{machine()}, torch {torch.__version__}"
