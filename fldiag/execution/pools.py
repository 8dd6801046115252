"""``open_pool`` chooses where units of one work are done; here are the processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from fldiag.execution.executor import cores, parse_executor
from fldiag.execution.futures_pool import FuturesPool
from fldiag.execution.pool import (
    BEAT,
    TRIES,
    Event,
    Pool,
    Serial,
    check_sendable,
    worker_died,
)
from fldiag.execution.worker import Work, initialise, perform


def open_pool(
    executor: Any,
    function: Callable[[Any, Any], Any],
    shared: Any,
    *,
    threads: int | None = None,
    name: Callable[[Any], str] = str,
    most: int | None = None,
) -> Pool:
    """The pool that does units of this work.

    Args:
        executor: see :func:`fldiag.execution.executor.parse_executor`.
        function: ``function(shared, unit)``, found by its name in a module.
        shared: state that all units need; goes to a worker once.
        threads: PyTorch's threads at every unit, by default as many as here.
        name: what a unit is called in messages.
        most: how many units the first call has, where that is known: one alone is done in this process.

    Raises:
        FldiagError: an unknown executor, or a cluster that cannot be reached or has no fldiag of this version.
    """
    import torch  # only here: diagnostics name this function before anything is computed

    spec = parse_executor(executor)
    work = Work(function, shared, threads or torch.get_num_threads())
    if spec.futures is not None:
        return FuturesPool(work, name, spec.futures)
    if spec.kind == "dask":
        # distributed is an extra, and takes a second to import
        from fldiag.execution.dask_cluster import DaskCluster

        return DaskCluster(work, name, spec)
    if spec.kind == "serial" or (most is not None and most <= 1):
        return Serial(work, name)
    return Processes(work, name, spec.workers or cores(work.threads))


class Processes(Pool):
    """Up to ``workers`` processes, each started when there is a unit for it; it gets the shared state as it starts.

    Each is a pool of one: when a process dies, it is known which unit it had, and no other is lost.
    """

    def __init__(self, work: Work, name: Callable[[Any], str], workers: int):
        super().__init__(work, name)
        self.workers, self.key = workers, uuid.uuid4().hex
        self._idle: list[ProcessPoolExecutor] = []
        self._all: list[ProcessPoolExecutor] = []
        check_sendable(work)

    def _start_process(self) -> ProcessPoolExecutor:
        process = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=initialise,
            initargs=(self.key, self.work),
        )
        self._all.append(process)
        return process

    def completed(
        self, units: Iterable[Any], beat: Event | None = None
    ) -> Iterator[tuple[int, Any]]:
        fresh = ((number, unit, 1) for number, unit in enumerate(units))
        retries = deque[tuple[int, Any, int]]()
        busy: dict[Future[Any], tuple[ProcessPoolExecutor, int, Any, int]] = {}
        try:
            while True:
                while len(busy) < self.workers:
                    following = retries.popleft() if retries else next(fresh, None)
                    if following is None:
                        break
                    process = self._idle.pop() if self._idle else self._start_process()
                    try:
                        with _without_interrupts():
                            future = process.submit(perform, self.key, following[1])
                    except BrokenProcessPool:  # it died while it had nothing to do
                        self._all.remove(process)
                        retries.appendleft(following)
                    else:
                        busy[future] = process, *following
                if not busy:
                    return
                done, _ = wait(busy, timeout=BEAT, return_when=FIRST_COMPLETED)
                for future in done:
                    process, number, unit, tries = busy.pop(future)
                    try:
                        with self.doing(unit):
                            result = future.result()
                    except BrokenProcessPool:
                        self._all.remove(process)
                        if tries == TRIES:
                            raise worker_died(self.name(unit), tries) from None
                        retries.append((number, unit, tries + 1))
                        continue
                    except BaseException:
                        self._idle.append(process)
                        raise
                    self._idle.append(process)
                    yield number, result
                if beat is not None:
                    beat()
        finally:
            for future, (process, *_) in busy.items():  # left early: nobody needs these results
                if not future.cancel():
                    self._end(process)

    def _end(self, process: ProcessPoolExecutor) -> None:
        if process not in self._all:  # the pool was closed before whoever took its results
            return
        self._all.remove(process)
        for worker in list((process._processes or {}).values()):
            worker.terminate()
        process.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        # idle ones are ended rather than waited for: PyTorch takes a second to leave
        for process in list(self._all):
            self._end(process)
        self._idle.clear()


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C waits for the end of the block. A process that starts in it inherits that, so that Ctrl-C does not reach it before
    ``initialise`` ignores it: until then it imports modules for seconds, and would show a traceback."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
