"""Finished parts of one table in one file, so that an interrupted computation resumes."""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fldiag.errors import FldiagError
from fldiag.results.files import write_atomic

#: Seconds between two writes; and as many times the seconds of the last write, so that writing takes under 5 % of the time.
INTERVAL, PATIENCE = 10.0, 20


class FinishedItems:
    """Finished items of a table, by their names, until the table is whole.

    A value is a nest of dict, list, tuple, str, numbers, None, arrays and tensors. The file holds a checksum, which is verified
    when it is read. Where the disk refuses, that is told once and nothing more is kept.

    Args:
        path: the file; what an earlier computation left there is read.
        key: the digest of all that the table depends on.
        tell: is told in one sentence that the file was damaged, or cannot be written.
    """

    def __init__(self, path: Path, key: str, tell: Callable[[str], None] = lambda text: None):
        self.path, self.key, self.tell = path, key, tell
        self.is_refused = False
        self._last_write, self._cost = time.monotonic(), 0.0
        self._contents: dict[str, np.ndarray] = {}
        if path.exists():
            try:
                self._contents = _read(path, key)
            except Exception:  # a damaged archive can make the reader raise anything
                tell(
                    f"the partial result of an interrupted computation in {path.name} is damaged; the computation starts "
                    "again"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._contents

    def __getitem__(self, name: str) -> Any:
        return unpack(self._contents[name])

    def names(self) -> list[str]:
        return list(self._contents)

    def keep(self, name: str, value: Any) -> None:
        self._contents[name] = pack(value)
        if time.monotonic() - self._last_write >= max(INTERVAL, PATIENCE * self._cost):
            self.save()

    def replace(self, names: Sequence[str], name: str, value: Any) -> None:
        """Keep a value instead of those that it was made of."""
        for part in names:
            del self._contents[part]
        self.keep(name, value)

    def save(self) -> None:
        """Write what is finished now."""
        if self.is_refused or not self._contents:
            return
        start, buffer = time.monotonic(), io.BytesIO()
        manifest = np.array(json.dumps([self.key, _checksum(self.key, self._contents)]))
        numbers = {str(i): content for i, content in enumerate(self._contents.values())}
        names = np.array(json.dumps(list(self._contents)))
        np.savez(buffer, manifest=manifest, names=names, **numbers)  # type: ignore[arg-type]
        try:
            write_atomic(self.path, lambda file: file.write(buffer.getbuffer()))
        except FldiagError as error:
            self.is_refused = True
            self.tell(f"finished parts are not kept from here on: {error.what}")
        self._last_write = time.monotonic()
        self._cost = self._last_write - start


def _read(path: Path, key: str) -> dict[str, np.ndarray]:
    """What ``save`` wrote under this key. Raises whatever a damaged file makes its reader raise."""
    with np.load(path, allow_pickle=False) as archive:
        file_key, checksum = json.loads(str(archive["manifest"]))
        names = json.loads(str(archive["names"]))
        contents = {name: archive[str(i)] for i, name in enumerate(names)}
    if file_key != key or checksum != _checksum(key, contents):
        raise ValueError("another key, or another content")
    return contents


def _checksum(key: str, contents: Mapping[str, np.ndarray]) -> str:
    state = hashlib.sha256(json.dumps([key, list(contents)]).encode())
    for content in contents.values():
        state.update(json.dumps([content.dtype.str, content.shape]).encode())
        state.update(content.tobytes())
    return state.hexdigest()


def pack(value: Any) -> np.ndarray:
    """A nest of plain values, arrays and tensors as an array of bytes; numbers come back to the bit.

    >>> unpack(pack({3: [0.1, None, np.arange(2), (float("inf"),)]}))
    {3: [0.1, None, array([0, 1]), (inf,)]}
    """
    arrays: list[np.ndarray] = []

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {"dict": [[plain(k), plain(v)] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [plain(v) for v in value]}
        if hasattr(value, "detach"):
            arrays.append(value.detach().cpu().numpy())
            return {"tensor": len(arrays) - 1}
        if isinstance(value, np.ndarray):
            arrays.append(value)
            return {"array": len(arrays) - 1}
        return value.item() if isinstance(value, np.generic) else value

    text = json.dumps(plain(value))
    buffer = io.BytesIO()
    np.savez(buffer, text=np.array(text), **{str(i): array for i, array in enumerate(arrays)})  # type: ignore[arg-type]
    return np.frombuffer(buffer.getvalue(), dtype=np.uint8)


def unpack(content: np.ndarray) -> Any:
    """What ``pack`` packed; tensors lie on the CPU."""
    with np.load(io.BytesIO(content.tobytes()), allow_pickle=False) as archive:
        text, arrays = str(archive["text"]), {n: archive[n] for n in archive.files if n != "text"}

    def value_of(plain: Any) -> Any:
        if not isinstance(plain, dict):
            return plain
        ((kind, content),) = plain.items()
        if kind == "dict":
            return {value_of(k): value_of(v) for k, v in content}
        if kind == "array":
            return arrays[str(content)]
        if kind == "tensor":
            import torch  # only here: most values are plain

            return torch.from_numpy(arrays[str(content)])
        values = [value_of(v) for v in content]
        return tuple(values) if kind == "tuple" else values

    return value_of(json.loads(text))
