"""What a section is made from: the runs of a report, with the tables that are theirs; and what most sections say of them.

A diagnostic's section is made from these, and needs nothing of the report.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.plotting import style
from fldiag.plotting.sections import Missing, Section
from fldiag.results.files import sha256_of
from fldiag.results.select import last_round, only

NO_CLIENTS = "it kept no client weights; train it again with --set checkpoint.clients=sampled"


@dataclass(frozen=True)
class Claim:
    """One checkpoint that a table says it came from."""

    sha256: str
    label: str = ""  # the table's column ``run``
    round: int | None = None
    slice: str = ""
    n: int | None = None

    @property
    def client(self) -> int | None:
        found = re.search(r" client (\d+)$", self.label)
        return int(found.group(1)) if found else None


@dataclass
class Source:
    """A table with its provenance. ``raw``: the CSV as it was written. ``place``: which of the report's tables it is."""

    kind: str
    name: str
    about: dict[str, Any]
    raw: bytes
    frame: pd.DataFrame
    claims: list[Claim]
    others: int = 0
    note: str = ""
    place: int = 0

    @property
    def options(self) -> dict[str, Any]:
        found = self.about.get("options")
        return found if isinstance(found, dict) else {}

    @property
    def sha256(self) -> str:
        return sha256_of(self.raw)


@dataclass
class Member:
    """A run of the report.

    ``run``: the ``fldiag.runs.run.Run``. ``given``: its path as the user wrote it. ``label``: its name in the report, and
    ``place`` its number, which figures take for its colour. ``tables``: kind -> table; the kind is the diagnostic's name, with
    ``:VARIANT`` where it has variants.
    """

    run: Any
    given: Path
    label: str
    place: int
    look: style.Look
    tables: dict[str, Source] = field(default_factory=dict)

    @cached_property
    def config(self) -> dict[str, dict[str, Any]]:
        """The sections of the config as stored, not validated: a run of another version or with a user's own
        method can be reported, too."""
        return {k: v for k, v in self.run.index["config"].items() if isinstance(v, dict)}

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        """An entry of the run's config."""
        return self.config.get(section, {}).get(key, default)

    @property
    def seed(self) -> Any:
        return self.run.index["config"].get("seed")

    @cached_property
    def rounds(self) -> dict[int, str]:
        """Round -> sha256 of its checkpoint, of a record also of those that it no longer has."""
        files = {**self.run.index.get("gone", {}), **self.run.index["files"]}
        return {
            int(Path(f).stem): str(sha)
            for f, sha in files.items()
            if f.startswith("rounds/") and Path(f).stem.isdigit()
        }

    @cached_property
    def round_of(self) -> dict[str, int]:
        return {sha: r for r, sha in self.rounds.items()}

    @cached_property
    def data(self) -> str:
        """What tells the data apart: their fingerprint, or what the config says of them."""
        known = self.run.index["provenance"].get("data")
        named = {k: v for k, v in self.config.get("data", {}).items() if k != "root"}
        if not known and not named.get(
            "name"
        ):  # another program's, which may not say: comparable with no other run
            return f"unknown:{self.place}"
        return str(known) if known else json.dumps(named, sort_keys=True, default=str)

    @cached_property
    def model(self) -> str:
        return json.dumps(self.config.get("model", {}), sort_keys=True, default=str)

    @cached_property
    def federation(self) -> str:
        """What tells the division of the data apart."""
        return str(self.run.index["files"].get("partition.npz"))

    @property
    def keeps_clients(self) -> bool:
        return self.setting("checkpoint", "clients", "none") != "none"


@dataclass
class Collected:
    """The runs of a report, the tables that are shown, what is to be said of the others, and how the runs were chosen."""

    members: list[Member]
    sources: list[Source]
    notes: list[str]
    chosen: list[str] = field(default_factory=list)

    def having(self, kind: str) -> list[tuple[Member, Source]]:
        """The runs that have a table of this kind, with it."""
        return [(m, m.tables[kind]) for m in self.members if kind in m.tables]


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
                made.append(
                    Piece(
                        m,
                        source,
                        claim,
                        f"{m.label}, round {r}{client}",
                        rows,
                        kind.partition(":")[2],
                    )
                )
    return made


def own(source: Source, members: Sequence[Member]) -> pd.DataFrame:
    """The rows of a table that are of these runs' checkpoints; all of them where the table does not tell."""
    labels = [
        c.label for c in source.claims if c.label and any(c.sha256 in m.round_of for m in members)
    ]
    rows = only(source.frame, run=labels)
    return rows if len(rows) else source.frame


def command(verb: str, m: Member, *more: str) -> str:
    """What to type, quoted for a shell."""
    return shlex.join(["fldiag", *verb.split(), str(m.given), *more])


def absent(m: Member, verb: str, *more: str, clients: bool = False) -> Missing:
    """Why a table is not there, and what makes it. ``clients``: it needs the clients' weights."""
    if m.run.is_record:
        return Missing(m.label, "it is the record of a run, without weights")
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
            section.notes.append(
                f"{m.label}: {source.name} ends with round {last}, the run has {m.run.done}; "
                f"{command(kind, m)} makes it anew."
            )


def worlds(members: Sequence[Member]) -> dict[str, str]:
    """Data (by what tells them apart) -> a name, all names different."""
    names: dict[str, str] = {}
    for m in members:
        if m.data not in names:
            name = str(m.setting("data", "name", "unknown data"))
            taken = [n for n in names.values() if n.split(" (")[0] == name]
            names[m.data] = f"{name} (version {len(taken) + 1})" if taken else name
    return names
