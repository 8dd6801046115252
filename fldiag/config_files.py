"""Files that a config names: a partition, and weights to start from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from fldiag.errors import FldiagError, first_line


def read_partition(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Client name -> indices of its training examples.

    Args:
        path: JSON ``{"client": [indices]}``, a list of lists, or the partition.npz of a run. Nothing in it is executed.

    Raises:
        FldiagError: anything else.
    """
    path = Path(path)
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                content = np.split(file["indices"], file["offsets"][1:-1])
        else:
            content = json.loads(path.read_text("utf-8"))
        parts = content if isinstance(content, dict) else dict(enumerate(content))
        return {str(client): _indices(part) for client, part in parts.items()}
    except Exception as error:  # a damaged file can make its reader raise anything
        raise FldiagError(
            f"{path} is not a partition: {first_line(error)}",
            "give JSON, client -> indices of its training examples, or the partition.npz of a run",
            usage=True,
        ) from None


def _indices(part: list[int] | np.ndarray) -> np.ndarray:
    index = np.asarray(part) if len(part) else np.empty(0, dtype=np.int64)
    return index.astype(np.int64, casting="safe")


def kept_initial(path: str) -> str:
    """Where a run keeps the initial weights that its config names, in its folder."""
    return f"initial/weights{Path(path).suffix}"
