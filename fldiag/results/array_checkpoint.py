"""A long evaluation kept on disk while it runs, so that an interruption loses nothing."""

from __future__ import annotations

import io
import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fldiag.errors import FldiagError


class ArrayStore:
    """Named arrays and a few plain values in one ``.npz``, under a key that says what they belong to.

    ``path`` is a file, or a directory in which the key names the file. A file of another key is never
    overwritten. Written to a temporary name, flushed and renamed, so a reader sees the old or the new file;
    ``offer`` writes at most every ``interval`` seconds, and seldom enough to cost under 5 % of the time.
    """

    def __init__(self, path: str | os.PathLike[str], interval: float = 10.0):
        self.path, self.interval = Path(path), interval
        self._wrote, self._cost = time.monotonic(), 0.0

    def _file(self, key: str) -> Path:
        return self.path / f"landscape-{key[:16]}.npz" if self.path.is_dir() else self.path

    def load(self, key: str) -> tuple[dict[str, np.ndarray], Any] | None:
        """What ``save`` wrote under this key, or None. Raises FldiagError for another key or kind."""
        file = self._file(key)
        if not file.exists():
            return None
        try:
            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            found, extra = json.loads(str(arrays.pop("manifest")))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise FldiagError(f"{file} cannot be read: {error}",
                              "delete it, or choose another file") from error
        if found != key:
            raise FldiagError(f"{file} holds points of another landscape (weights, data, grid or options)",
                              "choose another file or a directory, or delete it")
        return arrays, extra

    def save(self, key: str, arrays: dict[str, np.ndarray], extra: Any = None) -> None:
        start, file = time.monotonic(), self._file(key)
        buffer = io.BytesIO()
        everything: dict[str, Any] = {"manifest": np.array(json.dumps([key, extra])), **arrays}
        np.savez(buffer, **everything)
        part = file.with_name(f".{file.name}.{os.getpid()}.part")
        try:
            with open(part, "wb") as out:
                out.write(buffer.getbuffer())
                out.flush()
                os.fsync(out.fileno())
            os.replace(part, file)
        except OSError as error:
            raise FldiagError(f"cannot write {file}: {error.strerror}", "choose a writable place") from error
        finally:
            part.unlink(missing_ok=True)
        self._wrote = time.monotonic()
        self._cost = self._wrote - start

    def offer(self, key: str, arrays: dict[str, np.ndarray], extra: Any = None) -> None:
        """Saves when the last time was long enough ago."""
        if time.monotonic() - self._wrote >= max(self.interval, 20 * self._cost):
            self.save(key, arrays, extra)
