"""Work that the caller need not wait for: done by one thread of its own, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

#: Jobs that are under way or wait. What they hold stays in memory, so the next one waits for room.
MOST = 2


class Background:
    """One thread that does jobs one after the other.

    A job that fails takes those behind it along: none of them is done, and the next call raises the error. A process that ends
    normally does all jobs first. One that is killed leaves out what it had not done.
    """

    def __init__(self) -> None:
        self._pool = _thread()
        self._room = threading.Semaphore(MOST)
        self._last: Future[None] | None = None
        self._error: BaseException | None = None

    def put(self, job: Callable[..., Any], *args: Any) -> None:
        """Do this after what was put before; waits while there is no room. Raises the error of an earlier job."""
        if self._error is not None:
            self.flush()
        self._room.acquire()
        self._last = self._pool.submit(self._do, partial(job, *args))

    def flush(self) -> None:
        """Wait until all jobs are done. Raises the error of one that failed."""
        if self._last is not None:
            self._last.result()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """``flush``, and end the thread; a later job starts another."""
        self._pool.shutdown()
        self._pool = _thread()
        self.flush()

    def _do(self, job: Callable[[], Any]) -> None:
        try:
            if self._error is None:
                job()
        except BaseException as error:  # the caller's next call raises it
            self._error = error
        finally:
            self._room.release()


def _thread() -> ThreadPoolExecutor:
    """One thread, which starts with its first job."""
    return ThreadPoolExecutor(1, thread_name_prefix="fldiag-background")
