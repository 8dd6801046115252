"""Tables on disk: their provenance is read first, and the tables themselves only when they are chosen."""

from __future__ import annotations

import io
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
from fldiag.results.files import read_csv_bytes, read_json
from fldiag.results.table import COLUMNS, check

_TEXT: dict[str, Any] = {column: str for column, dtype in COLUMNS.items() if dtype == "string"}


@dataclass
class Candidate:
    """A provenance file that was read; its table not yet. ``whole``: it is of the rounds of one run, not of checkpoints."""

    kind: str
    whole: bool
    csv: Path
    about: dict[str, Any]
    claims: list[Claim]
    given: bool
    modified: float
    source: Source | None = None

    def owned(self, rounds: Mapping[int, str]) -> list[int]:
        """Of a run's rounds (round -> sha256) those that the table is about; empty when it is not the run's."""
        if self.whole:
            mine = bool(self.claims) and all(
                c.round is not None and rounds.get(c.round) == c.sha256 for c in self.claims
            )
            return [c.round for c in self.claims if c.round is not None] if mine else []
        found = {sha: r for r, sha in rounds.items()}
        return [found[c.sha256] for c in self.claims if c.sha256 in found]


def candidates(
    runs: Mapping[Path, Mapping[int, str]], places: Sequence[Path], fallback: Path, notes: list[str]
) -> Iterator[Candidate]:
    """What there is of the runs (folder -> round -> sha256): in ``places``, in and beside their folders, in ``fallback``.

    ``notes`` grows by what looks as if it should have been of use and is not.
    """
    others: list[str] = []
    for file, given in _provenance_files(runs, places, fallback):
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
        wanted = given or any(file.parent == run / "diagnostics" for run in runs)
        name = str(
            about.get("diagnostic") or csv.name.removesuffix(".csv").split("-")[0]
        )  # early versions did not name it
        if name not in registry.diagnostic:
            if wanted and "diagnostic" in about:
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
        made = Candidate(kind, entry.on == "run", csv, about, _claims(about), given, modified)
        if any(made.owned(rounds) for rounds in runs.values()):
            yield made
        elif wanted:
            others.append(csv.name)
    if others:
        whose = "this run" if len(runs) == 1 else "these runs"
        what = (
            f"{others[0]} is not shown: it was"
            if len(others) == 1
            else f"{len(others)} tables are not shown ({', '.join(others[:3])}{', ...' if len(others) > 3 else ''}): they were"
        )
        notes.append(f"{what} made from other checkpoints than those of {whose}.")


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
    seen: set[str] = set()
    for file, given in files:
        real = os.path.realpath(file)
        if real not in seen and os.path.isfile(file) and os.path.isfile(_table_of(file)):
            seen.add(real)
            yield file, given


def _table_of(provenance: Path) -> Path:
    return provenance.with_name(provenance.name.removesuffix(".json") + ".csv")


def _kind(entry: Diagnostic, about: dict[str, Any]) -> str | None:
    """The diagnostic's name, with its variant where it has some; None for what no report shows."""
    options = about["options"] if isinstance(about.get("options"), dict) else {}
    variant = entry.variant(options)
    return None if variant is None else f"{entry.name}:{variant}" if variant else entry.name


def _claims(about: dict[str, Any]) -> list[Claim]:
    many, one = about.get("checkpoints"), about.get("checkpoint")
    found = []
    for key, value in (many if isinstance(many, dict) else {"": one}).items():
        if isinstance(value, str) and str(key).isdecimal():
            found.append(Claim(value, round=int(key)))
        elif isinstance(value, dict) and isinstance(value.get("sha256"), str):
            n = value.get("n")
            found.append(
                Claim(
                    value["sha256"],
                    str(key),
                    slice=str(value.get("slice") or ""),
                    n=n if isinstance(n, int) else None,
                )
            )
    return found


def read(candidate: Candidate) -> Source:
    """The table. Raises FldiagError for a csv that was changed, and FldiagError, OSError or ValueError for what is no table."""
    raw = read_csv_bytes(candidate.csv, candidate.about)
    frame = check(pd.read_csv(io.BytesIO(raw), dtype=_TEXT, low_memory=False))
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
