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

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.diagnosis.places import FALLBACK, distinct
from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.collected import Claim, Collected, Member, Source
from fldiag.report import search
from fldiag.report.search import Candidate
from fldiag.results.files import csv_text
from fldiag.results.table import check
from fldiag.runs.index import unverified
from fldiag.runs.run import Run


def collect(paths: Sequence[str | Path], places: Iterable[str | Path] = ()) -> Collected:
    """The runs and the tables that belong to them; ``places``: further files or folders to look through.

    Raises FldiagError for a path that is no run, for a run given twice, and for a place that is not there.
    """
    if not paths:
        raise FldiagError("no run was given", "give one or more run folders", usage=True)
    runs = [Run.open(p) for p in paths]
    names = distinct([r.path for r in runs])
    looks = style.looks(names)
    members = [
        Member(run, Path(given) if Path(given).is_dir() else run.path, name, i, looks[name])
        for i, (run, given, name) in enumerate(zip(runs, paths, names, strict=True))
    ]
    found = Collected(members, [], [f"{text}." for text in unverified(r.path for r in runs)])
    candidates = list(
        search.candidates(
            {m.run.path: m.rounds for m in members},
            [Path(p) for p in places],
            FALLBACK,
            found.notes,
        )
    )
    for member in members:
        _metrics(found, member)
        for kind in dict.fromkeys(c.kind for c in candidates):
            _choose(found, member, [c for c in candidates if c.kind == kind])
    return found


def _choose(found: Collected, member: Member, candidates: list[Candidate]) -> None:
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
            except (
                Exception
            ) as error:  # whatever is wrong with one table, the report shows the others
                found.notes.append(
                    f"{candidate.csv.name} is not shown: it cannot be read as a table "
                    f"({error.what if isinstance(error, FldiagError) else type(error).__name__})."
                )
                candidates.remove(candidate)
                continue
            candidate.source.place = len(found.sources)
            found.sources.append(candidate.source)
        candidate.source.others = max(candidate.source.others, len(mine) - 1)
        member.tables[candidate.kind] = candidate.source
        return


def _metrics(found: Collected, member: Member) -> None:
    """The table that training wrote."""
    index = member.run.index
    if not member.run.has_metrics:
        return
    try:
        frame = check(member.run.metrics)
    except Exception as error:  # as above
        found.notes.append(
            f"{member.label}: {error.what if isinstance(error, FldiagError) else type(error).__name__}"
        )
        return
    claims = [Claim(sha, round=r) for r, sha in sorted(member.rounds.items())]
    made = Source(
        "metrics",
        f"metrics-{member.label.replace('/', '-')}.csv",
        {**index["provenance"], "run": member.label, "config": index["hash"]},
        csv_text(frame).encode(),
        pd.DataFrame(frame),
        claims,
        place=len(found.sources),
    )
    found.sources.append(made)
    member.tables["metrics"] = made
