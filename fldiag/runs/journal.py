"""What changed in a run since ``run.json`` was written: ``journal.jsonl``, one line a stored round, only ever appended to.

A line is a checksum, a space and one JSON object::

    {"line": 1, "journal": ID}                                 the first: run.json names the journal that continues it by ID
    {"line": 2, "set": {...}, "drop": {...}, "rows": [...]}    keys of the index with a new value, keys that went; new metrics

The checksum and the number verify a line by itself. The last line may be cut off: a process or a machine stopped while it was
written, and its round does not count. Any other line that does not verify is damage: the lines before it count, and a warning
says so. A journal that run.json does not name belongs to an earlier run.json and is ignored.
"""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fldiag.errors import FldiagError
from fldiag.results import files
from fldiag.results.table import Row

NAME = "journal.jsonl"
#: Dicts of the index that grow with the run: a line holds their changed entries only. Of all other keys it holds the whole value.
GROWING = ("files", "state")
Index = dict[str, Any]


class Journal:
    """A journal that is being written. ``size``: its bytes so far."""

    def __init__(self, path: Path, identity: str):
        self.path, self.identity = path, identity
        self.lines, self.size = 0, 0

    @staticmethod
    def new_identity() -> str:
        """A name that no journal had before."""
        return secrets.token_hex(8)

    def begin(self) -> None:
        """Create the file, in the place of an earlier one. Raises FldiagError when the disk refuses."""
        line = encode_line(1, {"journal": self.identity})
        files.write_bytes(self.path, line)
        self.lines, self.size = 1, len(line)

    def append(self, before: Index, now: Index, rows: Sequence[Row]) -> None:
        """Write down how the index changed, and the new metrics. Raises FldiagError when the disk refuses."""
        line = encode_line(self.lines + 1, {**_change(before, now), "rows": list(rows)})
        files.append(self.path, line, self.size)
        self.lines, self.size = self.lines + 1, self.size + len(line)


def snapshot(index: Index) -> Index:
    """A copy to compare the index with later."""
    return {k: dict(v) if k in GROWING else copy.deepcopy(v) for k, v in index.items()}


def replay(path: Path, identity: str, index: Index) -> list[Row]:
    """Bring an index up to date; returns the metrics since. Does nothing if the journal has another identity.

    A damaged line and the lines after it do not count, and a warning says which rounds remain. Raises FldiagError for a line
    that verifies but does not describe a change of an index.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []  # stopped between run.json and the journal
    except OSError as error:
        raise FldiagError(
            f"{path} cannot be read: {error.strerror}", "make it readable, or copy the run again"
        ) from None
    rows = list[Row]()
    for number, entry in enumerate(_entries(content), 1):
        if entry is None:
            warnings.warn(
                f"line {number} of {path} is damaged: the run is read up to round {index['done']}, and what was written "
                "after that does not count; --resume goes on from there",
                stacklevel=2,
            )
            break
        if number == 1 and entry.get("journal") != identity:
            return []
        if number > 1 and not _apply(entry, index, rows):
            raise FldiagError(
                f"{path} is damaged: line {number} is not what was written",
                "restore it from a copy, or train again",
            )
    return rows


def is_damaged(path: Path) -> bool:
    """Whether a line of this journal does not verify, apart from a last one that was cut off."""
    return path.is_file() and None in _entries(path.read_bytes())


def encode_line(number: int, entry: Mapping[str, Any]) -> bytes:
    """A line of the journal, with its checksum and its end."""
    numbered = {"line": number, **entry}
    text = json.dumps(
        numbered, sort_keys=True, separators=(",", ":"), default=lambda value: value.item()
    ).encode()
    return _checksum(text) + b" " + text + b"\n"


def _entries(content: bytes) -> Iterator[dict[str, Any] | None]:
    """The entries of the lines; None for the first damaged line, which ends them. A last line that was cut off is left out."""
    *lines, rest = content.split(
        b"\n"
    )  # after the last end of a line stands a line that was cut off
    for number, line in enumerate(lines, 1):
        entry = _decode_line(number, line)
        if entry is None and number == len(lines) and not rest and b"\0" in line:
            return  # the beginning of the last line never reached the disk
        yield entry
        if entry is None:
            return


def _decode_line(number: int, line: bytes) -> dict[str, Any] | None:
    """The entry of a line; None if its checksum or number is wrong."""
    checksum, _, text = line.partition(b" ")
    if checksum != _checksum(text):
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and entry.get("line") == number else None


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:32].encode()


def _change(before: Index, now: Index) -> dict[str, Any]:
    changed: dict[str, Any] = {
        k: v for k, v in now.items() if k not in GROWING and (k not in before or before[k] != v)
    }
    dropped: dict[str, Any] = {k: None for k in before if k not in now}
    for key in GROWING:
        old, new = before[key], now[key]
        changed[key] = {k: v for k, v in new.items() if old.get(k) != v}
        dropped[key] = [k for k in old if k not in new]
    return {"set": changed, "drop": dropped}


def _apply(entry: Mapping[str, Any], index: Index, rows: list[Row]) -> bool:
    """Apply an entry to an index. False if it does not describe a change: somebody may have written it by hand."""
    try:
        for key, value in entry["set"].items():
            index[key] = {**index[key], **value} if key in GROWING else value
        for key, names in entry["drop"].items():
            if names is None:
                index.pop(key, None)
                continue
            for name in names:
                index[key].pop(name, None)
        rows += [dict(row) for row in entry["rows"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    return True
