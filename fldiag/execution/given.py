"""Any executor of ``concurrent.futures``, or with its interface."""

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
from fldiag.execution.pool import GO_ON, Event, Pool
from fldiag.execution.remote import MISSING, Work, perform


class Given(Pool):
    """Somebody's own executor. It is not ours to end or to mend: where it breaks, that is one error."""

    def __init__(self, work: Work, name: Callable[[Any], str], executor: Executor):
        super().__init__(work, name)
        self.executor, self.key = executor, uuid.uuid4().hex
        workers = getattr(executor, "_max_workers", None) or getattr(
            executor, "num_workers", None
        )  # the latter is MPI's name
        #: Units under way at a time; all of them where nobody says how many workers there are.
        self.window = 2 * workers if isinstance(workers, int) else sys.maxsize

    def completed(
        self, units: Iterable[Any], beat: Event | None = None
    ) -> Iterator[tuple[int, Any]]:
        waiting, busy = enumerate(units), {}  # type: ignore[var-annotated]
        try:
            while True:
                for number, unit in itertools.islice(waiting, self.window - len(busy)):
                    busy[self._submitted(unit)] = number, unit
                if not busy:
                    return
                done, _ = wait(busy, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    number, unit = busy.pop(future)
                    with self.doing(unit):
                        result = future.result()
                    if isinstance(result, str) and result == MISSING:
                        busy[self._submitted(unit, self.work)] = number, unit
                    else:
                        yield number, result
                if beat is not None:
                    beat()
        except (BrokenExecutor, CancelledError) as error:
            raise self._broken(error) from None
        finally:
            for future in busy:
                future.cancel()

    def _submitted(self, unit: Any, work: Work | None = None) -> Future[Any]:
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
