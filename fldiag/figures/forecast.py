"""How long and how much disk the missing runs take here: a step of every kind is timed, nothing is written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fldiag.errors import FldiagError
from fldiag.figures.plan import Plan, Task
from fldiag.figures.workers import one_thread
from fldiag.training.setup import Setup

#: Rough cost of a question in gradients of its slice, for one model (times the clients where it looks at each).
GRADIENTS = {"spectrum": 60, "landscape": 140, "matching": 30, "drift": 3, "forgetting": 1,
             "personal": 0}


#: Seconds of a step from which on the first is timed, without one before it to warm up.
LONG = 0.5


@dataclass
class Forecast:
    """``seconds``: on one core; ``bytes``: at the end; ``unknown``: tasks whose kind cannot be timed, and why."""

    runs: int
    there: int
    rounds: int
    seconds: float
    bytes: float
    unknown: dict[str, str]

    def hours(self, jobs: int) -> float:
        return self.seconds / jobs / 3600


def forecast(plan: Plan, download: bool = False, progress: Callable[[int, int, str], None] | None = None) -> Forecast:
    """The forecast of what ``make`` would train; runs that are there count nothing."""
    todo = [t for t in plan.tasks.values() if not t.done(t.where(plan.store))]
    kinds: dict[tuple[Any, ...], tuple[float, int, int, int]] = {}
    found = Forecast(len(plan.tasks), len(plan.tasks) - len(todo), sum(t.config.rounds for t in todo), 0.0, 0.0, {})
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
        step, size, train, test = kinds[kind]
        found.seconds += _seconds(task, plan, step, train, test)
        clients = c.clients.per_round if c.checkpoint.clients != "none" else 0
        kept = len(task.rounds) or 1
        found.bytes += 4 * size * (kept * (1 + (1 + clients if clients else 0)) + 2)
    return found


def _step(task: Task, download: bool) -> tuple[float, int, int, int]:
    """Seconds of a local step, parameters, training and test examples."""
    setup = Setup(task.config, download=download)
    ids = sorted(setup.schedule.sampled(0)) or [0]
    ids = ids[:1] if not setup.stack else ids
    zero = {i: setup.method.client_init(setup.initial()) for i in ids}
    server = setup.method.server_init(setup.initial())
    unit = setup.units(0, ids, setup.initial(), {n: b.clone() for n, b in setup.network.buffers.items()},
                       {n: server[n] for n in setup.method.sent if n in server}, zero if next(iter(zero.values())) else {})[0]
    unit.batches = [b[:1] for b in unit.batches]
    steps = max(1, sum(len(b) for b in unit.batches))
    for _ in range(2):
        began = time.process_time()  # one thread's work, whatever else the machine is doing
        setup.train(unit)
        taken = time.process_time() - began
        if taken > LONG:
            break
    return (taken / steps, setup.network.size, sum(map(len, setup.parts)),
            len(setup.dataset.test_y))


def _seconds(task: Task, plan: Plan, step: float, train: int, test: int) -> float:
    c = task.config
    example = step / c.train.batch_size
    local = train / c.clients.total * c.train.epochs * c.clients.per_round
    total = c.rounds * (local + test / 3) * example
    for ask in task.asks.values():
        options = plan.scale.options(ask)
        n = options.get("samples") or train
        models = c.clients.per_round + 1 if ask.name == "matching" else 1
        models *= len(task.rounds) * c.clients.per_round if ask.needs == "rounds" else 1
        total += GRADIENTS.get(ask.name, 0) * models * n * example
        if ask.name == "personal":
            total += max(options["epochs"]) * train * example
    return total


def machine_words() -> str:
    from fldiag.results.machine import machine

    return f"{machine()}, torch {torch.__version__}"
