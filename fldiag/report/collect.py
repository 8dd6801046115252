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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fldiag.diagnosis.answer import answer
from fldiag.diagnosis.places import FALLBACK, distinct
from fldiag.errors import FldiagError
from fldiag.report import members, search, summary
from fldiag.report.members import Claim, Collected, Member, Source
from fldiag.report.search import Candidate
from fldiag.results.files import csv_text
from fldiag.results.select import only
from fldiag.results.table import PERSONAL, check
from fldiag.runs.index import unverified
from fldiag.runs.run import Run

if TYPE_CHECKING:
    from fldiag.diagnosis.tables import Bar


def collect(paths: Sequence[str | Path], places: Iterable[str | Path] = ()) -> Collected:
    """The runs and the tables that belong to them; ``places``: further files or folders to look through.

    Raises FldiagError for a path that is no run, for a run given twice, and for a place that is not there.
    """
    if not paths:
        raise FldiagError("no run was given", "give one or more run folders", usage=True)
    runs = [Run.open(p) for p in paths]
    folders = distinct([r.path for r in runs])
    collection = Collected(
        [
            Member(run, Path(path) if Path(path).is_dir() else run.path, folder, i)
            for i, (run, path, folder) in enumerate(zip(runs, paths, folders, strict=True))
        ],
        [],
        [f"{text}." for text in unverified(r.path for r in runs)],
    )
    members.name(collection.members)
    members.number_models(collection.members)
    candidates = list(
        search.candidates(
            {m.run.path: m.rounds for m in collection.members},
            [Path(p) for p in places],
            FALLBACK,
            collection.notes,
        )
    )
    for member in collection.members:
        _metrics(collection, member)
        for kind in dict.fromkeys(c.kind for c in candidates):
            _choose(collection, member, [c for c in candidates if c.kind == kind])
        _personal(member)
    return collection


def compute_tables(
    collection: Collected,
    subject_options: Mapping[str, Any],
    names: Sequence[str] | None = None,
    *,
    allow_code: Sequence[str] = (),
    bar: Bar,
    tell: Callable[[str], None],
) -> None:
    """Compute the tables of these diagnostics that a run lacks, by default those of the report's first table. ``tell`` gets
    what cannot be computed. ``collect`` then finds the tables."""
    options = {k: v for k, v in subject_options.items() if v}
    for member in collection.members:
        lacking = (
            summary.lacking_tables(member)
            if names is None
            else [name for name in names if name not in member.tables]
        )
        for name in lacking:
            try:
                answer(name, [member.run.allow(allow_code)], options, bar=bar, tell=tell)
            except FldiagError as error:
                if "--model" in error.remedy:  # which a report does not take
                    remedy = f"run fldiag {name} {member.run.path} with --model, then this again"
                    error = FldiagError(error.what, remedy)
                tell(f"{member.folder}: no {name}: {error}")


def _choose(collection: Collected, member: Member, candidates: list[Candidate]) -> None:
    """The best readable table of one kind becomes the member's."""

    def rank(c: Candidate) -> tuple[Any, ...]:
        rounds, options = c.owned(member.rounds), c.about.get("options")
        has_every_round = isinstance(options, dict) and bool(options.get("every_round"))
        shared = sum(bool(c.owned(m.rounds)) for m in collection.members)
        return c.is_explicit, max(rounds), has_every_round, len(rounds), shared, c.modified

    mine = sorted((c for c in candidates if c.owned(member.rounds)), key=rank, reverse=True)
    for candidate in mine:
        if candidate.source is None:
            try:
                candidate.source = search.read(candidate)
            except (
                Exception
            ) as error:  # whatever is wrong with one table, the report shows the others
                collection.notes.append(
                    f"{candidate.csv.name} is not shown: it cannot be read as a table "
                    f"({error.what if isinstance(error, FldiagError) else type(error).__name__})."
                )
                candidates.remove(candidate)
                continue
            candidate.source.place = len(collection.sources)
            collection.sources.append(candidate.source)
        candidate.source.alternatives = max(candidate.source.alternatives, len(mine) - 1)
        member.tables[candidate.kind] = candidate.source
        return


def _metrics(collection: Collected, member: Member) -> None:
    """The table that training wrote."""
    index = member.run.index
    if not member.run.has_metrics:
        return
    try:
        frame = check(member.run.metrics)
    except Exception as error:  # as above
        collection.notes.append(
            f"{member.label}: {error.what if isinstance(error, FldiagError) else type(error).__name__}"
        )
        return
    claims = [Claim(sha, round=r) for r, sha in sorted(member.rounds.items())]
    source = Source(
        "metrics",
        f"metrics-{member.folder.replace('/', '-')}.csv",
        {**index["provenance"], "run": member.folder, "config": index["hash"]},
        csv_text(frame).encode(),
        pd.DataFrame(frame),
        claims,
        place=len(collection.sources),
    )
    collection.sources.append(source)
    member.tables["metrics"] = source


def _personal(member: Member) -> None:
    """The clients' own accuracies that training measured, where no table of them was computed."""
    metrics = member.tables.get("metrics")
    if metrics is not None and "personalise" not in member.tables:
        rows = only(metrics.frame, metric=PERSONAL, scope="client").dropna(subset=["value"])
        if len(rows) and "index" in rows.columns and rows["index"].notna().all():
            last = (
                rows[rows["round"] == rows["round"].max()] if rows["round"].notna().any() else rows
            )
            member.tables["personalise"] = replace(
                metrics, kind="personalise", frame=last, claims=[]
            )
