"""How long a config trains on this machine, and what it stores: a few local steps are timed, and nothing is written."""

from __future__ import annotations

import time
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch

from fldiag.config import Config, checked
from fldiag.execution.choice import chosen
from fldiag.execution.forecast import Faster, faster, total, workers
from fldiag.execution.threads import threads
from fldiag.training.server import Federation
from fldiag.training.setup import Cohort, Setup
from fldiag.training.storing import client_bytes, count_checkpoints, describe_clients

#: Public inputs with which a rehearsal makes do: a minibatch of them, for the methods whose clients learn from them.
PUBLIC = 256
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


def forecast(
    config: Config,
    *,
    executor: str | Executor = "serial",
    device: str = "auto",
    download: bool = False,
) -> Forecast:
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
    federation = Federation(setup)
    states = (
        len(federation.state)
        + config.clients.total * len(setup.method.client_init(federation.w))
        + 1
    )
    units = _units(federation)
    step, choice = _per_step(setup, units[0]), chosen(executor)
    steps = [float(max((len(b) for b in u.batches), default=0)) for u in units]
    alone = _on_one_thread(setup, units[0])

    def phases(of_a_step: float) -> list[list[float]]:
        return [[of_a_step * n for n in steps]] * config.rounds

    at_a_time = workers(choice)
    seconds = total(phases(step), at_a_time)
    better = (
        None
        if at_a_time is None
        else faster(phases(step), seconds)
        or (faster(phases(alone), seconds, 1) if alone is not None else None)
    )
    size, clients = setup.model_bytes, sum(len(unit.ids) for unit in units)
    disk = size * (count_checkpoints(config) + states) + client_bytes(config, size)
    return Forecast(
        seconds,
        total(phases(step), 1),
        None if alone is None else total(phases(alone), 1),
        str(choice),
        at_a_time,
        disk,
        setup.network.size,
        clients,
        setup.stack,
        better,
        describe_clients(config, size),
        setup.remarks,
    )


def _on_one_thread(setup: Setup, unit: Cohort) -> float | None:
    """Seconds of a local step with one thread, as workers have it that share the cores; None where that is so anyway."""
    if torch.get_num_threads() == 1 or setup.device.type != "cpu":
        return None
    with threads(1):
        return _per_step(setup, unit)


def _units(federation: Federation) -> list[Cohort]:
    """The local work of a round in the middle of the training: some methods begin late, and those that learn from a teacher
    have none before the first round, which is tried with few public inputs."""
    setup = federation.setup
    federation.t = setup.config.rounds // 2
    if setup.public is not None:
        setup.public = setup.public[:PUBLIC]
        federation.round(lambda units: [setup.train(_begun(unit, 1)) for unit in units])
    return federation.cohorts(sorted(setup.schedule.sampled(federation.t)))


def _begun(unit: Cohort, steps: int) -> Cohort:
    return replace(unit, batches=[b[:steps] for b in unit.batches])


def _per_step(setup: Setup, unit: Cohort) -> float:
    """Seconds of a local step: timed when it is warm, unless one alone takes so long that the warming does not count."""
    for steps in (1, 3):
        trial = _begun(unit, steps)
        began = time.perf_counter()
        setup.train(trial)
        found = (time.perf_counter() - began) / max(1, max(map(len, trial.batches)))
        if found > SLOW:
            break
    return found
