"""Which tables a report shows: those whose provenance names the very checkpoints of its runs.

Beside NAME.csv stands NAME.json: which diagnostic the table is of, and the sha256 of each checkpoint that its numbers came from.
A table of a run's rounds belongs to the run whose run.json lists all of them; a table of checkpoints, or of several runs, belongs
to every run that has one of them. Names of files and folders decide nothing (but the diagnostic of a table that names none, as
early versions wrote it). Looked through are, in this order: the folders or files given (all folders below them too), the run's
``diagnostics`` folder, the folder the run lies in, and ``fldiag-out`` here.

Several tables of one kind and run: one given by name is taken first, then that which reaches the latest round, then that
of more rounds, of more of the report's runs, then the newest. The others are counted in the report's provenance.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.checkpoint.run import Run
from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.report import search
from fldiag.report.search import Candidate, Claim, Source
from fldiag.results.files import csv_text
from fldiag.results.table import check

FALLBACK = Path("fldiag-out")


@dataclass
class Member:
    """A run of the report. ``given``: its path as the user wrote it."""

    run: Run
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
        return self.config.get(section, {}).get(key, default)

    @property
    def seed(self) -> Any:
        return self.run.index["config"].get("seed")

    @cached_property
    def rounds(self) -> dict[int, str]:
        """Round -> sha256 of its checkpoint."""
        return {int(Path(f).stem): str(sha) for f, sha in self.run.index["files"].items()
                if f.startswith("rounds/") and Path(f).stem.isdigit()}

    @cached_property
    def round_of(self) -> dict[str, int]:
        return {sha: r for r, sha in self.rounds.items()}

    @cached_property
    def data(self) -> str:
        """What tells the data apart: their fingerprint, or what the config says of them."""
        known = self.run.index["provenance"].get("data")
        named = {k: v for k, v in self.config.get("data", {}).items() if k != "root"}
        if not known and not named.get("name"):  # another program's, which may not say: comparable with no other run
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
class Collection:
    members: list[Member]
    sources: list[Source]
    notes: list[str]

    def having(self, kind: str) -> list[tuple[Member, Source]]:
        return [(m, m.tables[kind]) for m in self.members if kind in m.tables]


def collect(paths: Sequence[str | Path], places: Iterable[str | Path] = ()) -> Collection:
    """The runs and the tables that belong to them; ``places``: further files or folders to look through.

    Raises FldiagError for a path that is no run, for a run given twice, and for a place that is not there.
    """
    if not paths:
        raise FldiagError("no run was given", "give one or more run folders", usage=True)
    runs = [Run.open(p) for p in paths]
    where = [r.path.resolve() for r in runs]
    if twice := [str(p) for p, n in Counter(where).items() if n > 1]:
        raise FldiagError(f"run {twice[0]} was given twice", "give it once", usage=True)
    names = labels(where)
    looks = style.looks(names)
    members = [Member(run, Path(given) if Path(given).is_dir() else run.path, name, i, looks[name])
               for i, (run, given, name) in enumerate(zip(runs, paths, names, strict=True))]
    found = Collection(members, [], [])
    candidates = list(search.candidates({m.run.path: m.rounds for m in members}, [Path(p) for p in places], FALLBACK,
                                        found.notes))
    for member in members:
        _metrics(found, member)
        for kind in dict.fromkeys(c.kind for c in candidates):
            _choose(found, member, [c for c in candidates if c.kind == kind])
    return found


def labels(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parents as make them all different."""
    for depth in range(1, max(len(p.parts) for p in paths) + 1):
        names = ["/".join(p.parts[-depth:]) for p in paths]
        if len(set(names)) == len(names):
            return names
    return [str(p) for p in paths]


def _choose(found: Collection, member: Member, candidates: list[Candidate]) -> None:
    """The best readable table of one kind becomes the member's."""
    def rank(c: Candidate) -> tuple[Any, ...]:
        rounds, options = c.owned(member.rounds), c.about.get("options")
        whole = isinstance(options, dict) and bool(options.get("every_round"))
        shared = sum(bool(c.owned(m.rounds)) for m in found.members)
        return c.given, max(rounds), whole, len(rounds), shared, c.modified

    mine = sorted((c for c in candidates if c.owned(member.rounds)), key=rank, reverse=True)
    for candidate in mine:
        if candidate.source is None:
            try:
                candidate.source = search.read(candidate)
            except Exception as error:  # whatever is wrong with one table, the report shows the others
                found.notes.append(f"{candidate.csv.name} is not shown: it cannot be read as a table "
                                   f"({error.what if isinstance(error, FldiagError) else type(error).__name__}).")
                candidates.remove(candidate)
                continue
            candidate.source.place = len(found.sources)
            found.sources.append(candidate.source)
        candidate.source.others = max(candidate.source.others, len(mine) - 1)
        member.tables[candidate.kind] = candidate.source
        return


def _metrics(found: Collection, member: Member) -> None:
    """The table that training wrote."""
    index = member.run.index
    if not member.run.has_metrics:
        return
    try:
        frame = check(member.run.metrics)
    except Exception as error:  # as above
        found.notes.append(f"{member.label}: {error.what if isinstance(error, FldiagError) else type(error).__name__}")
        return
    claims = [Claim(sha, round=r) for r, sha in sorted(member.rounds.items())]
    made = Source("metrics", f"metrics-{member.label.replace('/', '-')}.csv",
                  {**index["provenance"], "run": member.label, "config": index["hash"]}, csv_text(frame).encode(),
                  pd.DataFrame(frame), claims, place=len(found.sources))
    found.sources.append(made)
    member.tables["metrics"] = made
