"""Arrays of files and of users, checked and brought into the form of a data set."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.errors import FldiagError, first_line

KEYS = ("train_images", "train_labels", "test_images", "test_labels")
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


def read_npz(
    path: str | os.PathLike[str], *, join_val: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training inputs and labels, test inputs and labels of an npz file with the four ``KEYS``.

    Images are N,H,W or N,H,W,C and come back as [n, C, H, W]; features [n, d], or whole numbers where the file has a ``FORM``;
    labels int64 [n], or what the file's ``TARGETS`` says. The test split may be empty where the file has ``NO_TEST``. With
    ``join_val`` the file's val_images and val_labels, if it has them, follow the training examples.

    Raises FldiagError for a missing or damaged file, missing keys, arrays of Python objects (they would have
    to be unpickled) and arrays that do not fit together.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise FldiagError(
                    f"{path} holds one array, not an npz archive",
                    f"save {', '.join(KEYS)} with np.savez",
                )
            missing = [key for key in KEYS if key not in file.files]
            if missing:
                present = ", ".join(file.files) or "nothing"
                raise FldiagError(
                    f"{path} lacks {', '.join(missing)} (it has {present})",
                    f"save the arrays {', '.join(KEYS)} with np.savez",
                )
            arrays = {key: _member(file, key, path) for key in KEYS}
            rows, untested = FORM in file.files, NO_TEST in file.files
            kind = str(file[TARGETS]) if TARGETS in file.files else "classes"
            if join_val and {"val_images", "val_labels"} & set(file.files):
                _join_val(arrays, file, path)
    except FileNotFoundError:
        raise FldiagError(f"no file {path}", "check the path after npz:") from None
    except FldiagError:
        raise
    except Exception as error:  # a damaged archive can make the reader raise anything
        raise FldiagError(
            f"{path} is not a readable npz file ({first_line(error)})",
            "write it again with np.savez",
        ) from None
    out = []
    for split in ("train", "test"):
        x, y = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if len(x) != len(y) or (len(x) == 0 and not (split == "test" and untested)):
            raise FldiagError(
                f"{path}: {len(x)} {split}_images and {len(y)} {split}_labels",
                "give one label per input, and at least one input in each split",
            )
        source = f"{path}: {split}_images"
        out += [
            inputs(x, source) if rows else _channels_first(x, source),
            _targets(y, kind, f"{path}: {split}_labels"),
        ]
    return out[0], out[1], out[2], out[3]


def form_of(path: str | os.PathLike[str], size: int) -> Packed | None:
    """How rows of so many numbers in a readable npz file are laid out; None where they are no inputs of several tensors."""
    with np.load(path, allow_pickle=False) as file:
        text = "".join(map(str, file[FORM][:1])) if FORM in file.files else ""
    return Packed.read(text, size) if text else None


def ready(x: Tensor, device: str | torch.device, dtype: torch.dtype) -> Tensor:
    """Model inputs on a device and in its precision; tokens stay integers."""
    return x.to(device, dtype if x.is_floating_point() else None)


def inputs(x: Any, source: str) -> Tensor:
    """Inputs as uint8 or float32, layout kept; rows of int32 or int64 are tokens and stay integers.

    Raises FldiagError for other kinds of arrays.
    """
    if (
        str(getattr(x, "dtype", "")).removeprefix("torch.") in ("int32", "int64")
        and np.ndim(x) == 2
    ):
        return torch.as_tensor(x).detach().long().contiguous()
    if not isinstance(x, Tensor):
        array = np.asarray(x)
        if array.dtype.kind not in "biuf":
            raise FldiagError(
                f"{source} is an array of {array.dtype}", "use uint8 pixels or floats"
            )
        dtype = np.uint8 if array.dtype == np.uint8 else np.float32
        x = torch.from_numpy(np.array(array, dtype=dtype, order="C"))
    if x.is_complex():
        raise FldiagError(f"{source} is a tensor of {x.dtype}", "use uint8 pixels or floats")
    return x.detach().contiguous() if x.dtype == torch.uint8 else x.detach().float().contiguous()


def labels(y: Any, source: str) -> Tensor:
    """Class labels as int64 [n]; a last axis of length 1 is dropped. Raises FldiagError for anything else."""
    y = y.detach().cpu() if isinstance(y, Tensor) else y
    array = np.asarray(y)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise FldiagError(
            f"{source} is {array.dtype} {list(array.shape)}", "give one whole number per input"
        )
    if len(array) and array.min() < 0:
        raise FldiagError(
            f"{source} holds {array.min()} at position {array.argmin()}",
            "number the classes from 0",
        )
    return torch.from_numpy(array.astype(np.int64))


def _targets(y: np.ndarray, kind: str, source: str) -> Tensor:
    """Labels int64 [n]; of kind ``numbers`` float32 [n, outputs], of kind ``positions`` int64 [n, ...]. Raises FldiagError for
    other arrays."""
    if kind == "classes":
        return labels(y, source)
    dtypes = {"numbers": ("f", np.float32), "positions": ("iu", np.int64)}
    if kind not in dtypes or y.dtype.kind not in dtypes[kind][0] or y.ndim < 2:
        raise FldiagError(
            f"{source} is {y.dtype} {list(y.shape)}, and the targets are said to be {kind}",
            "numbers: floats [n, outputs]; positions: whole numbers [n, ...]; else leave targets out",
        )
    return torch.from_numpy(y.astype(dtypes[kind][1]))


def moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of every channel of [n, C, H, W] or feature of [n, d], uint8 as pixels in [0, 1].

    Summed in float64, to the same bits on every processor, as they are part of what names the data; a constant channel gets
    deviation 1.
    """
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    per_channel = x[:, 0].numel()

    def chunks() -> Iterator[Tensor]:
        return (chunk.transpose(0, 1).flatten(1).double() for chunk in x.split(2048))

    # Chunks keep the float64 copy small; two passes avoid the cancellation of E[x^2] - E[x]^2.
    sums = [_total(chunk) for chunk in chunks()]
    mean = _total(torch.stack(sums, 1)) / (per_channel * scale)
    squares = [_total((chunk / scale - mean.unsqueeze(1)).square()) for chunk in chunks()]
    var = _total(torch.stack(squares, 1)) / per_channel
    std = torch.where(var > 1e-20, var.sqrt(), 1.0)
    return tuple(mean.tolist()), tuple(std.tolist())


