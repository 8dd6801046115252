"""The runs of a report with the tables that are theirs, and what most sections say of them."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag import user_code
from fldiag.errors import FldiagError
from fldiag.plotting import style, words
from fldiag.plotting.pages import Missing
from fldiag.registry import Diagnostic
from fldiag.results.files import sha256_of
from fldiag.results.select import only
from fldiag.runs.run import same_model

NO_CLIENTS = "it kept no client weights; train it again with --set checkpoint.clients=sampled"
#: The sections of a config that say how a run was trained.
SECTIONS = ("data", "partition", "clients", "model", "method", "train")


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
        match = re.search(r" client (\d+)$", self.label)
        return int(match.group(1)) if match else None


@dataclass(eq=False)
class Source:
    """A table with its provenance.

    ``name``: of its csv; ``raw``: the csv as it was written, ``frame``: the same read, both empty until the table is chosen.
    ``is_of_run``: it is of the rounds of one run, not of checkpoints. ``order``: whether it lies in a place that the user names,
    and when it was written. ``place``: which of the report's tables it is.
    """

    kind: str
    name: str
    about: dict[str, Any]
    claims: list[Claim]
    csv: Path = Path()
    is_of_run: bool = False
    order: tuple[bool, float] = (False, 0.0)
    raw: bytes = b""
    frame: pd.DataFrame = field(default_factory=pd.DataFrame)
    alternatives: int = 0
    place: int = 0

    def rounds_of(self, member: Member) -> list[int]:
        """Of a run's rounds those that the table is about; empty when it is not the run's."""
        if not self.is_of_run:
            return [member.round_of[c.sha256] for c in self.claims if c.sha256 in member.round_of]
        rounds = [c.round for c in self.claims if c.round is not None]
        is_owner = all(
            c.round is not None and member.rounds.get(c.round) == c.sha256 for c in self.claims
        )
        return rounds if is_owner else []

    @property
    def options(self) -> dict[str, Any]:
        options = self.about.get("options")
        return options if isinstance(options, dict) else {}

    @property
    def sha256(self) -> str:
        return sha256_of(self.raw)

    @property
    def file(self) -> str:
        """The name of a download: that of the table, without what file systems refuse."""
        return "".join(c if c.isalnum() or c in "._-" else "-" for c in self.name)


@dataclass
class Member:
    """A run of the report.

    ``run``: the ``fldiag.runs.run.Run``. ``argument``: its path as the user wrote it. ``folder``: the end of that path, which
    tells it from the others; ``label``: its name in the report, by method and seed; ``place``: its number; ``model``: the place
    of the first run of the same model. ``tables``: kind -> table; the kind is the diagnostic's name, with ``:VARIANT`` where it
    has variants.
    """

    run: Any
    argument: Path
    folder: str
    place: int
    label: str = ""
    model: int = 0
    look: style.Look = field(default_factory=lambda: style.look(0))
    tables: dict[str, Source] = field(default_factory=dict)

    @cached_property
    def config(self) -> dict[str, dict[str, Any]]:
        """The sections of the config as stored, not validated: a run of another version or with a user's own
        method can be reported, too."""
        return {k: v for k, v in self.run.about["config"].items() if isinstance(v, dict)}

    def setting(self, section: str, key: str, default: Any = None) -> Any:
        """An entry of the run's config."""
        return self.config.get(section, {}).get(key, default)

    @property
    def settings(self) -> dict[str, Any]:
        """What the config says of training, by dotted key."""
        return {
            "rounds": self.run.about["config"].get("rounds"),
            **{f"{s}.{k}": v for s in SECTIONS for k, v in self.config.get(s, {}).items()},
        }

    @property
    def seed(self) -> Any:
        return self.run.about["config"].get("seed")

    @cached_property
    def rounds(self) -> dict[int, str]:
        """Round -> sha256 of its checkpoint."""
        return {
            int(Path(f).stem): str(sha)
            for f, sha in self.run.files.items()
            if f.startswith("rounds/") and Path(f).stem.isdigit()
        }

    @cached_property
    def round_of(self) -> dict[str, int]:
        return {sha: r for r, sha in self.rounds.items()}

    @cached_property
    def data(self) -> str:
        """What tells the data apart: their fingerprint, or what the config says of them."""
        fingerprint = self.run.about["provenance"].get("data")
        if fingerprint:
            return str(fingerprint)
        description = {k: v for k, v in self.config.get("data", {}).items() if k != "root"}
        if not description.get("name"):  # another program's: comparable with no other run
            return f"unknown:{self.place}"
        return json.dumps(description, sort_keys=True, default=str)

    @cached_property
    def federation(self) -> str:
        """What tells the division of the data apart."""
        return str(self.run.files.get("partition.npz"))

    @property
    def keeps_clients(self) -> bool:
        return self.setting("checkpoint", "clients", "none") != "none"


