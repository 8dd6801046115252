"""The stored rounds of a federation, read one at a time, with notes of what is missing or cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from fldiag.errors import FldiagError
from fldiag.rounds.round_weights import Stored

REMEDY = (
    "train with client weights in the checkpoints: fldiag train … --set checkpoint.clients=sampled"
)
#: How a note ends that says which clients the partition lacks.
OUTSIDE = ": left out, as nothing says which examples are theirs"


class Rounds:
    """``rounds``: number -> what reads it; ``name``: what messages call them; ``clients``: how many the federation has;
    ``remarks``: what is known to be missing; ``steps``: round -> what training recorded of its local steps.

    After the rounds were read, ``notes`` says what was missing or unreadable, as rows of a table, and ``read`` which were read.
    """

    def __init__(
        self,
        rounds: Mapping[int, Callable[[], Stored]],
        name: str,
        clients: int,
        remarks: Sequence[str],
        steps: Callable[[int], pd.DataFrame | None] | None,
    ):
        self._rounds, self.name, self._clients = dict(sorted(rounds.items())), name, clients
        self._remarks, self._steps = tuple(remarks), steps
        self.remedy = REMEDY
        self.outside: frozenset[int] = (
            frozenset()
        )  # clients that the partition lacks between others
        self.notes: list[dict[str, Any]] = []
        self.read: list[int] = []
        self._current: tuple[int, Stored] | None = None

    @property
    def rounds(self) -> list[int]:
        """The numbers of the rounds that there are."""
        return list(self._rounds)

    def each(
        self, progress: Callable[[int, int, str], None] | None = None, *, clients: bool = True
    ) -> Iterator[Stored]:
        """The rounds that can be read, in order; ``notes`` grows by those that cannot.

        Raises FldiagError when none can be read, or, with ``clients``, none has what the clients received and made.
        """
        self.notes, self.read, usable, first = [], [], 0, None
        for text in self._remarks:
            self.note(None, text)
        for i, (r, read) in enumerate(self._rounds.items()):
            try:
                stored = self._in_partition(read())
            except FldiagError as error:
                first = first or error
                self.note(r, error.what)
                continue
            finally:
                if progress:
                    progress(i, len(self._rounds), f"round {r}")
            for text in stored.notes if clients else ():
                self.note(r, text)
            self.read.append(r)
            usable += stored.complete
            yield stored
        if progress:
            progress(len(self._rounds), len(self._rounds), "rounds")
        if not self.read:
            raise first or FldiagError(
                f"{self.name}: no stored round can be used", "see its run.json"
            )
        if clients and not usable:
            raise self._unusable("with client weights")

    def stored(self, round: int) -> Stored:
        """One round; the one asked for last is kept."""
        if self._current is None or self._current[0] != round:
            self._current = round, self._in_partition(self._rounds[round]())
        return self._current[1]

    def _in_partition(self, record: Stored) -> Stored:
        """The round without the clients of which the partition says nothing: there are no examples of theirs to look at."""
        rows = [j for j, k in enumerate(record.ids) if k < self._clients and k not in self.outside]
        if len(rows) == len(record.ids):
            return record
        lacking = [str(k) for j, k in enumerate(record.ids) if j not in rows]
        text = f"client {', '.join(lacking)} is not in the partition of {self._clients} clients{OUTSIDE}"
        record = replace(record.of(rows), notes=(*record.notes, text))
        return record if rows else replace(record, clients=None)

    def asked(self, every: bool | None, *, clients: bool = True) -> Iterator[Stored]:
        """The rounds of a diagnostic that usually takes the last one: all with ``every``."""
        return self.each(clients=clients) if every else iter([self.last(clients=clients)])

    @property
    def sampled(self) -> int:
        """Clients whose weights the last round holds, for forecasts."""
        try:
            return len(self.last().ids)
        except FldiagError:
            return 0

    def last(self, *, clients: bool = True) -> Stored:
        """The last round that has received and trained weights (without ``clients``: any); ``notes``: what was passed over."""
        self.notes, self.read = [], []
        for r in reversed(self._rounds):
            try:
                stored = self._in_partition(self._rounds[r]())
            except FldiagError as error:
                self.note(r, error.what)
                continue
            for text in stored.notes if clients else ():
                self.note(r, text)
            if stored.complete or not clients:
                self.read = [r]
                return stored
        raise self._unusable("with client weights" if clients else "that can be used")

    def _unusable(self, kind: str) -> FldiagError:
        lacking = next((n["note"] for n in self.notes if str(n["note"]).endswith(OUTSIDE)), None)
        if lacking is None:
            return FldiagError(f"{self.name} holds no round {kind}", self.remedy)
        return FldiagError(
            f"{self.name} holds no round {kind} of clients in the partition: {lacking}",
            "make the run again with the partition of these clients: fldiag convert … --partition FILE, or "
            "fldiag.Recorder(..., clients=...)",
        )

    def steps(self, round: int) -> pd.DataFrame | None:
        """What training recorded of the local steps of a round (see ``Run.steps``); None when it recorded nothing."""
        if self._steps is None:
            return None
        try:
            return self._steps(round)
        except FldiagError as error:
            self.note(round, error.what)
            return None

    def note(self, round: int | None, text: str, client: int | None = None) -> None:
        """Remember that something is missing."""
        self.notes.append(
            {"metric": "missing", "round": round, "client": client, "note": text, "masked": True}
        )

    def finite(self, stored: Stored) -> Stored:
        """The round without the clients whose weights are not numbers, which are noted."""
        sound = stored.finite()
        for k in stored.ids:
            if k not in sound.ids:
                self.note(
                    stored.round, f"the trained weights of client {k} are not finite: left out", k
                )
        return sound
