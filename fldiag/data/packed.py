"""Inputs of several tensors as rows of numbers: what holds, cuts and stores one tensor of inputs then holds them too."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.data.arrays import KEYS
from fldiag.data.dataset import ARRAYS, Dataset
from fldiag.errors import FldiagError

#: Under what an npz file says that its arrays are stored as they are, and how its rows are laid out ("": they are no such rows).
FORM = "form"
#: What a tensor of examples may hold.
KINDS = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)
}


@dataclass(frozen=True)
class Packed:
    """How a row of int64 lists an example's tensors, one after the other: whole numbers as they are, floats by the bits of their
    single precision. Nothing is lost, and the same inputs are the same rows.

    Args:
        text: JSON, of each tensor its name among a model's arguments (or its place among them; "" of a single tensor), the shape
            of an example, and the kind of its numbers.
    """

    text: str

    @property
    def fields(self) -> list[tuple[str | int, list[int], str]]:
        """What the text says."""
        return list(json.loads(self.text))

    @classmethod
    def of(cls, inputs: Any) -> Packed:
        """The layout of a tensor, or of a dict or tuple of tensors, whose first axis counts the examples.

        >>> Packed.of({"ids": torch.zeros(5, 7, dtype=torch.int64), "mask": torch.ones(5, 7, dtype=torch.bool)}).fields
        [['ids', [7], 'int64'], ['mask', [7], 'bool']]
        """
        fields = [(key, t.shape[1:], _kind(t)) for key, t in _tensors(inputs).items()]
        if wrong := [kind for *_, kind in fields if kind not in KINDS]:
            raise FldiagError(f"the inputs hold {wrong[0]}, not one of {', '.join(KINDS)}")
        return cls(json.dumps(fields))

    def rows(self, inputs: Any) -> Tensor:
        """Inputs of n examples as int64 [n, m]. Raises FldiagError for others than it was made of."""
        if Packed.of(inputs) != self:
            raise FldiagError("the inputs of some examples have another form", usage=True)
        return torch.cat([_numbers(t).flatten(1) for t in _tensors(inputs).values()], 1)

    def inputs(self, rows: Tensor, dtype: torch.dtype) -> Any:
        """The inputs that these rows hold: a dict, a tuple, or a tensor; floats in ``dtype``."""
        tensors: dict[Any, Tensor] = {}
        pieces = rows.split([math.prod(shape) for _, shape, _ in self.fields], 1)
        for (key, shape, kind), piece in zip(self.fields, pieces, strict=True):
            is_float = kind == "float32"
            t = piece.int().view(torch.float32).to(dtype) if is_float else piece.to(KINDS[kind])
            tensors[key] = t.reshape(len(t), *shape)
        if all(isinstance(key, int) for key in tensors):
            return tuple(tensors.values())
        return tensors.get("", tensors)


def save(file: Any, dataset: Dataset) -> None:
    """Write the arrays of a data set as npz, as they are, and the layout of their rows."""
    arrays = {k: getattr(dataset, n).cpu().numpy() for k, n in zip(KEYS, ARRAYS, strict=True)}
    form = dataset.packed.text if dataset.packed else ""
    np.savez(file, **arrays | {FORM: np.array([form])})


def layout_of(path: Path) -> Packed | None:
    """How the rows of numbers in an npz file are laid out; None where they are no such rows."""
    with np.load(path, allow_pickle=False) as file:
        text = str(file[FORM][0]) if FORM in file else ""
    return Packed(text) if text else None


def _tensors(inputs: Any) -> dict[Any, Tensor]:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return dict(enumerate(inputs)) if isinstance(inputs, tuple) else {"": inputs}


def _kind(t: Tensor) -> str:
    return "float32" if t.is_floating_point() else str(t.dtype).removeprefix("torch.")


def _numbers(t: Tensor) -> Tensor:
    t = t.detach().cpu()
    return (t.float().contiguous().view(torch.int32) if t.is_floating_point() else t).long()
