"""How long a config trains on this machine, and what it stores: a few local steps are timed, and nothing is written."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from fldiag.config import Config, check_config
from fldiag.device import full_precision
from fldiag.errors import duration
from fldiag.execution.executor import parse_executor
from fldiag.training.server import Federation
from fldiag.training.setup import Cohort, Setup
from fldiag.training.storing import client_bytes, count_checkpoints, describe_clients

#: Public inputs with which a rehearsal makes do: a minibatch of them, for the methods whose clients learn from them.
PUBLIC = 256
#: A local step that takes longer, in seconds, is timed once.
SLOW = 2.0
#: Seconds until a worker process is there: it imports PyTorch.
START = 4.0


@dataclass(frozen=True)
class Forecast:
    """How long a training takes and how much it stores.

    ``seconds`` with the executor, ``at_a_time`` units at a time (None: a cluster knows), and
    ``serial_seconds`` one after the other; ``bytes`` on the disk at the end. ``parameters`` of the
    model; ``clients`` a round, ``stacked`` or not. ``kept``: whose weights the checkpoints hold.
    ``remarks``: what to know before.
    """

    seconds: float
    serial_seconds: float
    executor: str
    at_a_time: int | None
    bytes: int
    parameters: int
    clients: int
    stacked: bool
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
    >>> forecast = fldiag.forecast(fldiag.Config.load("digits", model__name="mlp"))
    >>> forecast.seconds > 0, forecast.clients
    (True, 10)
    """
    setup = Setup(check_config(config), device=device, download=download, rehearsal=True)
    federation = Federation(setup)
    states = (
        len(federation.state)
        + config.clients.total * len(setup.method.client_init(federation.w))
        + 1
    )
    units = _cohorts(federation)
    step, spec = _time_step(setup, units[0]), parse_executor(executor)
    steps = [max((len(b) for b in unit.batches), default=0) for unit in units]
    rounds = [[step * count for count in steps]] * config.rounds
    at_a_time = spec.workers_here()
    size = setup.model_bytes
    disk = size * (count_checkpoints(config) + states) + client_bytes(config, size)
    return Forecast(
        seconds=total(rounds, at_a_time),
        serial_seconds=total(rounds, 1),
        executor=str(spec),
        at_a_time=at_a_time,
        bytes=disk,
        parameters=setup.network.size,
        clients=sum(len(unit.ids) for unit in units),
        stacked=setup.stack,
        kept=describe_clients(config, size),
        remarks=setup.remarks,
    )


def wall(seconds: Sequence[float], at_a_time: int) -> float:
    """Until the last unit is done, each given to whoever is free, the longest first.

    >>> wall([3, 3, 2, 2, 2], 2)
    7.0
    """
    free = [0.0] * at_a_time
    for each in sorted(seconds, reverse=True):
        heapq.heappush(free, heapq.heappop(free) + each)
    return max(free)


def total(phases: Iterable[Sequence[float]], at_a_time: int | None) -> float:
    """Seconds of phases of units, each begun when the one before is done; workers start once.

    All the work where only a cluster knows how much it does ``at_a_time``.

    >>> total([[3, 1], [2, 2]], 1), total([[3, 1], [2, 2]], 2)
    (8, 9.0)
    """
    if at_a_time in (None, 1):
        return sum(map(sum, phases))
    return sum(wall(seconds, at_a_time) for seconds in phases) + START


def speed_words(at_a_time: int | None, executor: str, serial_seconds: float) -> str:
    """What the seconds of a forecast are seconds of."""
    if at_a_time is None:
        return f"of work for {executor}, by the speed of this machine"
    if at_a_time == 1:
        return "of local training on this machine"
    return (
        f"of local training with {at_a_time} at a time on this machine "
        f"({duration(serial_seconds)} of work)"
    )


def _cohorts(federation: Federation) -> list[Cohort]:
    """The local work of a round in the middle of the training: some methods begin late, and those that learn from a teacher
    have none before the first round, which is tried with few public inputs."""
    setup = federation.setup
    federation.t = setup.config.rounds // 2
    if setup.public is not None:
        setup.public = setup.public[:PUBLIC]
        federation.round(lambda units: [setup.train(_shorten(unit, 1)) for unit in units])
    return federation.cohorts(sorted(setup.schedule.sampled(federation.t)))


def _shorten(unit: Cohort, steps: int) -> Cohort:
    return replace(unit, batches=[b[:steps] for b in unit.batches])


@full_precision()
def _time_step(setup: Setup, unit: Cohort) -> float:
    """Seconds of a local step when it is warm; a slow one is timed once, cold."""
    for steps in (1, 3):
        trial = _shorten(unit, steps)
        start = time.perf_counter()
        setup.train(trial)
        seconds = (time.perf_counter() - start) / max(1, max(map(len, trial.batches)))
        if seconds > SLOW:
            break
    return seconds
