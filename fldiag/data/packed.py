"""Inputs of several tensors as rows of numbers: what holds, cuts and stores one tensor of inputs then holds them too.

A row lists an example's tensors one after the other in int64: whole numbers as they are, floats by the bits of their single
precision. Nothing is lost, and the same inputs are the same rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fldiag.errors import FldiagError

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
#: So many dicts and tuples may lie in each other.
DEEP = 50
#: Keys of dicts and places in tuples that lead to a tensor.
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Packed:
    """How a row is laid out: the place, shape and kind of each of an example's tensors."""

    fields: tuple[tuple[Place, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, inputs: Any) -> Packed:
        """The layout of these inputs: a tensor, or tensors in dicts and tuples, whose first axis counts the examples."""
        return cls(tuple((place, tuple(t.shape[1:]), _kind(t)) for place, t in _leaves(inputs)))

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
        return torch.cat([_numbers(t).reshape(len(t), -1) for _, t in _leaves(inputs)], 1)

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
                len(place) <= DEEP and not any(place[:n] in places for n in range(len(place)))
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


def _leaves(part: Any, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    if isinstance(part, Tensor):
        yield place, part
        return
    for key, inner in part.items() if isinstance(part, Mapping) else enumerate(part):
        yield from _leaves(inner, (*place, key))


def _kind(t: Tensor) -> str:
    return "float32" if t.is_floating_point() else str(t.dtype).removeprefix("torch.")


def _numbers(t: Tensor) -> Tensor:
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
