"""Which tables a report shows: of every diagnostic the newest in RUN/diagnostics that is about checkpoints of that run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag import registry
from fldiag.config import recipe
from fldiag.errors import FldiagError, error_text
from fldiag.plotting import style
from fldiag.results.files import csv_text, read_csv, read_csv_bytes, read_json
from fldiag.results.table import COLUMNS, check_schema, only, split_of, table
from fldiag.runs.run import Run

#: The sections of a config that say how a run was trained.
SECTIONS = ("data", "partition", "clients", "model", "method", "train")


@dataclass
class StoredTable:
    """A table, the bytes of its csv, what the json beside it says, and what the table says is wrong with the run."""

    name: str
    content: bytes
    table: pd.DataFrame
    about: Mapping[str, Any]
    alarms: Sequence[str] = ()


@dataclass
class RunTables:
    """A run with its newest table of every diagnostic (``metrics``: what training wrote), and remarks on the others.

    ``config`` is as it was stored: a run of another version, or with a user's own method, can be reported too.
    """

    run: Run
    label: str = ""
    tables: dict[str, StoredTable] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        """What was trained."""
        return dict(self.run.about["config"])

    @property
    def data(self) -> str:
        """What tells the data apart."""
        return str(self.run.about["provenance"].get("data") or self.run.path)

    @property
    def partition(self) -> str:
        """What tells the division of the data among clients apart."""
        return str(self.run.files.get("partition.npz"))

    @property
    def settings(self) -> dict[str, Any]:
        """What the config says of training, by dotted key."""
        sections = {name: self.config.get(name) or {} for name in SECTIONS}
        options = {f"{name}.{key}": v for name, keys in sections.items() for key, v in keys.items()}
        return {"rounds": self.config.get("rounds"), **options}

    @property
    def method(self) -> str:
        """The method's display name."""
        return style.display_name(str(self.settings.get("method.name", "unknown")))

    @property
    def recipe(self) -> str:
        """What only runs have in common that differ by the seed alone. A run trained elsewhere is like no other."""
        training = str(self.run.path) if self.run.origin else recipe(self.config)
        return str([training, self.data, self.partition, self.run.done])

    def curve(self, metric: str) -> pd.DataFrame:
        """A metric of the global model by round: on test examples, else on those for training, else as it was reported."""
        metrics = self.tables["metrics"].table if "metrics" in self.tables else table([])
        rows = only(metrics, metric=metric, moment="aggregated", scope="global", index=None)
        measured = only(rows, slice=split_of(rows))
        rows = measured if len(measured) else rows
        return rows.dropna(subset=["round", "value"]).drop_duplicates("round").sort_values("round")


def collect(paths: Sequence[str | Path]) -> list[RunTables]:
    """The runs in these folders with their tables.

    Raises:
        FldiagError: No path, one that is no run, or a run twice.
    """
    runs = [RunTables(Run.open(path)) for path in paths]
    folders = {os.path.realpath(member.run.path) for member in runs}
    if not runs or len(folders) < len(runs):
        raise FldiagError("a report needs runs, each once", "give run folders", usage=True)
    for member in runs:
        read_metrics(member)
        read_tables(member)
    name_runs(runs)
    return runs


def read_metrics(member: RunTables) -> None:
    """Fill in what training wrote."""
    try:
        metrics = pd.DataFrame(check_schema(member.run.metrics))
    except Exception as error:  # whatever is wrong with a file, the report shows the others
        member.remarks.append(f"its metrics are not shown: {reason(error)}")
        return
    if len(metrics):
        content = csv_text(metrics).encode()
        member.tables["metrics"] = StoredTable("metrics.csv", content, metrics, {})


def read_tables(member: RunTables) -> None:
    """Fill in the newest tables, and remarks on those that are older, damaged, or of other weights."""
    files = [f for f in (member.run.path / "diagnostics").glob("*.json") if f.is_file()]
    for file in sorted(files, key=lambda path: (-path.stat().st_mtime, path)):
        try:
            about = read_json(file)
            kind = about.get("diagnostic")
            if kind is None:
                continue
            if kind not in registry.diagnostic:
                raise FldiagError(f"no diagnostic {kind!r} is installed here")
            if not set(checkpoints_of(about)) <= set(member.run.files.values()):
                raise FldiagError("it is of checkpoints that this run does not have")
            if kind in member.tables:
                raise FldiagError(f"{member.tables[kind].name} is newer")
            content = read_csv_bytes(file.with_suffix(".csv"), about)
            rows = check_schema(read_csv(content, dtype=COLUMNS, low_memory=False)).astype(COLUMNS)
            rows.attrs = {"diagnostic": kind, "options": about.get("options", {})}
            find_alarms = registry.diagnostic.get(kind).alarms
            alarms = find_alarms(rows) if find_alarms else ()
        except Exception as error:  # as above
            member.remarks.append(f"{file.stem} is not shown: {reason(error)}")
        else:
            member.tables[kind] = StoredTable(f"{file.stem}.csv", content, rows, about, alarms)


def checkpoints_of(about: Mapping[str, Any]) -> Iterator[str]:
    """The sha256 of every checkpoint that a table's numbers came from."""
    for key, value in about.get("checkpoints", {}).items():
        if isinstance(value, Mapping):
            yield value["sha256"]
        elif key.startswith("rounds/"):
            yield value


def name_runs(runs: Sequence[RunTables]) -> None:
    """Label runs by method, the settings in which runs of it differ, and seed; by folder too where that is not enough."""
    for member in runs:
        alike = [other.settings for other in runs if other.method == member.method]
        parts = [member.method]
        for key, value in member.settings.items():
            if any(settings.get(key) != value for settings in alike):
                parts.append(f"{style.display_name(key.rpartition('.')[2])} = {value}")
        seed = member.config.get("seed")
        member.label = ", ".join(parts if seed is None else [*parts, f"seed {seed}"])
    labels = [member.label for member in runs]
    for member in runs:
        if labels.count(member.label) > 1:
            member.label += f" ({member.run.path})"


def reason(error: Exception) -> str:
    """What was wrong, in words."""
    return error.what if isinstance(error, FldiagError) else error_text(error)