@dataclass
class Collected:
    """The runs of a report, the tables that are shown, and what is to be said of the others."""

    members: list[Member]
    sources: list[Source]
    notes: list[str]

    def add(self, source: Source) -> None:
        source.place = len(self.sources)
        self.sources.append(source)

    def having(self, kind: str) -> list[tuple[Member, Source]]:
        """The runs that have a table of this kind, with it."""
        return [(m, m.tables[kind]) for m in self.members if kind in m.tables]


def name(members: Sequence[Member], labels: Sequence[str] | None = None) -> None:
    """Give every run its label, by default method and seed, and of runs that agree in both what else differs, or the folder."""
    if labels is None:
        labels = _labels(members)
        twice = Counter(labels)
        labels = [
            label if twice[label] == 1 else f"{label} ({m.folder})"
            for m, label in zip(members, labels, strict=True)
        ]
    looks = style.looks(labels)
    for m, label in zip(members, labels, strict=True):
        m.label, m.look = label, looks[label]


def _labels(members: Sequence[Member]) -> list[str]:
    """Method and seed, and between them what else differs."""
    labels = [words.method(str(m.setting("method", "name", "unknown"))) for m in members]
    keys = dict.fromkeys(key for m in members for key in m.settings)
    for key in sorted(keys, key=lambda key: not key.startswith("method.")):
        alike: dict[tuple[str, Any], list[int]] = {}
        for i, m in enumerate(members):
            alike.setdefault((labels[i], m.seed), []).append(i)
        for places in alike.values():
            values = {i: members[i].settings.get(key) for i in places}
            if len({plain(v) for v in values.values()}) > 1:
                option = words.symbol(key.partition(".")[2] or key)
                for i in (i for i in places if values[i] is not None):
                    labels[i] += f", {option} = {plain(values[i])}"
    return [
        label if m.seed is None else f"{label}, seed {m.seed}"
        for label, m in zip(labels, members, strict=True)
    ]


def number_models(members: Sequence[Member]) -> None:
    """Say of every run which is the first of the same model."""
    for i, m in enumerate(members):
        first = next((other for other in members[:i] if same_model(m.run, other.run)), m)
        m.model = first.place


def reason(error: Exception) -> str:
    """What was wrong, in words."""
    if isinstance(error, FldiagError):
        return error.what
    return f"{type(error).__name__} {error}".strip()


def plain(value: Any) -> str:
    """A setting as text."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def rows_of(source: Source, members: Sequence[Member]) -> pd.DataFrame:
    """The rows of a table that are of these runs' checkpoints; all of them where the table does not tell."""
    labels = [
        c.label for c in source.claims if c.label and any(c.sha256 in m.round_of for m in members)
    ]
    rows = only(source.frame, run=labels)
    return rows if len(rows) else source.frame


def command(verb: str, m: Member, *more: str) -> str:
    """What to type, quoted for a shell. Code that the run names is named again, as consent to import it."""
    code = dict.fromkeys(user_code.names(m.run.about["config"]).values())
    consent = [part for name in code for part in ("--allow-code", name)]
    if not m.setting("model", "name"):
        consent += ["--model", "PACKAGE.MODULE:FUNCTION"]
    return shlex.join(["fldiag", *verb.split(), str(m.argument), *more, *consent])


def absent(m: Member, verb: str, *more: str, clients: bool = False) -> Missing:
    """Why a table is not there, and what makes it. ``clients``: it needs the clients' weights."""
    if clients and not m.keeps_clients:
        return Missing(m.label, NO_CLIENTS)
    if not m.rounds:
        return Missing(m.label, "it has no checkpoint yet; train at least one round")
    return Missing(m.label, "not computed yet", command(verb, m, *more))


def absent_diagnostic(m: Member, entry: Diagnostic) -> Missing:
    """Why a run has no table of the diagnostic, and the command that makes one."""
    return absent(m, entry.name, clients=entry.on == "clients")


def worlds(members: Sequence[Member]) -> dict[str, str]:
    """Data (by what tells them apart) -> a name, all names different."""
    names: dict[str, str] = {}
    for m in members:
        if m.data not in names:
            name = str(m.setting("data", "name", "unknown data"))
            versions = [n for n in names.values() if n.split(" (")[0] == name]
            names[m.data] = f"{name} (version {len(versions) + 1})" if versions else name
    return names
