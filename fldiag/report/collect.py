"""Which tables a report shows: those whose provenance names the very checkpoints of its runs.

Beside NAME.csv stands NAME.json: which diagnostic the table is of, and the sha256 of each checkpoint that its numbers came from.
A table of a run's rounds belongs to the run whose run.json lists all of them; a table of checkpoints, or of several runs, belongs
to every run that has one of them. Names of files and folders decide nothing. Looked through are, in this order: the folders or
files given (all folders below them too), the run's ``diagnostics`` folder, the folder the run lies in, and ``fldiag-out`` here.

Several tables of one kind and run: one given by name is taken first, then that which reaches the latest round, then that
of more rounds, of more of the report's runs, then the newest. The others are counted in the report's provenance.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fldiag import registry
from fldiag.diagnosis.answer import answer
from fldiag.diagnosis.options import read_names
from fldiag.diagnosis.places import FALLBACK, distinct
from fldiag.errors import FldiagError
from fldiag.registry import Diagnostic
from fldiag.report import members, summary
from fldiag.report.members import Claim, Collected, Member, Source, reason
from fldiag.results.files import csv_text, read_csv, read_csv_bytes, read_json
from fldiag.results.select import only
from fldiag.results.table import COLUMNS, PERSONAL, check
from fldiag.runs.run import Run

if TYPE_CHECKING:
    from fldiag.diagnosis.measure import Bar

_TEXT: dict[str, Any] = {column: str for column, dtype in COLUMNS.items() if dtype == "string"}
_NUMBERS = [c for c, dtype in COLUMNS.items() if dtype in ("Int64", "Float64")]


def collect(
    paths: Sequence[str | Path], places: Iterable[str | Path] = (), names: str | None = None
) -> Collected:
    """The runs and the tables that belong to them.

    ``places``: further files or folders to look through; ``names``: of the runs, with commas between them, by default their
    methods and seeds. Raises FldiagError for a path that is no run, for a run given twice, for a place that is not there, and for
    another number of names.
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
        [],
    )
    labels = None if names is None else read_names(names, len(runs))
    members.name(collection.members, labels)
    members.number_models(collection.members)
    sources = list(_sources(collection, [Path(p) for p in places]))
    for member in collection.members:
        _metrics(collection, member)
        for kind in dict.fromkeys(source.kind for source in sources):
            _choose(collection, member, [s for s in sources if s.kind == kind])
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
                answer(name, [member.run], options, allow_code=allow_code, bar=bar, tell=tell)
            except FldiagError as error:
                if "--model" in error.remedy:  # which a report does not take
                    remedy = f"run fldiag {name} {member.run.path} with --model, then this again"
                    error = FldiagError(error.what, remedy)
                tell(f"{member.folder}: no {name}: {error}")


def _sources(collection: Collected, places: Sequence[Path]) -> Iterator[Source]:
    """The tables of the runs in ``places``, in and beside their folders, and in ``fldiag-out``; not yet read.

    The collection's notes grow by what looks as if it should have been of use and is not.
    """
    foreign: list[str] = []
    folders = {m.run.path / "diagnostics" for m in collection.members}
    for file, is_explicit in _provenance_files(collection.members, places):
        csv = _table_of(file)
        try:
            about = read_json(file)
            modified = csv.stat().st_mtime
        except (OSError, ValueError, RecursionError, FldiagError) as error:
            collection.notes.append(
                f"{csv.name} is not shown: {file.name} beside it cannot be read ({reason(error)})."
            )
            continue
        if not isinstance(about, dict) or "diagnostic" not in about:
            continue
        is_expected = is_explicit or file.parent in folders
        name = str(about["diagnostic"])
        if name not in registry.diagnostic:
            if is_expected:
                collection.notes.append(
                    f"{csv.name} is not shown: no diagnostic {name!r} is installed here."
                )
            continue
        entry = registry.diagnostic.get(name)
        try:
            kind = _kind(entry, about)
        except Exception as error:  # options that the diagnostic never had: whatever they are, the report shows the other tables
            collection.notes.append(
                f"{csv.name} is not shown: its options cannot be understood ({type(error).__name__})."
            )
            continue
        order = is_explicit, modified
        source = Source(
            kind, csv.name, about, _claims(about), csv, entry.on in ("run", "clients"), order
        )
        if any(source.rounds_of(m) for m in collection.members):
            yield source
        elif is_expected:
            foreign.append(csv.name)
    if foreign:
        listing = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        subject = (
            f"{foreign[0]} is not shown: it was"
            if len(foreign) == 1
            else f"{len(foreign)} tables are not shown ({listing}): they were"
        )
        owner = "this run" if len(collection.members) == 1 else "these runs"
        collection.notes.append(f"{subject} made from other checkpoints than those of {owner}.")


