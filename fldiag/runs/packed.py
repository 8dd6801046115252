"""Data in a recorded run's own folder: inputs of several tensors packed into rows, and the file that holds them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.data import Dataset
from fldiag.data.arrays import KEYS, count_classes, inputs, targets
from fldiag.errors import FldiagError

#: In a file whose test split is empty because there are no test examples.
NO_TEST = "untested"
#: Under what a file says that its targets are no classes: ``numbers`` [n, outputs], or ``positions``, a label each [n, ...].
TARGETS = "targets"
#: Under what an npz file of rows says how they are laid out; an empty text where they are tokens.
FORM = "form"
#: What a tensor of examples may hold.
KINDS = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        torch.float32,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
#: Depth to which dicts and tuples may be nested.
MAX_DEPTH = 50
#: Keys of dicts and places in tuples that lead to a tensor.
Place = tuple[str | int, ...]


def read_recorded(path: Path, name: str) -> Dataset:
    """The data set that a recorded run holds in its folder."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    train_x, train_y, test_x, test_y = (arrays[key] for key in KEYS)
    xs = [np.moveaxis(x, -1, 1) if x.ndim == 4 else x for x in (train_x, test_x)]
    packed = None
    if FORM not in arrays:
        xs = [x.astype(np.float32) if x.ndim == 2 else x for x in xs]
    elif form := str(arrays[FORM][0]):
        packed = Packed.read(form, math.prod(xs[0].shape[1:]))
    is_positions = TARGETS in arrays and str(arrays[TARGETS]) == "positions"
    ys = [
        torch.from_numpy(y.astype(np.int64)) if is_positions else targets(y, name)
        for y in (train_y, test_y)
    ]
    tensors = [inputs(x, name) for x in xs]
    classes = count_classes(name, *ys)
    return Dataset(name, tensors[0], ys[0], tensors[1], ys[1], classes, packed=packed)


@dataclass(frozen=True)
class Packed:
    """Inputs of several tensors as rows of numbers: what holds, cuts and stores one tensor of inputs then holds them too.

    A row lists an example's tensors one after the other in int64: whole numbers as they are, floats by the bits of their single
    precision. Nothing is lost, and the same inputs are the same rows. ``fields``: the place, shape and kind of each tensor.
    """

    fields: tuple[tuple[Place, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, inputs: Any) -> Packed:
        """The layout of these inputs: a tensor, or tensors in dicts and tuples, whose first axis counts the examples."""
        return cls(tuple((place, tuple(t.shape[1:]), _kind(t)) for place, t in _tensors(inputs)))

    @property
    def size(self) -> int:
        """Numbers in a row."""
        return sum(math.prod(shape) for _, shape, _ in self.fields)

    def rows(self, inputs: Any) -> Tensor:
        """Inputs of n examples as int64 [n, size]. Raises FldiagError for others than it was made of."""
        if Packed.of(inputs) != self:
            raise FldiagError(
                f"inputs of another form: {Packed.of(inputs)}, not {self}",
                "give all examples alike",
                usage=True,
            )
        return torch.cat([_whole_numbers(t).reshape(len(t), -1) for _, t in _tensors(inputs)], 1)

    def inputs(self, rows: Tensor, dtype: torch.dtype) -> Any:
        """The inputs that these rows hold; floats in ``dtype``."""
        tree: Any = {}
        pieces = rows.long().split([math.prod(shape) for _, shape, _ in self.fields], 1)
        for (place, shape, kind), piece in zip(self.fields, pieces, strict=True):
            t = (
                piece.to(torch.int32).view(torch.float32).to(dtype)
                if kind == "float32"
                else piece.to(KINDS[kind])
            )
            path, at = ("", *place), tree  # one name above all: a tensor alone has no place
            for key in path[:-1]:
                at = at.setdefault(key, {})
            at[path[-1]] = t.reshape(len(t), *shape)
        return _tuples(tree[""])

    def __str__(self) -> str:
        return ", ".join(
            f"{'.'.join(map(str, place)) or 'inputs'} {kind} {list(shape)}"
            for place, shape, kind in self.fields
        )

    def text(self) -> str:
        """As JSON."""
        return json.dumps(self.fields)

    @classmethod
    def read(cls, text: str, size: int) -> Packed:
        """From JSON. Raises FldiagError where it does not describe rows of ``size`` numbers."""
        try:
            layout = cls(
                tuple(
                    (tuple(place), tuple(map(int, shape)), str(kind))
                    for place, shape, kind in json.loads(text)
                )
            )
            fits = layout.size == size and all(
                kind in KINDS
                and min(shape, default=0) >= 0
                and all(isinstance(key, (str, int)) for key in place)
                for place, shape, kind in layout.fields
            )
            places = {place for place, *_ in layout.fields}
            fits &= len(places) == len(layout.fields) and all(
                len(place) <= MAX_DEPTH and not any(place[:n] in places for n in range(len(place)))
                for place in places
            )
        except (ValueError, TypeError):
            fits = False
        if not fits:
            raise FldiagError(
                f"the form of the inputs does not describe rows of {size} numbers",
                "the file was edited; use the original",
            )
        return layout


def _tensors(part: Any, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    if isinstance(part, Tensor):
        yield place, part
        return
    for key, inner in part.items() if isinstance(part, Mapping) else enumerate(part):
        yield from _tensors(inner, (*place, key))


def _kind(t: Tensor) -> str:
    return "float32" if t.is_floating_point() else str(t.dtype).removeprefix("torch.")


def _whole_numbers(t: Tensor) -> Tensor:
    t = t.detach().cpu()
    return (
        t.to(torch.float32).contiguous().view(torch.int32) if t.is_floating_point() else t
    ).long()


def _tuples(part: Any) -> Any:
    """Dicts by place as tuples."""
    if not isinstance(part, dict):
        return part
    inner = {key: _tuples(value) for key, value in part.items()}
    return tuple(inner.values()) if all(isinstance(key, int) for key in inner) else inner
