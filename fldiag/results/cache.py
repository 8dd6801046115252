"""The one cache: tables on disk under a digest of all they depend on, verified whenever they are read."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.results.files import (
    json_digest,
    sha256_of,
    with_digest,
    write_bytes,
    write_text,
)

Tell = Callable[[str], None]
#: Digits of the key in a file's name; the json holds all of them.
SHOWN = 16


class Cache:
    """Tables of a folder, each found by a name and a key.

    An entry is ``NAME-KEY.parquet`` and ``NAME-KEY.json``. The json says what the table is, holds the sha256 of the parquet's
    bytes, and a digest of its own content. Both are verified on every read: an entry with a changed bit, cut off, renamed or
    without its json is not used, so it is computed again, and the caller learns of it.

    Both files are written under temporary names and renamed, the json last. An interrupted ``put`` therefore leaves an entry
    that does not verify, never a wrong one.

    Args:
        folder: Where the entries lie; made by the first ``put``.

    >>> import tempfile
    >>> cache = Cache(tempfile.mkdtemp())
    >>> cache.get("spectrum", "a1b2") is None
    True
    >>> cache.put("spectrum", "a1b2", pd.DataFrame({"metric": ["trace"], "value": [2.5]}), {"seed": 0})
    >>> cache.get("spectrum", "a1b2")["value"].tolist()
    [2.5]
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"Cache({str(self.folder)!r})"

    def path(self, name: str, key: str, ending: str = ".parquet") -> Path:
        """The file of an entry, whether it is there or not."""
        return self.folder / f"{name.replace(':', '-')}-{key[:SHOWN]}{ending}"

    def get(self, name: str, key: str, on_damage: Tell | None = None) -> pd.DataFrame | None:
        """The table of an entry.

        Args:
            name: What kind of table it is, such as the diagnostic's name.
            key: The digest of all that the table depends on.
            on_damage: Called with a sentence about an entry that is not used although it exists.

        Returns:
            The table as it was put, or None: there is none, or it is damaged.
        """
        content = self._verified(name, key)
        frame = None if content is None else _table(content)
        if frame is None and on_damage is not None and self.path(name, key).exists():
            on_damage(
                f"cache entry {self.path(name, key, '').name} was damaged and is computed again"
            )
        return frame

    def has(self, name: str, key: str) -> bool:
        """Whether ``get`` would find a table, by the checksums alone."""
        return self._verified(name, key) is not None

    def _verified(self, name: str, key: str) -> bytes | None:
        """The bytes of an entry's table; None where there is none or the json does not vouch for it."""
        content, note = _read(self.path(name, key)), _read(self.path(name, key, ".json"))
        if content is None or note is None or not _vouches(note, name, key, content):
            return None
        return content

    def put(
        self, name: str, key: str, frame: pd.DataFrame, about: Mapping[str, Any] | None = None
    ) -> None:
        """Keep a table.

        Args:
            name, key: As for ``get``.
            frame: The table; its index is not kept.
            about: What a person reading the json wants to know: provenance, options.

        Raises:
            FldiagError: The folder or the disk refuses.
        """
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        content = buffer.getvalue()
        note = {
            "name": name,
            "key": key,
            "rows": len(frame),
            "sha256": sha256_of(content),
            "about": dict(about or {}),
        }
        write_bytes(self.path(name, key), content)
        write_text(self.path(name, key, ".json"), json.dumps(with_digest(note), indent=1))


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _table(content: bytes) -> pd.DataFrame | None:
    try:
        return pd.read_parquet(io.BytesIO(content))
    except Exception:  # a damaged file can make the reader raise anything
        return None


def _vouches(note: bytes, name: str, key: str, content: bytes) -> bool:
    """Whether the json is whole, is of this entry, and has the sha256 of this content."""
    try:
        entry = json.loads(note)
        digest = entry.pop("digest")
        mine = (entry["name"], entry["key"]) == (name, key)
        return bool(digest == json_digest(entry) and mine and entry["sha256"] == sha256_of(content))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
