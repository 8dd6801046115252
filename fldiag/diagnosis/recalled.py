"""Answers that were written before, found by what was asked: weights, data and PyTorch stay where they are.

The cache of tables knows a table by the weights and data themselves, which takes opening them. Of a run on data that come with
scikit-learn, by a model and a diagnostic of fldiag, everything that decides the answer can be said without that: the run's
index, whose checksums of the run's files are verified, the options, the code, the libraries and the processor. Where this, the
table's checksum or that of a written file does not hold, nothing is recalled, and the question takes its usual way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag import known
from fldiag.checkpoint.run import Run
from fldiag.diagnosis import places
from fldiag.diagnosis.options import plain
from fldiag.errors import FldiagError
from fldiag.plotting import sheet
from fldiag.registry import Diagnostic
from fldiag.results.cache import Cache
from fldiag.results.files import sha256
from fldiag.results.machine import machine
from fldiag.results.provenance import digest

#: Where an answer's table stands in the cache: under this and the name that was asked for.
NAME = "asked-"
LIBRARIES = ("torch", "numpy", "pandas", "scipy", "scikit-learn", "matplotlib")
#: What decides how many threads and which instructions and devices are used.
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "CUDA_VISIBLE_DEVICES",
)


@dataclass
class Given:
    """An answer: of which diagnostic, with which options, written to which files (in order)."""

    name: str
    table: pd.DataFrame
    options: dict[str, Any]
    files: list[Path]


def key(entry: Diagnostic, targets: Sequence[Any], options: Mapping[str, Any]) -> str:
    """A digest of all that the answer depends on; "" where that cannot be said without opening what it is asked of."""
    own = entry.build.__module__.startswith("fldiag.") and plain(options) == dict(options)
    if not own or not all(isinstance(t, Run) and _usual(t) for t in targets):
        return ""
    try:
        for run in targets:
            for name in run.index["files"]:
                if not name.startswith("state/"):
                    run.verified(name)
    except FldiagError:  # the usual way says what is wrong
        return ""
    runs = zip(places.distinct([t.path for t in targets]), targets, strict=True)
    devices = sorted(str(p) for p in Path("/dev").glob("nvidia[0-9]*"))
    return digest(
        entry.name,
        dict(options),
        vars(sheet.current()),
        [[name, t.index, t.metrics_digest] for name, t in runs],
        _code(),
        [version(name) for name in LIBRARIES],
        [os.environ.get(name) for name in VARIABLES],
        machine(),
        devices,
    )


def _usual(run: Run) -> bool:
    """Whether data, model and method are fldiag's own, and the data come with scikit-learn."""
    config = run.index["config"]
    names = {
        kind: config.get(section, {}).get("name")
        for kind, section in {"datasets": "data", "models": "model", "methods": "method"}.items()
    }
    found = {kind: known.built_in()[kind].get(str(name)) for kind, name in names.items()}
    data = found["datasets"]
    return (
        run.model is None
        and run.data is None
        and all(found.values())
        and bool(data and data["meta"].get("embedded"))
    )


def _code() -> list[Any]:
    """What tells versions of fldiag's own files apart."""
    root = Path(__file__).parents[1]
    return [
        [str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns]
        for p in sorted(root.rglob("*.py"))
    ]


def recall(folder: Path, name: str, key: str, tell: Callable[[str], None]) -> list[Given]:
    """The answers that were remembered, with the remarks that were made; none where a file is missing or was changed."""
    cache = Cache(folder / "cache")
    notes, found = cache.about(NAME + name, key), []
    for one in notes.get("answers", []):
        table, about = cache.get(NAME + one, key, on_damage=tell), cache.about(NAME + one, key)
        paths = {folder / file: digest for file, digest in about.get("files", {}).items()}
        if table is None or any(
            not path.is_file() or sha256(path) != digest for path, digest in paths.items()
        ):
            return []
        table.attrs = {"diagnostic": one, "options": about["options"]}
        found.append(Given(one, table, about["options"], list(paths)))
    for text in notes.get("notes", []) if found else []:
        tell(text)
    return found


def remember(
    folder: Path, name: str, key: str, answers: Sequence[Given], notes: Sequence[str]
) -> None:
    """Keep the answers, those of flags first: the one that was asked for names them all."""
    for one in reversed(answers):
        if (one is answers[0] and one.name != name) or any(p.parent != folder for p in one.files):
            return  # another diagnostic answered
        Cache(folder / "cache").put(
            NAME + one.name,
            key,
            one.table,
            {
                "options": plain(one.options),
                "files": {p.name: sha256(p) for p in one.files},
                "answers": [a.name for a in answers],
                "notes": list(notes),
            },
        )
