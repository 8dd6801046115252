"""One interface for all places where work runs, and this process as the plainest of them."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from fldiag.errors import FldiagError, out_of_memory
from fldiag.execution.worker import Work

#: A unit whose workers died so often is not tried again.
TRIES = 3
#: Seconds between two beats while the main process waits.
BEAT = 0.2
#: The end of a remedy.
GO_ON = "run the same command again (train: with --resume, resume=True); finished work is kept"
Event = Callable[[], None]


class Pool(ABC):
    """Does units of one work. Used as a context; leaving it cancels what waits. ``name``: what a unit is called in messages."""

    def __init__(self, work: Work, name: Callable[[Any], str] = str):
        self.work, self.name = work, name

    @abstractmethod
    def completed(
        self, units: Iterable[Any], beat: Event | None = None
    ) -> Iterator[tuple[int, Any]]:
        """(number of the unit, result) as they are done; the units' own exceptions are raised. ``beat`` is called about five
        times a second while the main process waits."""

    def map(self, units: Iterable[Any], beat: Event | None = None) -> Iterator[Any]:
        """Results in the order of the units, each as early as that allows."""
        early: dict[int, Any] = {}
        following = 0
        with closing(self.completed(units, beat)) as completed:  # type: ignore[type-var]
            for number, result in completed:
                early[number] = result
                while following in early:
                    yield early.pop(following)
                    following += 1

    @contextmanager
    def doing(self, unit: Any) -> Iterator[None]:
        """A unit that lacks memory is an error that names it; its worker lives on."""
        try:
            yield
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise FldiagError(
                f"{self.name(unit)}: out of memory",
                f"use fewer workers, fewer examples (--samples) or a smaller --memory, and {GO_ON}",
            ) from error

    def close(self) -> None:  # noqa: B027
        """Cancel what waits, and end the workers that are ours."""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Serial(Pool):
    """This process, one unit after the other."""

    def completed(
        self, units: Iterable[Any], beat: Event | None = None
    ) -> Iterator[tuple[int, Any]]:
        for number, unit in enumerate(units):
            with self.doing(unit):
                result = self.work.perform(unit)
            yield number, result
            if beat is not None:
                beat()


def worker_died(unit: str, tries: int) -> FldiagError:
    """The error of a unit that ended its worker every time."""
    return FldiagError(
        f"{unit}: its worker process died {tries} times (out of memory or shared memory, or a script "
        "without if __name__ == '__main__')",
        f"use fewer workers or executor 'serial', and {GO_ON}",
    )


def check_sendable(work: Work) -> None:
    """Raises FldiagError for work that no other process can get."""
    try:
        pickle.dumps(work)
    except Exception as error:  # whatever somebody's own object raises
        raise FldiagError(
            f"what the work needs cannot be sent to worker processes ({type(error).__name__}: {error})",
            "define models, data and losses in a module rather than inside a function, or use executor 'serial'",
            usage=True,
        ) from None
