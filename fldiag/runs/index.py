"""What ``run.json`` says, read and checked: whoever reads a run may rely on the kinds of what stands in it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fldiag.errors import FldiagError, check_name, counted, short_path
from fldiag.results import files
from fldiag.results.table import Row
from fldiag.runs import journal
from fldiag.runs.schema import DEEPEST_FILE, is_too_deep

FILE = "run.json"
#: Of an index that is whole, and of one that a journal continues: a reader that knows no journals must not take it for whole.
#: CHAINED: continued by a journal in which each checksum covered the one before.
WHOLE, CHAINED, CONTINUED = 1, 2, 3
#: What every index has, and of what kind.
KINDS: dict[str, type] = {
    "hash": str,
    "status": str,
    "config": dict,
    "state": dict,
    "files": dict,
    "provenance": dict,
    "done": int,
    "schema": int,
}
SECTIONS = ("data", "partition", "clients", "model", "method", "train", "checkpoint", "metrics")
#: Key of a segment of clients' states in ``state``.
STATES = r"clients-(\d{8,})"
#: Names of files that say of which round they are.
NUMBERED = {"rounds": r"rounds/\d{1,9}\.(pt|safetensors)", "steps": r"steps/\d{1,9}\.parquet"}
EDITED = "the file was edited; restore it or train again"


def read_index(path: Path) -> tuple[Path, dict[str, Any], list[Row]]:
    """The run folder at ``path`` (or of the run.json there), its index brought up to date by its journal, and the metrics that
    stand in the journal only.

    Raises FldiagError when its name is no text, there is no run.json, or it cannot be read, was changed, or does not say what an
    index says.
    """
    check_name(path)
    file = path / FILE if os.path.isdir(path) else path
    if not os.path.exists(file):
        problem = (
            "is not a run folder: it has no run.json" if os.path.isdir(path) else "is not there"
        )
        raise FldiagError(
            f"{short_path(path)} {problem}",
            "give the folder of a run, which holds run.json",
            usage=True,
        )
    if not os.path.isfile(file):
        raise FldiagError(f"{file} is not valid: it is not a file", EDITED)
    try:
        index = files.read_json(file)
        check(index)
        if index["schema"] == CHAINED:
            raise FldiagError(
                f"run {path} was begun under an earlier fldiag, which wrote another kind of journal",
                "train it again, in another folder",
            )
        rows = continued(file.parent, index)
    except OSError as error:
        raise FldiagError(
            f"{file} cannot be read: {error.strerror}", "make it readable, or copy the run again"
        ) from None
    except RecursionError:
        raise FldiagError(f"{file} is not valid: it is nested too deeply", EDITED) from None
    except (ValueError, KeyError, TypeError) as error:
        raise FldiagError(f"{file} is not valid: {error}", EDITED) from None
    if index["schema"] > CONTINUED:
        raise FldiagError(
            f"run {path} has schema {index['schema']}, this fldiag reads up to {CONTINUED}",
            "update fldiag",
        )
    return file.parent, index, rows


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write run.json, with its digest. Raises FldiagError when the folder or the disk refuses."""
    files.write_text(folder / FILE, json.dumps(files.with_digest(index), indent=1, sort_keys=True))


def unverified(folders: Iterable[Path]) -> list[str]:
    """In a sentence, if there is one: which of these runs have a run.json without digest, as earlier versions wrote it."""
    names = [
        str(f) for f in folders if files.DIGEST not in json.loads((f / FILE).read_text("utf-8"))
    ]
    rest = f" and {counted(len(names) - 1, 'other run')}" if len(names) > 1 else ""
    return (
        [
            f"{names[0]}{rest}: run.json has no digest (an earlier version wrote it), so a change of it would not be noticed"
        ]
        if names
        else []
    )


def continued(folder: Path, index: dict[str, Any]) -> list[Row]:
    """Bring an index up to date by the journal that it names, if it names one; returns the metrics that came since.

    Raises FldiagError when the journal cannot be read, and ValueError when what it makes of the index is none.
    """
    name = index.pop("journal", None)
    if name is None:
        return []
    rows = journal.replay(folder / journal.NAME, name, index)
    check(index)
    index["schema"] = WHOLE
    return rows


def check(index: Any) -> None:
    """Raises ValueError, in words, for what is no index of a run."""
    if not isinstance(index, dict):
        raise ValueError("not a run index")
    if is_too_deep(index, DEEPEST_FILE):
        raise ValueError(f"it is nested more than {DEEPEST_FILE} levels deep")
    wrong = [key for key, kind in KINDS.items() if type(index.get(key)) is not kind]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} is missing or of the wrong kind")
    if not 0 <= index["done"] < 10**9:
        raise ValueError(f"done = {index['done']}")
    stateless = isinstance(index.get("origin"), dict) or index.get("record") is True
    if index["done"] and "server" not in index["state"] and not stateless:
        raise ValueError("state is missing or of the wrong kind")
    superseded = index.get("gone", {})
    if not isinstance(superseded, dict):
        raise ValueError("gone is of the wrong kind")
    for key, names in (("files", index["files"]), ("state", index["state"]), ("gone", superseded)):
        odd = [k for k, v in names.items() if not isinstance(v, str)]
        if odd:
            raise ValueError(f"{key}: {odd[0]!r} is a {type(names[odd[0]]).__name__}, not text")
    odd = [k for k in index["state"] if k != "server" and not re.fullmatch(STATES, k)]
    if odd:
        raise ValueError(f"state has {odd[0]!r}, which is no segment of clients' states")
    for key in ("metrics", "journal"):
        if not isinstance(index.get(key, ""), str):
            raise ValueError(f"{key} is a {type(index[key]).__name__}, not text")
    _check_names(index, superseded)
    _check_config(index["config"])
    extended = index.get("extended", [])
    if not isinstance(extended, list) or not all(
        isinstance(e, dict) and type(e.get("rounds")) is int for e in extended
    ):
        raise ValueError("extended is of the wrong kind")
    segments = index.get("segments", [])
    if not isinstance(segments, list) or not all(
        isinstance(s, dict) and isinstance(s.get("checkpoint", {}), dict) for s in segments
    ):
        raise ValueError("segments is of the wrong kind")


def _check_names(index: dict[str, Any], superseded: dict[str, Any]) -> None:
    """No listed file lies elsewhere than where a run has it."""
    for name in [*index["files"], *index["state"].values(), *superseded]:
        folder = name.partition("/")[0]
        if (
            name.startswith("/")
            or ".." in name.split("/")
            or "\0" in name
            or (folder in NUMBERED and not re.fullmatch(NUMBERED[folder], name))
        ):
            raise ValueError(f"it lists {name!r}, which no run has")
    tables = [index["metrics"]] if "metrics" in index else []
    for folder, names in (
        ("state", index["state"].values()),
        ("metrics", tables),
    ):  # which training and pruning delete
        odd = [name for name in names if not name.startswith(f"{folder}/")]
        if odd:
            raise ValueError(f"{folder} is {odd[0]!r}, which no run has")


def _check_config(config: dict[str, Any]) -> None:
    """The sections, and the numbers that are read from the config as it is stored."""
    wrong = [key for key in SECTIONS if not isinstance(config.get(key, {}), dict)]
    if wrong:
        raise ValueError(f"config: {wrong[0]} is no section")
    for section, key, least in (("checkpoint", "every", 1), ("clients", "total", 0)):
        value = config.get(section, {}).get(key, least)
        if type(value) is not int or value < least:
            raise ValueError(f"config: {section}.{key} = {value!r}")
