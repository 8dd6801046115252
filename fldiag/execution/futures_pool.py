"""An executor of ``concurrent.futures`` that somebody handed over."""

from __future__ import annotations

import itertools
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    wait,
)
from typing import Any

from fldiag.errors import FldiagError, first_line
from fldiag.execution.pool import BEAT, GO_ON, Event, Pool
from fldiag.execution.worker import MISSING, Work, perform


class FuturesPool(Pool):
    """An executor handed over. It is not ours to end or to mend: where it breaks, that is one error."""

    def __init__(self, work: Work, name: Callable[[Any], str], executor: Executor):
        super().__init__(work, name)
        self.executor, self.key = executor, uuid.uuid4().hex
        # MPI's executors say num_workers
        workers = getattr(executor, "_max_workers", None) or getattr(executor, "num_workers", None)
        #: Units under way at a time; all of them where the number of workers is unknown.
        self.window = 2 * workers if isinstance(workers, int) else sys.maxsize

    def completed(
        self, units: Iterable[Any], beat: Event | None = None
    ) -> Iterator[tuple[int, Any]]:
        waiting = enumerate(units)
        busy: dict[Future[Any], tuple[int, Any]] = {}
        try:
            while True:
                for number, unit in itertools.islice(waiting, self.window - len(busy)):
                    busy[self._submit(unit)] = number, unit
                if not busy:
                    return
                done, _ = wait(busy, timeout=BEAT, return_when=FIRST_COMPLETED)
                for future in done:
                    number, unit = busy.pop(future)
                    with self.doing(unit):
                        result = future.result()
                    if isinstance(result, str) and result == MISSING:
                        busy[self._submit(unit, self.work)] = number, unit
                    else:
                        yield number, result
                if beat is not None:
                    beat()
        except (BrokenExecutor, CancelledError) as error:
            raise self._broken(error) from None
        finally:
            for future in busy:
                future.cancel()

    def _submit(self, unit: Any, work: Work | None = None) -> Future[Any]:
        try:
            return self.executor.submit(perform, self.key, unit, work)
        except BrokenExecutor:
            raise
        except RuntimeError as error:  # it was shut down
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> FldiagError:
        return FldiagError(
            f"the executor {type(self.executor).__name__} is broken ({first_line(error)})",
            f"mend it, or use another one, and {GO_ON}",
        )
