"""Units of work whose results are kept on disk while they come, so that what was interrupted goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fldiag.registry import Progress
from fldiag.results.array_checkpoint import ArrayStore

if TYPE_CHECKING:
    from fldiag.execution.pool import Pool


def packed(plain: Any) -> np.ndarray:
    """What JSON can hold, as an array of bytes; floats come back to the bit.

    >>> unpacked(packed([{"metric": "loss", "value": 0.1, "stderr": None}, float("inf")]))
    [{'metric': 'loss', 'value': 0.1, 'stderr': None}, inf]
    """
    return np.frombuffer(json.dumps(plain, default=lambda value: value.item()).encode(), dtype=np.uint8)


def unpacked(content: np.ndarray) -> Any:
    return json.loads(content.tobytes())


class KeptUnits:
    """Results of units, each found by what the unit is called (``str``).

    Args:
        store: a file, or an ArrayStore, that keeps what is finished; None keeps nothing.
        key: tells what the results depend on, besides the unit; asked only where something is kept.
        pack: a result -> an array; ``unpack`` makes the result of it again. By default what JSON can hold.
    """

    def __init__(self, store: Any, key: Callable[[], str], pack: Callable[[Any], np.ndarray] = packed,
                 unpack: Callable[[np.ndarray], Any] = unpacked):
        self.store = ArrayStore(store) if isinstance(store, (str, os.PathLike)) else store
        self.key = key() if self.store is not None else ""
        self.pack, self.unpack = pack, unpack
        found = None if self.store is None else self.store.load(self.key)
        self.there: dict[str, np.ndarray] = {} if found is None else found[0]

    def results(self, pool: Pool, units: Sequence[Any], progress: Progress | None = None,
                then: Callable[[Any, Any], Any] = lambda unit, result: result) -> list[Any]:
        """The results of all units in their order; those found before are not computed again. ``then`` (unit, result) -> what
        becomes of a result here, and is kept."""
        coming = pool.map([unit for unit in units if str(unit) not in self.there])
        found = []
        try:
            for unit in units:
                if (content := self.there.get(str(unit))) is not None:
                    found.append(self.unpack(content))
                else:
                    found.append(then(unit, next(coming)))
                    self._keep(str(unit), found[-1])
                if progress:
                    progress(len(found), len(units), str(unit))
        except BaseException:  # Ctrl-C above all
            if self.store is not None and self.there:
                self.store.save(self.key, self.there)
            raise
        return found

    def _keep(self, name: str, result: Any) -> None:
        if self.store is not None:
            self.there[name] = self.pack(result)
            self.store.offer(self.key, self.there)
