"""Folders that transformers wrote: config.json and weights as safetensors."""

from __future__ import annotations

import os
from pathlib import Path

from fldiag.errors import FldiagError
from fldiag.runs.schema import Checkpoint
from fldiag.runs.tensor_files import INDEX, check_kinds, read_tensors

FILES = ("config.json", "model.safetensors", "model.safetensors" + INDEX)


def is_pretrained(path: Path) -> bool:
    return any(os.path.isfile(path / name) for name in FILES) and not os.path.isfile(
        path / "run.json"
    )


def read_pretrained(folder: Path) -> Checkpoint:
    """The weights in a folder that ``save_pretrained`` of transformers wrote, also without its config.json.

    Raises FldiagError when there are none as safetensors, or a shard is missing or lies elsewhere.
    """
    file = next((folder / name for name in FILES[1:] if (folder / name).is_file()), None)
    if file is None:
        raise FldiagError(
            f"{folder} holds no {FILES[1]}",
            "save it with model.save_pretrained(folder)",
            usage=True,
        )
    state = read_tensors(file)
    check_kinds(folder, state)
    return Checkpoint(file, state)
