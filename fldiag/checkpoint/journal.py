"""What changed in a run since ``run.json`` was written: ``journal.jsonl``, one line a stored round, only ever appended to.

A line is a checksum, a space and one JSON object::

    {"journal": ID}                                        the first: run.json that names ID is the one it continues
    {"set": {...}, "drop": {...}, "rows": [...]}           keys of the index that have another value, or are gone; new metrics

The checksum is of the line and of the checksum before it, so a line cannot be changed, left out or moved unnoticed. The last line
may be cut off: a process or a machine stopped while it was written, and its round does not count. Anything else that does not
verify is damage: the lines before it count, and a warning says so. A journal that run.json does not name belongs to an earlier
run.json and says nothing.
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
#: Dicts of the index that grow with the run: a line says which of their entries changed. Of all others it holds the whole value.
GROWING = ("files", "state")
Index = dict[str, Any]


class Journal:
    """A journal that is being written. ``size``: its bytes so far."""

    def __init__(self, path: Path, identity: str):
        self.path, self.identity, self.size = path, identity, 0
        self._last = ""

    @staticmethod
    def new_identity() -> str:
        """A name that no journal had before."""
        return secrets.token_hex(8)

    def begin(self) -> None:
        """Make the file, in the place of an earlier one. Raises FldiagError when the disk refuses."""
        line, self._last = _line({"journal": self.identity}, "")
        files.write_bytes(self.path, line)
        self.size = len(line)

    def append(self, before: Index, now: Index, rows: Sequence[Row]) -> None:
        """Write down how the index changed, and the metrics that came. Raises FldiagError when the disk refuses."""
        line, digest = _line({**_change(before, now), "rows": list(rows)}, self._last)
        files.append(self.path, line, self.size)
        self._last, self.size = digest, self.size + len(line)


def snapshot(index: Index) -> Index:
    """A copy to compare the index with later."""
    return {k: dict(v) if k in GROWING else copy.deepcopy(v) for k, v in index.items()}


def replay(path: Path, identity: str, index: Index) -> list[Row]:
    """Bring an index up to date; returns the metrics since. Nothing happens where the journal is not the one of this name.

    A damaged line and what follows it do not count, and a warning says which rounds remain. Raises FldiagError for a line that
    was written so and says nothing that an index can hold.
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
    for i, entry in enumerate(_entries(content)):
        if entry is None:
            warnings.warn(
                f"line {i + 1} of {path} is damaged: the run is read up to round {index['done']}, and what was written "
                "after that does not count; --resume goes on from there",
                stacklevel=2,
            )
            break
        if i == 0 and entry.get("journal") != identity:
            return []
        if i > 0 and not _apply(entry, index, rows):
            raise FldiagError(
                f"{path} is damaged: line {i + 1} is not what was written",
                "restore it from a copy, or train again",
            )
    return rows


def is_damaged(path: Path) -> bool:
    """Whether a line of this journal does not verify, apart from a last one that was cut off."""
    return path.is_file() and None in _entries(path.read_bytes())


def _entries(content: bytes) -> Iterator[dict[str, Any] | None]:
    """What the lines say, up to the first that is damaged, which is None. A last line that was cut off says nothing."""
    lines, digest = content.split(b"\n"), ""
    for i, line in enumerate(lines[:-1]):  # what follows the last end of a line was cut off
        entry, digest = _entry(line, digest)
        if entry is None and i == len(lines) - 2 and not lines[-1] and b"\0" in line:
            return  # so was a last line whose beginning never reached the disk
        yield entry
        if entry is None:
            return


def _line(entry: Mapping[str, Any], before: str) -> tuple[bytes, str]:
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"), default=_plain).encode()
    digest = _digest(text, before)
    return digest.encode() + b" " + text + b"\n", digest


def _entry(line: bytes, before: str) -> tuple[dict[str, Any] | None, str]:
    digest, _, text = line.partition(b" ")
    if digest != _digest(text, before).encode():
        return None, ""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return (found if isinstance(found, dict) else None), digest.decode()


def _digest(text: bytes, before: str) -> str:
    return hashlib.sha256(before.encode() + text).hexdigest()[:32]


def _plain(value: Any) -> Any:
    return value.item()


def _change(before: Index, now: Index) -> dict[str, Any]:
    changed: dict[str, Any] = {
        k: v for k, v in now.items() if k not in GROWING and (k not in before or before[k] != v)
    }
    gone: dict[str, Any] = {k: None for k in before if k not in now}
    for key in GROWING:
        old, new = before[key], now[key]
        changed[key] = {k: v for k, v in new.items() if old.get(k) != v}
        gone[key] = [k for k in old if k not in new]
    return {"set": changed, "drop": gone}


def _apply(entry: Mapping[str, Any], index: Index, rows: list[Row]) -> bool:
    """Whether the entry could be applied: one that somebody wrote by hand may say anything."""
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
