"""Processes of this machine, each a pool of one: when a process dies, it is known which unit it had, and no other is lost."""

from __future__ import annotations

import multiprocessing
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from fldiag.execution.pool import TRIES, Event, Pool, can_be_sent, died
from fldiag.execution.remote import Work, perform, start


class Processes(Pool):
    """``workers`` processes, started when the first units come; each gets the shared state as it starts."""

    def __init__(self, work: Work, name: Callable[[Any], str], workers: int):
        super().__init__(work, name)
        self.workers, self.key = workers, uuid.uuid4().hex
        self._free: list[ProcessPoolExecutor] = []
        self._all: list[ProcessPoolExecutor] = []
        can_be_sent(work)

    def _one(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=start,
            initargs=(self.key, self.work),
        )
        self._all.append(pool)
        return pool

    def completed(
        self, units: Iterable[Any], beat: Event | None = None
    ) -> Iterator[tuple[int, Any]]:
        fresh, again = enumerate(units), deque[tuple[int, Any, int]]()
        busy: dict[Future[Any], tuple[ProcessPoolExecutor, int, Any, int]] = {}
        try:
            while True:
                while len(busy) < self.workers:
                    following = (
                        again.popleft()
                        if again
                        else next(((n, unit, 1) for n, unit in fresh), None)
                    )
                    if following is None:
                        break
                    pool = self._free.pop() if self._free else self._one()
                    try:
                        busy[pool.submit(perform, self.key, following[1])] = pool, *following
                    except BrokenProcessPool:  # it died while it had nothing to do
                        self._all.remove(pool)
                        again.appendleft(following)
                if not busy:
                    return
                done, _ = wait(busy, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    pool, number, unit, tried = busy.pop(future)
                    try:
                        with self.doing(unit):
                            result = future.result()
                    except BrokenProcessPool:
                        self._all.remove(pool)
                        if tried == TRIES:
                            raise died(self.name(unit), tried) from None
                        again.append((number, unit, tried + 1))
                        continue
                    except BaseException:
                        self._free.append(pool)
                        raise
                    self._free.append(pool)
                    yield number, result
                if beat is not None:
                    beat()
        finally:
            for future, (
                pool,
                *_,
            ) in busy.items():  # left early: what is being done is of no use to anybody
                if not future.cancel():
                    self._end(pool)

    def _end(self, pool: ProcessPoolExecutor) -> None:
        self._all.remove(pool)
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        for pool in list(
            self._all
        ):  # idle: ended rather than waited for, PyTorch takes a second to leave
            self._end(pool)
        self._free.clear()
