"""A long evaluation kept on disk while it runs, so that an interruption loses nothing."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fldiag.errors import FldiagError
from fldiag.results.files import write_atomic


class ArrayStore:
    """Named arrays and a few plain values in one ``.npz``, under a key that says what they belong to.

    ``path`` is a file, or a directory in which the key names the file. A file of another key is never
    overwritten. Written to a temporary name, flushed and renamed, so a reader sees the old or the new file;
    ``offer`` writes at most every ``interval`` seconds, and seldom enough to cost under 5 % of the time.
    The file holds a checksum of its arrays, which is verified when it is read.
    """

    def __init__(self, path: str | os.PathLike[str], interval: float = 10.0):
        self.path, self.interval = Path(path), interval
        self._wrote, self._cost = time.monotonic(), 0.0

    def _file(self, key: str) -> Path:
        return self.path / f"landscape-{key[:16]}.npz" if self.path.is_dir() else self.path

    def load(self, key: str) -> tuple[dict[str, np.ndarray], Any] | None:
        """What ``save`` wrote under this key, or None. Raises FldiagError for another key, and for a damaged file."""
        file = self._file(key)
        if not file.exists():
            return None
        found, extra, arrays = _read(file)
        if found != key:
            raise FldiagError(
                f"{file} holds what was found of other weights, data or options",
                "choose another file or a directory, or delete it",
            )
        return arrays, extra

    def intact(self) -> bool:
        """Whether the file can be read and its checksum holds, whatever its key."""
        try:
            _read(self.path)
        except FldiagError:
            return False
        return True

    def save(self, key: str, arrays: dict[str, np.ndarray], extra: Any = None) -> None:
        """Write the arrays now. Raises FldiagError when the disk refuses."""
        start, file = time.monotonic(), self._file(key)
        manifest = json.dumps([key, extra, _checksum(key, arrays, extra)])
        buffer = io.BytesIO()
        everything: dict[str, Any] = {"manifest": np.array(manifest), **arrays}
        np.savez(buffer, **everything)
        write_atomic(file, lambda out: out.write(buffer.getbuffer()))
        self._wrote = time.monotonic()
        self._cost = self._wrote - start

    def offer(self, key: str, arrays: dict[str, np.ndarray], extra: Any = None) -> None:
        """Saves when the last time was long enough ago."""
        if time.monotonic() - self._wrote >= max(self.interval, 20 * self._cost):
            self.save(key, arrays, extra)


class SpareStore(ArrayStore):
    """One without which the evaluation goes on: where the disk refuses, that is told once and nothing more is kept.

    ``tell`` does not travel to other processes.
    """

    def __init__(
        self, path: str | os.PathLike[str], tell: Callable[[str], None] = lambda text: None
    ):
        super().__init__(path)
        self._tell, self.refused = tell, False

    def __reduce__(self) -> Any:
        return SpareStore, (self.path,)

    def save(self, key: str, arrays: dict[str, np.ndarray], extra: Any = None) -> None:
        if self.refused:
            return
        try:
            super().save(key, arrays, extra)
        except FldiagError as error:
            self.refused = True
            self._tell(f"finished parts are not kept from here on: {error.what}")


def _read(file: Path) -> tuple[str, Any, dict[str, np.ndarray]]:
    """Key, plain values and arrays of a file. Raises FldiagError when it is damaged."""
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        key, extra, checksum = json.loads(str(arrays.pop("manifest")))
    except Exception as error:  # a damaged archive can make the reader raise anything
        raise FldiagError(
            f"{file} cannot be read: {error}", "delete it, or choose another file"
        ) from error
    if checksum != _checksum(key, arrays, extra):
        raise FldiagError(
            f"{file} was changed or damaged: its checksum does not hold",
            "delete it, or choose another file",
        )
    return key, extra, arrays


def _checksum(key: str, arrays: Mapping[str, np.ndarray], extra: Any) -> str:
    state = hashlib.sha256(json.dumps([key, extra]).encode())
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        state.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        state.update(array.tobytes())
    return state.hexdigest()
