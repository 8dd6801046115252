"""What a section is made from: the runs of a report, with the tables that are theirs; and what most sections say of them.

The report's own collection fits these protocols, so that a diagnostic's section needs nothing of the report.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from fldiag.plotting.sections import Missing, Section
from fldiag.results.select import last_round, only

NO_CLIENTS = "it kept no client weights; train it again with --set checkpoint.clients=sampled"


class Claim(Protocol):
    """One checkpoint that a table says it came from; ``label``: what the table's column ``run`` calls it."""

    @property
    def sha256(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def round(self) -> int | None: ...
    @property
    def slice(self) -> str: ...
    @property
    def n(self) -> int | None: ...
    @property
    def client(self) -> int | None: ...


class Source(Protocol):
    """A table with its provenance; ``place``: which of the report's tables it is."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def frame(self) -> pd.DataFrame: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def claims(self) -> Sequence[Claim]: ...
    @property
    def place(self) -> int: ...


class RunFacts(Protocol):
    """What a run says of itself; ``index`` is its run.json, ``origin`` is empty unless another program trained it."""

    @property
    def done(self) -> int: ...
    @property
    def status(self) -> str: ...
    @property
    def index(self) -> Mapping[str, Any]: ...
    @property
    def origin(self) -> Mapping[str, Any]: ...


class Member(Protocol):
    """A run of the report.

    ``given``: its path as the user wrote it. ``label``: its name in the report, and ``place`` its number, which figures take
    for its colour. ``data``, ``model``: equal where two runs' numbers may be compared. ``rounds``: round -> sha256 of its
    checkpoint, and ``round_of`` the other way. ``tables``: kind -> table; the kind is the diagnostic's name, with
    ``:VARIANT`` where it has variants.
    """

    @property
    def run(self) -> RunFacts: ...
    @property
    def given(self) -> Path: ...
    @property
    def label(self) -> str: ...
    @property
    def place(self) -> int: ...
    @property
    def data(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def rounds(self) -> Mapping[int, str]: ...
    @property
    def round_of(self) -> Mapping[str, int]: ...
    @property
    def keeps_clients(self) -> bool: ...
    @property
    def tables(self) -> Mapping[str, Source]: ...

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        """An entry of the run's config."""


class Collected(Protocol):
    """The runs of a report."""

    @property
    def members(self) -> Sequence[Member]: ...

    def having(self, kind: str) -> Sequence[tuple[Member, Source]]:
        """The runs that have a table of this kind, with it."""


@dataclass(frozen=True)
class Piece:
    """The part of a table that is about one checkpoint; ``variant``: the end of the table's kind."""

    member: Member
    source: Source
    claim: Claim
    label: str
    rows: pd.DataFrame
    variant: str = ""


def pieces(found: Collected, name: str) -> list[Piece]:
    """What the runs' tables of a diagnostic say, one piece a checkpoint, in the order of the runs."""
    made = []
    for m in found.members:
        for kind, source in m.tables.items():
            if kind.split(":")[0] != name:
                continue
            for claim in source.claims:
                r = m.round_of.get(claim.sha256)
                rows = source.frame if not claim.label else only(source.frame, run=claim.label)
                if r is None or rows.empty:
                    continue
                client = "" if claim.client is None else f", client {claim.client}"
                made.append(Piece(m, source, claim, f"{m.label}, round {r}{client}", rows, kind.partition(":")[2]))
    return made


def own(source: Source, members: Sequence[Member]) -> pd.DataFrame:
    """The rows of a table that are of these runs' checkpoints; all of them where the table does not tell."""
    labels = [c.label for c in source.claims if c.label and any(c.sha256 in m.round_of for m in members)]
    rows = only(source.frame, run=labels)
    return rows if len(rows) else source.frame


def command(verb: str, m: Member, *more: str) -> str:
    """What to type, quoted for a shell."""
    return shlex.join(["fldiag", verb, str(m.given), *more])


def absent(m: Member, verb: str, *more: str, clients: bool = False) -> Missing:
    """Why a table is not there, and what makes it. ``clients``: it needs the clients' weights."""
    if clients and not m.keeps_clients:
        return Missing(m.label, NO_CLIENTS)
    if not m.rounds:
        return Missing(m.label, "it has no checkpoint yet; train at least one round")
    return Missing(m.label, "not computed yet", command(verb, m, *more))


def incomplete(section: Section, found: Collected, kind: str) -> None:
    """Notes on tables that end before the run does."""
    for m, source in found.having(kind):
        last = last_round(source.frame)
        if last is not None and last < m.run.done:
            section.notes.append(f"{m.label}: {source.name} ends with round {last}, the run has {m.run.done}; "
                                 f"{command(kind, m)} makes it anew.")


def worlds(members: Sequence[Member]) -> dict[str, str]:
    """Data (by what tells them apart) -> a name, all names different."""
    names: dict[str, str] = {}
    for m in members:
        if m.data not in names:
            name = str(m.setting("data", "name", "unknown data"))
            taken = [n for n in names.values() if n.split(" (")[0] == name]
            names[m.data] = f"{name} (version {len(taken) + 1})" if taken else name
    return names
