"""Where work units run: in this process, or in several. The result is the same whichever is chosen."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

import torch

from fldiag.errors import FldiagError, unknown

Build = Callable[..., Any]  # (**arguments) -> object with the work method


class Executor(Protocol):
    def map(self, units: Iterable[Any]) -> Iterator[Any]: ...

    def close(self) -> None: ...


class Serial:
    def __init__(self, work: Callable[[Any], Any]):
        self.work = work

    def map(self, units: Iterable[Any]) -> Iterator[Any]:
        return map(self.work, units)

    def close(self) -> None: ...


class Processes:
    """Worker processes, each with its own copy of what ``build`` makes and the same number of threads."""

    def __init__(self, build: Build, arguments: dict[str, Any], method: str, workers: int):
        self.pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start,
                                        initargs=(build, arguments, method, torch.get_num_threads()))

    def map(self, units: Iterable[Any]) -> Iterator[Any]:
        try:
            yield from self.pool.map(_work, units)
        except BrokenProcessPool:
            raise FldiagError("a worker process died (out of memory or shared memory, or a script without "
                              "if __name__ == '__main__')", "use fewer workers or executor 'serial'; the run is kept, "
                              "go on with --resume") from None

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


_worker: Callable[[Any], Any] | None = None


def _start(build: Build, arguments: dict[str, Any], method: str, threads: int) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    torch.set_num_threads(threads)
    _worker = getattr(build(**arguments), method)


def _work(unit: Any) -> Any:
    if _worker is None:
        raise RuntimeError("worker was not started")
    return _worker(unit)


def parse(name: str) -> tuple[str, int]:
    """``serial``, ``processes`` or ``processes:4`` -> (kind, workers)."""
    kind, _, count = name.partition(":")
    if kind not in ("serial", "processes"):
        raise unknown("executor", kind, ("serial", "processes"))
    if count and (not count.isdigit() or int(count) < 1):
        raise FldiagError(f"executor {name!r}: the number of workers is not valid", "write for example processes:4", usage=True)
    return kind, int(count or max(1, multiprocessing.cpu_count() // torch.get_num_threads()))
