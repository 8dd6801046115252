"""Long work kept on disk while it runs, arrays or units, so that what was interrupted goes on from there."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fldiag.errors import FldiagError
from fldiag.registry import Progress
from fldiag.results.files import write_atomic

if TYPE_CHECKING:
    from fldiag.execution.pool import Pool


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
        file_key, extra, arrays = _read(file)
        if file_key != key:
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


def packed(plain: Any) -> np.ndarray:
    """What JSON can hold, as an array of bytes; floats come back to the bit.

    >>> unpacked(packed([{"metric": "loss", "value": 0.1, "stderr": None}, float("inf")]))
    [{'metric': 'loss', 'value': 0.1, 'stderr': None}, inf]
    """
    return np.frombuffer(
        json.dumps(plain, default=lambda value: value.item()).encode(), dtype=np.uint8
    )


def unpacked(content: np.ndarray) -> Any:
    return json.loads(content.tobytes())


class FinishedItems:
    """Finished items of one table, by their names, in one file that lasts until the table is whole.

    A value is a nest of dict, list, tuple, str, numbers, None, arrays and tensors. Where the disk refuses, that is told once and
    nothing more is kept.
    """

    def __init__(self, store: SpareStore, key: str):
        self.store, self.key = store, key
        entry = store.load(key)
        self._contents: dict[str, np.ndarray] = {} if entry is None else dict(entry[0])

    def __contains__(self, name: str) -> bool:
        return name in self._contents

    def __getitem__(self, name: str) -> Any:
        return unpack(self._contents[name])

    def names(self) -> list[str]:
        return list(self._contents)

    def keep(self, name: str, value: Any) -> None:
        self._contents[name] = pack(value)
        self.store.offer(self.key, self._contents)

    def replace(self, names: Sequence[str], name: str, value: Any) -> None:
        """Keep a value instead of those that it was made of."""
        for part in names:
            del self._contents[part]
        self.keep(name, value)

    def save(self) -> None:
        if self._contents:
            self.store.save(self.key, self._contents)


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


class KeptUnits:
    """Results of units, each found by what the unit is called (``str``).

    Args:
        store: a file, or an ArrayStore, that keeps what is finished (its refusal ends the work, but for a SpareStore); None
            keeps nothing.
        key: tells what the results depend on, besides the unit; asked only where something is kept.
        pack: a result -> an array; ``unpack`` makes the result of it again. By default what JSON can hold.
    """

    def __init__(
        self,
        store: Any,
        key: Callable[[], str],
        pack: Callable[[Any], np.ndarray] = packed,
        unpack: Callable[[np.ndarray], Any] = unpacked,
    ):
        self.store = ArrayStore(store) if isinstance(store, (str, os.PathLike)) else store
        self.key = key() if self.store is not None else ""
        self.pack, self.unpack = pack, unpack
        entry = None if self.store is None else self.store.load(self.key)
        self.contents: dict[str, np.ndarray] = {} if entry is None else entry[0]

    def results(
        self,
        pool: Pool,
        units: Sequence[Any],
        progress: Progress | None = None,
        then: Callable[[Any, Any], Any] = lambda unit, result: result,
        name: Callable[[Any], str] = str,
    ) -> list[Any]:
        """The results of all units in their order; those found before are not computed again. ``then`` (unit, result) -> what
        becomes of a result here, and is kept. ``name``: what a unit is called; each has a name of its own."""
        if len({name(unit) for unit in units}) < len(units):
            raise ValueError(
                "two units of one name: the results of one would be taken for the other's"
            )
        left = [unit for unit in units if name(unit) not in self.contents]
        coming, done = pool.map(left), len(units) - len(left)
        results = []
        if progress and left:
            progress(done, len(units), name(left[0]))
        with self.saved():
            for unit in units:
                is_new = name(unit) not in self.contents
                results.append(self.result(name(unit), lambda unit=unit: then(unit, next(coming))))  # type: ignore[misc]
                if progress and is_new:
                    done += 1
                    progress(done, len(units), name(unit))
        return results

    def result(self, unit: Any, make: Callable[[], Any]) -> Any:
        """The result of one unit, made now unless it was found."""
        if (content := self.contents.get(str(unit))) is not None:
            return self.unpack(content)
        value = make()
        self._keep(str(unit), value)
        return value

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Whatever ends the work before its time, Ctrl-C above all: what is finished is on the disk, where that has room."""
        try:
            yield
        except BaseException:
            if self.store is not None and self.contents:
                with suppress(FldiagError):  # what ended the work is what the caller hears of
                    self.store.save(self.key, self.contents)
            raise

    def _keep(self, name: str, result: Any) -> None:
        if self.store is not None:
            self.contents[name] = self.pack(result)
            self.store.offer(self.key, self.contents)
