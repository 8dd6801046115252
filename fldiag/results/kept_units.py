"""Units of work whose results are kept on disk while they come, so that what was interrupted goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from fldiag.errors import FldiagError
from fldiag.registry import Progress
from fldiag.results.array_checkpoint import ArrayStore

if TYPE_CHECKING:
    from fldiag.execution.pools import Pool


def packed(plain: Any) -> np.ndarray:
    """What JSON can hold, as an array of bytes; floats come back to the bit.

    >>> unpacked(packed([{"metric": "loss", "value": 0.1, "stderr": None}, float("inf")]))
    [{'metric': 'loss', 'value': 0.1, 'stderr': None}, inf]
    """
    return np.frombuffer(
        json.dumps(plain, default=lambda value: value.item()).encode(), dtype=np.uint8
    )


def unpacked(content: np.ndarray) -> Any:
    return json.loads(content.tobytes())


class KeptUnits:
    """Results of units, each found by what the unit is called (``str``).

    Args:
        store: a file, or an ArrayStore, that keeps what is finished (its refusal ends the work, but for a SpareStore); None
            keeps nothing.
        key: tells what the results depend on, besides the unit; asked only where something is kept.
        pack: a result -> an array; ``unpack`` makes the result of it again. By default what JSON can hold.
    """

    def __init__(
        self,
        store: Any,
        key: Callable[[], str],
        pack: Callable[[Any], np.ndarray] = packed,
        unpack: Callable[[np.ndarray], Any] = unpacked,
    ):
        self.store = ArrayStore(store) if isinstance(store, (str, os.PathLike)) else store
        self.key = key() if self.store is not None else ""
        self.pack, self.unpack = pack, unpack
        found = None if self.store is None else self.store.load(self.key)
        self.there: dict[str, np.ndarray] = {} if found is None else found[0]

    def results(
        self,
        pool: Pool,
        units: Sequence[Any],
        progress: Progress | None = None,
        then: Callable[[Any, Any], Any] = lambda unit, result: result,
        name: Callable[[Any], str] = str,
    ) -> list[Any]:
        """The results of all units in their order; those found before are not computed again. ``then`` (unit, result) -> what
        becomes of a result here, and is kept. ``name``: what a unit is called; each has a name of its own."""
        if len({name(unit) for unit in units}) < len(units):
            raise ValueError(
                "two units of one name: the results of one would be taken for the other's"
            )
        left = [unit for unit in units if name(unit) not in self.there]
        coming, done = pool.map(left), len(units) - len(left)
        found = []
        if progress and left:
            progress(done, len(units), name(left[0]))
        with self.saved():
            for unit in units:
                is_new = name(unit) not in self.there
                found.append(self.result(name(unit), lambda unit=unit: then(unit, next(coming))))  # type: ignore[misc]
                if progress and is_new:
                    done += 1
                    progress(done, len(units), name(unit))
        return found

    def result(self, unit: Any, make: Callable[[], Any]) -> Any:
        """The result of one unit, made now unless it was found."""
        if (content := self.there.get(str(unit))) is not None:
            return self.unpack(content)
        made = make()
        self._keep(str(unit), made)
        return made

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Whatever ends the work before its time, Ctrl-C above all: what is finished is on the disk, where that has room."""
        try:
            yield
        except BaseException:
            if self.store is not None and self.there:
                with suppress(FldiagError):  # what ended the work is what the caller hears of
                    self.store.save(self.key, self.there)
            raise

    def _keep(self, name: str, result: Any) -> None:
        if self.store is not None:
            self.there[name] = self.pack(result)
            self.store.offer(self.key, self.there)
