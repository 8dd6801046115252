"""Folders that transformers wrote: config.json and weights as safetensors."""

from __future__ import annotations

import os
from pathlib import Path

from fldiag.errors import FldiagError
from fldiag.runs.schema import Checkpoint
from fldiag.runs.tensor_files import check_kinds, read_tensors

#: Weights as ``save_pretrained`` and the hub name them, the safest first.
FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def is_pretrained(path: Path) -> bool:
    return not os.path.isfile(path / "run.json") and any(
        os.path.isfile(path / name) for name in ("config.json", *FILES)
    )


def read_pretrained(folder: Path) -> Checkpoint:
    """The weights in a folder that ``save_pretrained`` of transformers wrote; nothing but tensors is read.

    Raises FldiagError when there are none, or a part is missing or lies elsewhere.
    """
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise FldiagError(
            f"{folder} holds no {FILES[0]}",
            "save it with model.save_pretrained(folder)",
            usage=True,
        )
    state = read_tensors(path)
    check_kinds(folder, state)
    return Checkpoint(path, state)
