"""Folders that transformers wrote: config.json and weights as safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch import Tensor

from fldiag.errors import FldiagError
from fldiag.runs.schema import Checkpoint
from fldiag.runs.tensor_files import check_kinds, read_tensors

ONE_FILE, SHARDS = "model.safetensors", "model.safetensors.index.json"


def is_pretrained(path: Path) -> bool:
    return os.path.isfile(path / "config.json") and not os.path.isfile(path / "run.json")


def read_pretrained(folder: Path) -> Checkpoint:
    """The weights in a folder that ``save_pretrained`` of transformers wrote; nothing but tensors is read.

    Raises FldiagError when there are none as safetensors, or a shard is missing or lies elsewhere.
    """
    files = [ONE_FILE]
    if not (folder / ONE_FILE).is_file():
        try:
            files = sorted(
                set(json.loads((folder / SHARDS).read_text("utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise FldiagError(
                f"{folder} holds no {ONE_FILE}",
                "save it with model.save_pretrained(folder)",
                usage=True,
            ) from None
    state: dict[str, Tensor] = {}
    for name in files:
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise FldiagError(
                f"{folder / SHARDS} names {name!r}, which is not a safetensors file in this folder",
                "use the original",
            )
        state |= read_tensors(folder / name)
    check_kinds(folder, state)
    return Checkpoint(folder / files[0], state)
