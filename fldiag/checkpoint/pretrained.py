"""Folders that ``save_pretrained`` of transformers writes: config.json beside the weights as safetensors, whole or in shards."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch import Tensor

from fldiag.checkpoint.schema import Checkpoint
from fldiag.checkpoint.tensor_files import check_kinds, read_tensors
from fldiag.errors import FldiagError

WHOLE, SHARDS = "model.safetensors", "model.safetensors.index.json"


def is_folder(path: Path) -> bool:
    return os.path.isfile(path / "config.json") and not os.path.isfile(path / "run.json")


def read(folder: Path) -> Checkpoint:
    """The weights in the folder; nothing but tensors is read.

    Raises FldiagError when there are none as safetensors, or a shard is missing or lies elsewhere.
    """
    files = [WHOLE]
    if not (folder / WHOLE).is_file():
        try:
            files = sorted(
                set(json.loads((folder / SHARDS).read_text("utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise FldiagError(
                f"{folder} holds no {WHOLE}",
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
