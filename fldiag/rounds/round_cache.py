"""A diagnostic of many rounds, kept on disk round by round while it runs.

``of_rounds`` is for rounds that do not depend on each other, ``Kept`` for those that are compared with the ones before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from fldiag.results.kept_units import ArrayStore, KeptUnits
from fldiag.results.table import Row
from fldiag.rounds.history import History
from fldiag.rounds.round_weights import Stored


def kept_of(history: History) -> KeptUnits:
    """What was finished before of the diagnostic that is asked of this history (``History.store``)."""
    store, key = history.store or (None, "")
    return KeptUnits(store, lambda: key)


def of_rounds(
    history: History,
    rounds: Iterable[Stored],
    make: Callable[[Stored], list[Row]],
    kept: KeptUnits | None = None,
) -> list[Row]:
    """The rows of all rounds. Those of a round that was finished before are read back, with what was noted of it.

    Args:
        rounds: as they are read, with client weights or without.
        make: the rows of one round; may note what is missing. It must not depend on other rounds.
        kept: by default ``kept_of(history)``.
    """
    kept = kept_of(history) if kept is None else kept

    def made(stored: Stored) -> list[list[Row]]:
        noted = len(history.notes)
        return [make(stored), history.notes[noted:]]

    rows: list[Row] = []
    with kept.saved():
        for stored in rounds:
            known = str(stored.round) in kept.contents
            found, notes = kept.result(stored.round, lambda stored=stored: made(stored))  # type: ignore[misc]
            history.notes += notes if known else []
            rows += found
    return rows


class Measure(Protocol):
    """What makes the rows of one round after the other."""

    history: History
    seen_clients: set[int]

    def state(self) -> dict[str, np.ndarray]: ...

    def resume(self, stored: Stored, state: dict[str, np.ndarray]) -> None: ...


class Kept:
    """Finished rounds on disk: their rows, and what the rounds after them are compared with."""

    def __init__(self, store: Any, key: Callable[[], str]):
        self.store = ArrayStore(store) if isinstance(store, (str, os.PathLike)) else store
        self.key = key() if self.store is not None else ""
        found = None if self.store is None else self.store.load(self.key)
        self.there: dict[str, np.ndarray] = {} if found is None else found[0]
        self.state: dict[str, np.ndarray] = {}
        self.rounds = {name: content for name, content in self.there.items() if name.isdigit()}
        self.last = max(map(int, self.rounds), default=None)

    def take(self, stored: Stored, measure: Measure) -> list[Row] | None:
        """The rows of a round that was finished before; ``measure`` is then where it was after it."""
        if self.store is None or (content := self.there.get(str(stored.round))) is None:
            return None
        rows, notes = json.loads(content.tobytes())
        measure.history.notes += notes
        measure.seen_clients |= set(stored.ids if stored.complete else ())
        if stored.round == self.last:
            measure.resume(stored, self.there)
        return rows

    def add(self, r: int, rows: list[Row], notes: list[Row], measure: Measure) -> None:
        if self.store is not None:
            self.rounds[str(r)] = np.frombuffer(json.dumps([rows, notes]).encode(), dtype=np.uint8)
            self.state = measure.state()
            self.store.offer(self.key, {**self.rounds, **self.state})

    def save(self) -> None:
        if self.store is not None and self.state:
            self.store.save(self.key, {**self.rounds, **self.state})
