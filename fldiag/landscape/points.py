"""Losses at many points, one after another, stored on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from fldiag.execution.pool import Pool
from fldiag.registry import Progress
from fldiag.results.kept_units import ArrayStore

Place = tuple[int, ...]
Value = tuple[float, float | None]
#: Pieces of a grid that workers get: few enough to cost nothing, many enough that none waits long for the last.
BLOCKS = 16


class Points:
    """Values over an array of places, NaN where not done: ``value`` and ``stderr``.

    With a ``store`` (path or ArrayStore) a call that was interrupted goes on from its values under the ``key``: ``before`` are
    the arrays and plain values that ``keep`` put beside them, None at the first time.
    """

    def __init__(self, shape: tuple[int, ...], store: Any = None, key: Callable[[], str] = str):
        self.done = np.zeros(shape, dtype=bool)
        self.value, self.stderr = np.full(shape, np.nan), np.full(shape, np.nan)
        self.store = ArrayStore(store) if isinstance(store, (str, os.PathLike)) else store
        self._key = key() if self.store is not None else ""
        self._fixed: dict[str, np.ndarray] = {}
        self._extra: Any = None
        self.before: tuple[dict[str, np.ndarray], Any] | None = None
        if self.store is not None:
            self.before = self.store.load(self._key)
        if self.before is not None:
            self.done, self.value, self.stderr = (
                self.before[0][name] for name in ("done", "value", "stderr")
            )

    def keep(self, fixed: dict[str, np.ndarray], extra: Any) -> None:
        """Arrays and plain values to store beside the values."""
        self._fixed, self._extra = fixed, extra

    def _arrays(self) -> dict[str, np.ndarray]:
        return {**self._fixed, "done": self.done, "value": self.value, "stderr": self.stderr}

    def save(self) -> None:
        if self.store is not None:
            self.store.save(self._key, self._arrays(), self._extra)

    def fill(
        self,
        places: Iterable[Any],
        evaluate: Callable[..., Value],
        text: str,
        progress: Progress | None,
        planned: int,
        pool: Pool | None = None,
    ) -> None:
        """``evaluate(*place)`` -> (value, standard error) at every place not yet done.

        ``planned``: how many will be done altogether, as far as that is known now. ``pool`` evaluates lists of places instead
        (see ``values``), in any order.
        """
        left = [tuple(int(i) for i in place) for place in places]
        left = [place for place in left if not self.done[place]]
        results: Iterator[tuple[Place, Value]] = ((place, evaluate(*place)) for place in left)
        if pool is not None and len(left) > 1:
            size = -(-len(left) // BLOCKS)
            blocks = [left[i : i + size] for i in range(0, len(left), size)]
            results = (
                (place, value)
                for number, values in pool.completed(blocks)
                for place, value in zip(blocks[number], values, strict=True)
            )

        def show() -> None:
            if progress:
                done = int(self.done.sum())
                progress(done, max(planned, done), text)

        if left:
            show()
        for place, (value, stderr) in results:
            self.value[place] = value
            self.stderr[place] = np.nan if stderr is None else stderr
            self.done[place] = True
            if self.store is not None:
                self.store.offer(self._key, self._arrays(), self._extra)
            show()
