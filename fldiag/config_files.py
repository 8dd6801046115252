"""Files that a config names, and whose content is part of what a run is: a partition, and weights to start from."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fldiag.errors import FldiagError, first_line

#: Hexadecimal digits of a digest in a config.
DIGITS = 32
#: How numpy names arrays that are saved without a name.
_UNNAMED = re.compile(r"arr_(\d+)")


def read_partition(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Client name -> sorted indices of its training examples, from an npz or JSON file or the folder of a run.

    npz: a run's partition.npz, or one array of indices for each client, named by it. JSON: {"client": [indices]}, or a
    list of lists. Raises FldiagError for anything else; nothing in the file is executed.
    """
    path = Path(path)
    file = _file_of_run(path) if path.is_dir() else path
    remedy = "give an npz or JSON file: client -> indices of its training examples"
    try:
        parts = _read_json(file) if file.suffix == ".json" else _read_npz(file)
    except FileNotFoundError:
        raise FldiagError(f"partition {path} is not there", remedy, usage=True) from None
    except Exception as error:  # a damaged file can make its reader raise anything
        raise FldiagError(f"{path} is not a partition: {first_line(error)}", remedy) from None
    for name, index in parts.items():
        if index.ndim != 1 or index.dtype.kind not in "iu" or (len(index) and index[0] < 0):
            values = f"{index.dtype} {list(index.shape)}"
            raise FldiagError(
                f"{path}: client {name} has {values}, not indices of examples", remedy
            )
    if not parts:
        raise FldiagError(f"{path} names no client", remedy)
    return {name: index.astype(np.int64) for name, index in parts.items()}


def _file_of_run(folder: Path) -> Path:
    """The partition of a run, as the run wrote it."""
    try:
        sha256 = json.loads((folder / "run.json").read_text("utf-8"))["files"]["partition.npz"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise FldiagError(
            f"{folder} is not the folder of a run that says which examples belong to which client",
            "give such a run, or an npz or JSON file: client -> indices",
            usage=True,
        ) from None
    file = folder / "partition.npz"
    if not file.is_file() or file_digest(file) != sha256[:DIGITS]:
        raise FldiagError(
            f"{file} is not the file this run wrote (its sha256 differs from run.json)",
            "restore the original file; to use this one as it is, copy it out of the run folder",
        )
    return file


def _read_json(file: Path) -> dict[str, np.ndarray]:
    content = json.loads(file.read_text("utf-8"))
    if isinstance(content, list):
        content = dict(enumerate(content))
    if not all(isinstance(indices, list) for indices in content.values()):
        raise ValueError("its JSON is no dict or list of lists")
    return _sorted(content)


def _read_npz(file: Path) -> dict[str, np.ndarray]:
    with np.load(file, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if "kind" in arrays:
        raise ValueError("it holds the recipe of a partition; set partition.kind to that kind")
    if arrays.keys() == {"indices", "offsets"}:
        return _sorted(dict(enumerate(split_indices(**arrays))))
    return _sorted({_UNNAMED.sub(r"\1", name): index for name, index in arrays.items()})


def _sorted(parts: Mapping[str | int, np.ndarray | list[int]]) -> dict[str, np.ndarray]:
    return {
        str(client): np.sort(np.asarray(index if len(index) else np.empty(0, dtype=np.int64)))
        for client, index in parts.items()
    }


def split_indices(indices: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    """The clients' indices as a run's partition.npz holds them. Raises ValueError where the arrays do not fit each other."""
    flat = all(a.dtype == np.int64 and a.ndim == 1 for a in (indices, offsets)) and len(offsets) > 1
    if not flat or offsets[0] != 0 or offsets[-1] != len(indices) or (np.diff(offsets) < 0).any():
        raise ValueError("its offsets do not match its indices")
    return np.split(indices, offsets[1:-1])


def partition_digest(parts: Mapping[str, np.ndarray]) -> str:
    """Names a partition whichever file it comes from: SHA-256 over the clients and their indices."""
    digest = hashlib.sha256()
    for client in sorted(parts):
        digest.update(f"{client}:{len(parts[client])}:".encode())
        digest.update(parts[client].astype("<i8").tobytes())
    return digest.hexdigest()[:DIGITS]


def kept_initial(path: str) -> str:
    """Where a run keeps the initial weights that its config names, in its folder."""
    return f"initial/weights{Path(path).suffix}"


def file_digest(file: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:DIGITS]