def _total(a: Tensor) -> Tensor:
    """Sums of the rows, [C, m] -> [C]: one half is added to the other until one column is left, an order that no processor
    and no number of threads changes."""
    while (m := a.shape[1]) > 1:
        half = m // 2
        folded = a[:, :half] + a[:, half : 2 * half]
        a = torch.cat([folded, a[:, -1:]], 1) if m % 2 else folded
    return a[:, 0]


def spread(y: Tensor, count: int) -> Tensor:
    """``count`` of the n positions, sorted, evenly spaced through the examples sorted by class.

    So each class keeps its share within one example and the choice uses no random numbers. Regression targets, and labels of
    positions, are taken evenly in data set order. int64 [count].
    """
    n = len(y)
    order = (
        torch.arange(n, device=y.device)
        if y.is_floating_point() or y.ndim > 1
        else torch.argsort(y, stable=True)
    )
    pick = (2 * torch.arange(count, device=y.device) + 1) * n // (2 * count)
    return order[pick].sort().values


def _member(file: Any, key: str, path: Any) -> np.ndarray:
    try:
        array = file[key]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise FldiagError(
            f"{path}: {key} is an array of Python objects, which only unpickling could read",
            "save it as a plain array: np.stack(list) of equal shapes",
        ) from None
    if array.ndim == 0:
        raise FldiagError(
            f"{path}: {key} is a single number", "save an array with one entry per example"
        )
    return array


def _join_val(arrays: dict[str, np.ndarray], file: Any, path: Any) -> None:
    if len(arrays["train_images"]) != len(arrays["train_labels"]):
        return  # reported by the caller, with the file's own counts
    for key in ("images", "labels"):
        if f"val_{key}" not in file.files:
            raise FldiagError(
                f"{path} lacks val_{key}, the other half of the validation split",
                "save val_images and val_labels, or neither",
            )
        train, val = arrays[f"train_{key}"], _member(file, f"val_{key}", path)
        if train.shape[1:] != val.shape[1:] or train.dtype != val.dtype:
            raise FldiagError(
                f"{path}: train_{key} are {train.dtype} {list(train.shape)} and val_{key} "
                f"{val.dtype} {list(val.shape)}",
                "store both splits alike",
            )
        arrays[f"train_{key}"] = np.concatenate([train, val])


def _channels_first(array: np.ndarray, source: str) -> Tensor:
    if array.ndim == 3:
        return inputs(array[:, None], source)
    if array.ndim == 4:
        if array.shape[1] in (1, 3) and array.shape[3] not in (1, 3):
            raise FldiagError(
                f"{source} has shape {list(array.shape)}, which looks like N,C,H,W",
                "save N,H,W,C: np.moveaxis(images, 1, -1)",
            )
        return inputs(np.moveaxis(array, -1, 1), source)
    if array.ndim == 2:
        # uint8 stands for pixels only in images; a table of small whole numbers is a table of features.
        return inputs(array.astype(np.float32) if array.dtype.kind in "biuf" else array, source)
    raise FldiagError(
        f"{source} has shape {list(array.shape)}",
        "use N,H,W or N,H,W,C for images, N,D for features",
    )


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
