"""How long a config trains on this machine, and what it stores: two local steps are timed, and nothing is written."""

from __future__ import annotations

import time
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch

from fldiag.config import Config, checked
from fldiag.execution.choice import chosen
from fldiag.execution.forecast import Faster, faster, total, workers
from fldiag.execution.threads import threads
from fldiag.training import held
from fldiag.training.setup import Setup, Unit

#: A local step that takes longer, in seconds, is timed once.
SLOW = 2.0


@dataclass(frozen=True)
class Forecast:
    """``seconds`` with the executor, ``at_a_time`` units at a time (None: a cluster knows), and ``serial_seconds`` one after the
    other; ``one_thread_seconds``: the same with one thread of PyTorch's, where there are more now; ``bytes`` on the disk at the
    end. ``parameters`` of the model; ``clients`` a round, ``stacked`` or not. ``faster``: an executor of this machine that takes
    clearly less. ``kept``: whose weights the checkpoints hold. ``remarks``: what to know before."""

    seconds: float
    serial_seconds: float
    one_thread_seconds: float | None
    executor: str
    at_a_time: int | None
    bytes: int
    parameters: int
    clients: int
    stacked: bool
    faster: Faster | None
    kept: str
    remarks: list[str]


def forecast(config: Config, *, executor: str | Executor = "serial", device: str = "auto", download: bool = False) -> Forecast:
    """How long ``train`` would take here, and how much it would store.

    Args:
        config: what would be trained. Data that are not there are replaced by blank ones of their size, which is remarked.
        executor: as of ``train``.
        device: as of ``train``.
        download: fetch a missing public data set.

    Returns:
        Seconds, bytes and what to know before.

    Raises:
        FldiagError: a wrong config, or what is none.

    >>> import fldiag
    >>> found = fldiag.forecast(fldiag.Config.load("digits", model__name="mlp"))
    >>> found.seconds > 0, found.clients
    (True, 10)
    """
    setup = Setup(checked(config), device=device, download=download, rehearsal=True)
    ids = sorted(setup.schedule.sampled(0))
    zero = {i: setup.method.client_init(setup.initial()) for i in ids}
    server = setup.method.server_init(setup.initial())
    units = setup.units(0, ids, setup.initial(), {n: b.clone() for n, b in setup.network.buffers.items()},
                        {n: server[n] for n in setup.method.sent if n in server}, zero if next(iter(zero.values())) else {})
    step, choice = _per_step(setup, units[0]), chosen(executor)
    steps = [float(max((len(b) for b in u.batches), default=0)) for u in units]
    alone = _on_one_thread(setup, units[0])

    def phases(of_a_step: float) -> list[list[float]]:
        return [[of_a_step * n for n in steps]] * config.rounds

    at_a_time = workers(choice)
    seconds = total(phases(step), at_a_time)
    better = None if at_a_time is None else faster(phases(step), seconds) or (
        faster(phases(alone), seconds, 1) if alone is not None else None)
    size, state = setup.model_bytes, len(server) + config.clients.total * len(zero[ids[0]]) + 1
    disk = size * (held.stored_rounds(config) + state) + held.bytes_of_clients(config, size)
    return Forecast(seconds, total(phases(step), 1), None if alone is None else total(phases(alone), 1), str(choice), at_a_time,
                    disk, setup.network.size, len(ids), setup.stack, better, held.described(config, size), setup.remarks)


def _on_one_thread(setup: Setup, unit: Unit) -> float | None:
    """Seconds of a local step with one thread, as workers have it that share the cores; None where that is so anyway."""
    if torch.get_num_threads() == 1 or setup.device.type != "cpu":
        return None
    with threads(1):
        return _per_step(setup, unit)


def _per_step(setup: Setup, unit: Unit) -> float:
    """Seconds of a local step: timed when it is warm, unless one alone takes so long that the warming does not count."""
    for steps in (1, 3):
        trial = replace(unit, batches=[b[:steps] for b in unit.batches])
        began = time.perf_counter()
        setup.train(trial)
        found = (time.perf_counter() - began) / max(1, max(map(len, trial.batches)))
        if found > SLOW:
            break
    return found
