"""Files that a config names: a partition, and weights to start from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from fldiag.errors import FldiagError, first_line


def read_partition(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Client name -> sorted indices of its training examples.

    Args:
        path: JSON ``{"client": [indices]}``, a list of lists, or the partition.npz of a run. Nothing in it is executed.

    Raises:
        FldiagError: anything else.
    """
    path = Path(path)
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                content = split_indices(archive["indices"], archive["offsets"])
        else:
            content = json.loads(path.read_text("utf-8"))
        parts = content if isinstance(content, dict) else dict(enumerate(content))
        return {str(client): _sorted(indices) for client, indices in parts.items()}
    except Exception as error:  # a damaged file can make its reader raise anything
        raise FldiagError(
            f"{path} is not a partition: {first_line(error)}",
            "give JSON, client -> indices of its training examples, or the partition.npz of a run",
            usage=True,
        ) from None


def _sorted(indices: list[int] | np.ndarray) -> np.ndarray:
    index = np.sort(np.asarray(indices if len(indices) else np.empty(0, dtype=np.int64)))
    if index.ndim != 1 or index.dtype.kind not in "iu" or (index < 0).any():
        raise ValueError(f"{index.dtype} {list(index.shape)} are not indices of examples")
    return index.astype(np.int64)


def split_indices(indices: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    """The clients' indices as a run's partition.npz holds them. Raises ValueError where the arrays do not fit each other."""
    flat = all(a.dtype == np.int64 and a.ndim == 1 for a in (indices, offsets)) and len(offsets) > 1
    if not flat or offsets[0] != 0 or offsets[-1] != len(indices) or (np.diff(offsets) < 0).any():
        raise ValueError("its offsets do not match its indices")
    return np.split(indices, offsets[1:-1])


def kept_initial(path: str) -> str:
    """Where a run keeps the initial weights that its config names, in its folder."""
    return f"initial/weights{Path(path).suffix}"
