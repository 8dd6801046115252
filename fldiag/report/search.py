"""Tables on disk: their provenance is read first, and the tables themselves only when they are chosen."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag import registry
from fldiag.errors import FldiagError
from fldiag.registry import Diagnostic
from fldiag.report.members import Claim, Source
from fldiag.results.files import read_csv, read_csv_bytes, read_json
from fldiag.results.table import COLUMNS, check

_TEXT: dict[str, Any] = {column: str for column, dtype in COLUMNS.items() if dtype == "string"}


@dataclass
class Candidate:
    """A provenance file that was read; its table not yet. ``is_of_run``: it is of the rounds of one run, not of checkpoints;
    ``is_explicit``: it lies in a place that the user names."""

    kind: str
    is_of_run: bool
    csv: Path
    about: dict[str, Any]
    claims: list[Claim]
    is_explicit: bool
    modified: float
    source: Source | None = None

    def owned(self, rounds: Mapping[int, str]) -> list[int]:
        """Of a run's rounds (round -> sha256) those that the table is about; empty when it is not the run's."""
        if self.is_of_run:
            mine = bool(self.claims) and all(
                c.round is not None and rounds.get(c.round) == c.sha256 for c in self.claims
            )
            return [c.round for c in self.claims if c.round is not None] if mine else []
        round_of = {sha: r for r, sha in rounds.items()}
        return [round_of[c.sha256] for c in self.claims if c.sha256 in round_of]


def candidates(
    runs: Mapping[Path, Mapping[int, str]], places: Sequence[Path], fallback: Path, notes: list[str]
) -> Iterator[Candidate]:
    """What there is of the runs (folder -> round -> sha256): in ``places``, in and beside their folders, in ``fallback``.

    ``notes`` grows by what looks as if it should have been of use and is not.
    """
    foreign: list[str] = []
    for file, is_explicit in _provenance_files(runs, places, fallback):
        csv = _table_of(file)
        try:
            about = read_json(file)
            modified = csv.stat().st_mtime
        except (OSError, ValueError, RecursionError):
            notes.append(
                f"{file.name} beside {csv.name} cannot be read, so its table is not shown."
            )
            continue
        except FldiagError as error:
            notes.append(f"{csv.name} is not shown: {error.what}.")
            continue
        if not isinstance(about, dict):
            continue
        is_expected = is_explicit or any(file.parent == run / "diagnostics" for run in runs)
        name = str(
            about.get("diagnostic") or csv.name.removesuffix(".csv").split("-")[0]
        )  # early versions did not name it
        if name not in registry.diagnostic:
            if is_expected and "diagnostic" in about:
                notes.append(f"{csv.name} is not shown: no diagnostic {name!r} is installed here.")
            continue
        entry = registry.diagnostic.get(name)
        try:
            kind = _kind(entry, about)
        except Exception as error:  # options that the diagnostic never had: whatever they are, the report shows the other tables
            notes.append(
                f"{csv.name} is not shown: its options cannot be understood ({type(error).__name__})."
            )
            continue
        if kind is None:
            continue
        candidate = Candidate(
            kind, entry.on == "run", csv, about, _claims(about), is_explicit, modified
        )
        if any(candidate.owned(rounds) for rounds in runs.values()):
            yield candidate
        elif is_expected:
            foreign.append(csv.name)
    if foreign:
        owner = "this run" if len(runs) == 1 else "these runs"
        subject = (
            f"{foreign[0]} is not shown: it was"
            if len(foreign) == 1
            else f"{len(foreign)} tables are not shown ({', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''}): they were"
        )
        notes.append(f"{subject} made from other checkpoints than those of {owner}.")


def _provenance_files(
    runs: Iterable[Path], places: Sequence[Path], fallback: Path
) -> Iterator[tuple[Path, bool]]:
    """Every json beside a csv, once, and whether it lies in ``places``: those come first."""
    for place in places:
        if not place.exists():
            raise FldiagError(
                f"{place} is not there", "give a folder that holds tables, or a table", usage=True
            )
    folders = [p for run in runs for p in (run / "diagnostics", run.parent)] + [fallback]
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


def _kind(entry: Diagnostic, about: dict[str, Any]) -> str | None:
    """The diagnostic's name, with its variant where it has some; None for what no report shows."""
    options = about["options"] if isinstance(about.get("options"), dict) else {}
    variant = entry.variant(options)
    return None if variant is None else f"{entry.name}:{variant}" if variant else entry.name


def _claims(about: dict[str, Any]) -> list[Claim]:
    checkpoints, checkpoint = about.get("checkpoints"), about.get("checkpoint")
    claims = []
    for key, value in (checkpoints if isinstance(checkpoints, dict) else {"": checkpoint}).items():
        if isinstance(value, str) and str(key).isdecimal():
            claims.append(Claim(value, round=int(key)))
        elif isinstance(value, dict) and isinstance(value.get("sha256"), str):
            n = value.get("n")
            claims.append(
                Claim(
                    value["sha256"],
                    str(key),
                    slice=str(value.get("slice") or ""),
                    n=n if isinstance(n, int) else None,
                )
            )
    return claims


def read(candidate: Candidate) -> Source:
    """The table. Raises FldiagError for a csv that was changed, and FldiagError, OSError or ValueError for what is no table."""
    raw = read_csv_bytes(candidate.csv, candidate.about)
    frame = check(read_csv(raw, dtype=_TEXT, low_memory=False))
    for column in (
        "value",
        "stderr",
        "residual",
        "round",
        "client",
        "client_b",
        "index",
        "x",
        "y",
        "low",
        "high",
    ):
        if column in frame.columns:
            frame[column] = pd.to_numeric(frame[column], errors="raise")
    return Source(candidate.kind, candidate.csv.name, candidate.about, raw, frame, candidate.claims)
