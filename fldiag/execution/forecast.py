"""How long units take wherever work runs, from their seconds one after the other."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

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


def faster(seconds: Sequence[float], repeats: int, now: float, threads: int | None = None) -> tuple[str, float] | None:
    """(executor, its seconds) where one of this machine is clearly faster than ``now``; units are done ``repeats`` times."""
    there = min(cores(threads), len(seconds))
    then = wall(seconds, there) * repeats + START
    return (f"processes:{there}", then) if there > 1 and then < WORTH * now and now - then > SAVED else None
