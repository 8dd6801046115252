"""A diagnostic of many rounds, kept on disk round by round while it runs.

``rows_of_rounds`` is for rounds that do not depend on each other, ``FinishedRounds`` for those that are compared with the ones
before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from fldiag.results.kept_units import ArrayStore, KeptUnits
from fldiag.results.table import Row
from fldiag.runs.history import History
from fldiag.runs.round_weights import Stored


def finished_units(history: History) -> KeptUnits:
    """What was finished before of the diagnostic that is running on this history (``History.store``)."""
    store, key = history.store or (None, "")
    return KeptUnits(store, lambda: key)


def rows_of_rounds(
    history: History,
    rounds: Iterable[Stored],
    measure: Callable[[Stored], list[Row]],
    finished: KeptUnits | None = None,
) -> list[Row]:
    """The rows of all rounds. Those of a round that was finished before are read back, with what was noted of it.

    Args:
        rounds: as they are read, with client weights or without.
        measure: the rows of one round; may note what is missing. It must not depend on other rounds.
        finished: by default ``finished_units(history)``.
    """
    finished = finished_units(history) if finished is None else finished

    def rows_and_notes(record: Stored) -> list[list[Row]]:
        before = len(history.notes)
        return [measure(record), history.notes[before:]]

    rows: list[Row] = []
    with finished.saved():
        for record in rounds:
            is_finished = str(record.round) in finished.contents
            new, notes = finished.result(
                record.round,
                lambda record=record: rows_and_notes(record),  # type: ignore[misc]
            )
            history.notes += notes if is_finished else []
            rows += new
    return rows


class RoundByRound(Protocol):
    """What makes the rows of one round after the other."""

    history: History
    seen_clients: set[int]

    def state(self) -> dict[str, np.ndarray]: ...

    def resume(self, record: Stored, state: dict[str, np.ndarray]) -> None: ...


class FinishedRounds:
    """Finished rounds on disk: their rows, and what the rounds after them are compared with."""

    def __init__(self, store: Any, key: Callable[[], str]):
        self.store = ArrayStore(store) if isinstance(store, (str, os.PathLike)) else store
        self.key = key() if self.store is not None else ""
        arrays = None if self.store is None else self.store.load(self.key)
        self.before: dict[str, np.ndarray] = {} if arrays is None else arrays[0]
        self.state: dict[str, np.ndarray] = {}
        self.rounds = {name: content for name, content in self.before.items() if name.isdigit()}
        self.last = max(map(int, self.rounds), default=None)

    def take(self, record: Stored, measure: RoundByRound) -> list[Row] | None:
        """The rows of a round that was finished before; ``measure`` is then where it was after it."""
        if self.store is None or (content := self.before.get(str(record.round))) is None:
            return None
        rows, notes = json.loads(content.tobytes())
        measure.history.notes += notes
        measure.seen_clients |= set(record.ids if record.complete else ())
        if record.round == self.last:
            measure.resume(record, self.before)
        return rows

    def add(self, r: int, rows: list[Row], notes: list[Row], measure: RoundByRound) -> None:
        if self.store is not None:
            self.rounds[str(r)] = np.frombuffer(json.dumps([rows, notes]).encode(), dtype=np.uint8)
            self.state = measure.state()
            self.store.offer(self.key, {**self.rounds, **self.state})

    def save(self) -> None:
        if self.store is not None and self.state:
            self.store.save(self.key, {**self.rounds, **self.state})
