"""The side of a worker: what it keeps between units, and how it does one."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fldiag.device import full_precision
from fldiag.version import version

#: Works that a worker keeps; a cluster's workers live longer than one command.
MOST_WORKS = 2
#: What a worker answers that lacks the work.
MISSING = "fldiag: state is missing"


@dataclass(frozen=True)
class Work:
    """``function(shared, unit)``. ``threads``: of PyTorch, at every unit that a worker does."""

    function: Callable[[Any, Any], Any]
    shared: Any
    threads: int

    def perform(self, unit: Any) -> Any:
        with full_precision():
            return self.function(self.shared, unit)


_works: OrderedDict[str, Work] = OrderedDict()
_one_at_a_time = threading.Lock()  # PyTorch's random state belongs to the whole process


def keep(key: str, work: Work) -> None:
    _works[key] = work
    while len(_works) > MOST_WORKS:
        _works.popitem(last=False)


def forget(key: str) -> None:
    _works.pop(key, None)


def perform(key: str, unit: Any, work: Work | None = None) -> Any:
    """Do one unit of the work of this key. ``work``: needed once a process; without it the answer may be ``MISSING``."""
    with _one_at_a_time:
        if key in _works:
            _works.move_to_end(key)
        elif work is None:
            return MISSING
        else:
            keep(key, work)
        with threads(_works[key].threads):
            return _works[key].perform(unit)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of PyTorch; afterwards as many as before."""
    import torch  # only here: who plans units need not have it

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def initialise(key: str, work: Work) -> None:
    """At the start of a process of our own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    # the main process has read the same data, and warned of them
    warnings.filterwarnings("ignore", module="fldiag")
    threading.Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()
    keep(key, work)


def _exit_with(parent: int) -> None:
    """A worker whose main process was killed would wait for units for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def versions() -> tuple[str, str]:
    """fldiag's and PyTorch's, as this worker has them."""
    import torch

    return version(), torch.__version__


def paused(dask_scheduler: Any) -> bool:
    """On a Dask scheduler: whether it has workers, and all of them take no work and have none under way."""
    workers = dask_scheduler.workers.values()
    return bool(workers) and all(
        worker.status.name == "paused" and not worker.executing for worker in workers
    )