def _provenance_files(
    members: Sequence[Member], places: Sequence[Path]
) -> Iterator[tuple[Path, bool]]:
    """Every json beside a csv, once, and whether it lies in ``places``: those come first."""
    for place in places:
        if not place.exists():
            raise FldiagError(
                f"{place} is not there", "give a folder that holds tables, or a table", usage=True
            )
    runs = [m.run.path for m in members]
    folders = [p for run in runs for p in (run / "diagnostics", run.parent)] + [FALLBACK]
    files = [
        (f, True)
        for p in places
        for f in ([p.with_suffix(".json")] if p.is_file() else sorted(p.rglob("*.json")))
    ]
    files += [(f, False) for p in folders if p.is_dir() for f in sorted(p.glob("*.json"))]
    real_paths: set[str] = set()
    for file, is_explicit in files:
        real = os.path.realpath(file)
        if real not in real_paths and os.path.isfile(file) and os.path.isfile(_table_of(file)):
            real_paths.add(real)
            yield file, is_explicit


def _table_of(provenance: Path) -> Path:
    return provenance.with_name(provenance.name.removesuffix(".json") + ".csv")


def _kind(entry: Diagnostic, about: dict[str, Any]) -> str:
    """The diagnostic's name, with the variant of a table that is not the usual one."""
    options = about["options"] if isinstance(about.get("options"), dict) else {}
    variant = entry.variant(options)
    return f"{entry.name}:{variant}" if variant else entry.name


def _claims(about: dict[str, Any]) -> list[Claim]:
    checkpoints, checkpoint = about.get("checkpoints"), about.get("checkpoint")
    claims = []
    for key, value in (checkpoints if isinstance(checkpoints, dict) else {"": checkpoint}).items():
        if isinstance(value, str) and str(key).isdecimal():
            claims.append(Claim(value, round=int(key)))
        elif isinstance(value, dict) and isinstance(value.get("sha256"), str):
            n, slice_name = value.get("n"), str(value.get("slice") or "")
            count = n if isinstance(n, int) else None
            claims.append(Claim(value["sha256"], str(key), slice=slice_name, n=count))
    return claims


def _read(source: Source) -> None:
    """Read the table. Raises FldiagError for a csv that was changed, and FldiagError, OSError or ValueError for what is no
    table."""
    raw = read_csv_bytes(source.csv, source.about)
    frame = check(read_csv(raw, dtype=_TEXT, low_memory=False))
    for column in (*_NUMBERS, "x", "y", "low", "high"):
        if column in frame.columns:
            frame[column] = pd.to_numeric(frame[column], errors="raise")
    source.raw, source.frame = raw, frame


def _choose(collection: Collected, member: Member, sources: list[Source]) -> None:
    """The best readable table of one kind becomes the member's."""

    def rank(source: Source) -> tuple[Any, ...]:
        is_explicit, modified = source.order
        rounds, has_every_round = source.rounds_of(member), bool(source.options.get("every_round"))
        shared = sum(bool(source.rounds_of(m)) for m in collection.members)
        return is_explicit, max(rounds), has_every_round, len(rounds), shared, modified

    mine = sorted((s for s in sources if s.rounds_of(member)), key=rank, reverse=True)
    for source in mine:
        if source not in collection.sources:
            try:
                _read(source)
            except Exception as error:  # whatever is wrong with it, the report shows the others
                note = (
                    f"{source.name} is not shown: it cannot be read as a table ({reason(error)})."
                )
                if note not in collection.notes:
                    collection.notes.append(note)
                continue
            collection.add(source)
        source.alternatives = max(source.alternatives, len(mine) - 1)
        member.tables[source.kind] = source
        return


def _metrics(collection: Collected, member: Member) -> None:
    """The table that training wrote."""
    if not member.run.has_metrics:
        return
    try:
        frame = pd.DataFrame(check(member.run.metrics))
    except Exception as error:  # as above
        collection.notes.append(f"{member.label}: {reason(error)}")
        return
    member.tables["metrics"] = source = Source(
        "metrics",
        f"metrics-{member.folder.replace('/', '-')}.csv",
        {**member.run.about["provenance"], "run": member.folder, "config": member.run.hash},
        [Claim(sha, round=r) for r, sha in sorted(member.rounds.items())],
    )
    source.raw, source.frame = csv_text(frame).encode(), frame
    collection.add(source)


def _personal(member: Member) -> None:
    """The clients' own accuracies that training measured, where no table of them was computed."""
    metrics = member.tables.get("metrics")
    if metrics is not None and "personalise" not in member.tables:
        rows = only(metrics.frame, metric=PERSONAL, scope="client").dropna(subset=["value"])
        if len(rows) and "index" in rows.columns and rows["index"].notna().all():
            has_rounds = rows["round"].notna().any()
            last = rows[rows["round"] == rows["round"].max()] if has_rounds else rows
            table = replace(metrics, kind="personalise", frame=last, claims=[])
            member.tables["personalise"] = table
