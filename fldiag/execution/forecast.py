"""How long units take wherever work runs, from their seconds one after the other."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fldiag.clock import duration
from fldiag.execution.choice import Choice, cores

#: Seconds until a worker process is there: it imports PyTorch.
START = 4.0
#: Another executor is named when it takes less than this share of the time, and saves at least so many seconds.
WORTH, SAVED = 0.85, 30.0


def workers(choice: Choice, threads: int | None = None) -> int | None:
    """How many units are done at a time; None where only a cluster or somebody's own executor knows."""
    if choice.kind == "serial":
        return 1
    return None if choice.address or choice.given is not None else choice.workers or cores(threads)


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
    """Phases of units, each begun when the one before is done; workers start once. All the work where only a cluster knows how
    much it does at a time.

    >>> total([[3, 1], [2, 2]], 1), total([[3, 1], [2, 2]], 2)
    (8, 9.0)
    """
    if at_a_time in (None, 1):
        return sum(map(sum, phases))
    return sum(wall(seconds, at_a_time) for seconds in phases) + START


class Faster(NamedTuple):
    """An executor of this machine that takes clearly less, its seconds, and PyTorch's threads of each of its workers."""

    executor: str
    seconds: float
    threads: int

    def said(self, now: float) -> str:
        """For the terminal; ``now``: the seconds without it."""
        import torch  # only here: an executor is looked at without it

        with_ = (
            ""
            if self.threads == torch.get_num_threads()
            else f"with OMP_NUM_THREADS={self.threads} in the environment, "
        )
        return f"{with_}--executor {self.executor}: {duration(self.seconds)} instead of {duration(now)}"


def faster(
    phases: Sequence[Sequence[float]], now: float, threads: int | None = None
) -> Faster | None:
    """Where one of this machine is clearly faster than ``now``. ``phases``: see ``total``, with so many threads (by default as
    many as here)."""
    import torch

    there = min(cores(threads), max(map(len, phases), default=0))
    then = total(phases, there) if there > 1 else now
    if then >= WORTH * now or now - then <= SAVED:
        return None
    return Faster(f"processes:{there}", then, threads or torch.get_num_threads())
