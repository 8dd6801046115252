"""Arrays of files and of users, brought into the form of a data set."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.errors import FldiagError, first_line

KEYS = ("train_images", "train_labels", "test_images", "test_labels")
VALIDATION = ("val_images", "val_labels")
#: Under what the npz file of a recorded run says that its arrays are as they are, and the layout of its rows (see ``pack``).
FORM = "form"
#: What a tensor of packed inputs may hold.
KINDS = ("float32", "int64", "int32", "uint8", "bool")


def read_npz(
    path: str | Path, *, join_validation: bool = False
) -> tuple[list[np.ndarray], str | None]:
    """The arrays ``KEYS`` of an npz file.

    Args:
        path: The file. Images are N,H,W or N,H,W,C; tables N,D.
        join_validation: val_images and val_labels, where the file has them, follow the training examples.

    Returns:
        Images as [n, C, H, W] or [n, H, W], tables as float32 [n, d], and the labels as they are; the layout of packed inputs.

    Raises:
        FldiagError: A missing, damaged or foreign file, and arrays of Python objects, which only unpickling could read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            more = [key for key in (*VALIDATION, FORM) if key in file]
            arrays = {key: file[key] for key in (*KEYS, *more)}
    except Exception as error:  # a damaged archive can make the reader raise anything
        raise FldiagError(
            f"{path} is not a readable npz file of {', '.join(KEYS)} ({first_line(error)})",
            "write it with np.savez, without arrays of Python objects",
            usage=True,
        ) from None
    if join_validation and VALIDATION[0] in arrays:
        for key, other in zip(KEYS, VALIDATION, strict=False):
            arrays[key] = np.concatenate([arrays[key], arrays[other]])
    if FORM not in arrays:
        for key in KEYS[::2]:
            arrays[key] = _channels_first(arrays[key], f"{path}: {key}")
    return [arrays[key] for key in KEYS], str(arrays.get(FORM, [""])[0]) or None


def _channels_first(array: np.ndarray, source: str) -> np.ndarray:
    """Images of a file, or a table: its whole numbers are features, neither pixels nor tokens."""
    if array.ndim == 2 and array.dtype.kind in "biuf":
        return array.astype(np.float32)
    is_first = array.ndim == 4 and array.shape[1] in (1, 3) and array.shape[3] not in (1, 3)
    if array.ndim not in (3, 4) or is_first:
        raise FldiagError(
            f"{source} has shape {list(array.shape)}",
            "use N,H,W or N,H,W,C (channels last) for images, N,D for features",
        )
    return np.moveaxis(array, -1, 1) if array.ndim == 4 else array


def inputs(x: Any) -> Tensor:
    """An array of inputs as a tensor.

    Returns:
        uint8 [n, C, H, W], float32 [n, ...] or, for rows of int32 or int64, tokens int64 [n, T]. Images [n, H, W] get a channel.

    Raises:
        FldiagError: No array of real numbers.
    """
    x = _tensor(x)
    if x.ndim == 2 and x.dtype in (torch.int32, torch.int64):
        return x.long()
    x = x[:, None] if x.ndim == 3 else x
    return x if x.dtype == torch.uint8 else x.float()


def targets(y: Any) -> Tensor:
    """An array of targets as a tensor: whole numbers int64 [n], of which a last axis of length 1 is dropped, others float32.

    Raises FldiagError for no array of real numbers; what else is neither labels nor numbers a data set refuses.
    """
    y = _tensor(y).cpu()
    if y.is_floating_point():
        return y.float()
    y = y[:, 0] if y.shape[1:] == (1,) else y
    return y if y.dtype == torch.bool else y.long()


def _tensor(x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        array = np.asarray(x)
        is_real = array.dtype.kind in "biuf"
        dtype = array.dtype.newbyteorder("=")
        x = torch.from_numpy(array.astype(dtype, order="C")) if is_real else array
    if not isinstance(x, Tensor) or x.is_complex() or not x.ndim:
        raise FldiagError(
            f"an array of {x.dtype} {list(x.shape)}", "give numbers, a row an example"
        )
    return x.detach().contiguous()


def count_classes(*ys: Tensor) -> int:
    """One more than the largest label, or the outputs of regression targets."""
    if ys[0].is_floating_point():
        return int(ys[0].shape[-1])
    return 1 + max((int(y.max()) for y in ys if len(y)), default=0)


def pack(inputs: Any) -> tuple[Tensor, str]:
    """Inputs of several tensors as one, so that what holds, cuts and stores one tensor of inputs holds them too.

    Args:
        inputs: A tensor, or a dict or tuple of tensors, whose first axis counts the examples.

    Returns:
        Rows int64 [n, m], an example's tensors one after the other: whole numbers as they are, floats by the bits of their single
        precision. And the layout, JSON: of each tensor its name or place ("" of a single one), an example's shape, and the kind.

    Raises:
        FldiagError: Another kind than ``KINDS``.

    >>> pack({"ids": torch.zeros(5, 7, dtype=torch.int64), "mask": torch.ones(5, 7, dtype=torch.bool)})[1]
    '[["ids", [7], "int64"], ["mask", [7], "bool"]]'
    """
    tensors = {"": inputs} if isinstance(inputs, Tensor) else inputs
    columns, fields = [], []
    for key, t in enumerate(tensors) if isinstance(tensors, tuple) else tensors.items():
        is_float = t.is_floating_point()
        kind = "float32" if is_float else str(t.dtype).removeprefix("torch.")
        if kind not in KINDS:
            raise FldiagError(f"the inputs hold {kind}, not one of {', '.join(KINDS)}")
        fields.append((key, t.shape[1:], kind))
        t = t.detach().cpu()
        t = t.float().contiguous().view(torch.int32) if is_float else t
        columns.append(t.long().flatten(1))
    return torch.cat(columns, 1), json.dumps(fields)


def unpack(rows: Tensor, layout: str, dtype: torch.dtype) -> Any:
    """The inputs that ``pack`` made rows of: a dict, a tuple, or a tensor; floats in ``dtype``."""
    fields, tensors = json.loads(layout), dict[Any, Tensor]()
    pieces = rows.split([math.prod(shape) for _, shape, _ in fields], 1)
    for (key, shape, kind), piece in zip(fields, pieces, strict=True):
        is_float = kind == "float32"
        t = (
            piece.int().view(torch.float32).to(dtype)
            if is_float
            else piece.to(getattr(torch, kind))
        )
        tensors[key] = t.reshape(len(t), *shape)
    return tuple(tensors.values()) if 0 in tensors else tensors.get("", tensors)


def ready(x: Tensor, device: str | torch.device, dtype: torch.dtype) -> Tensor:
    """Model inputs or targets on a device and in its precision; tokens and labels stay integers."""
    return x.to(device, dtype if x.is_floating_point() else None)


def moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of every channel of [n, C, ...] or feature of [n, d], uint8 as pixels in [0, 1].

    Summed in float64, to the same bits on every processor, as they are part of what names the data; a constant channel gets
    deviation 1.
    """
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    per_channel = x[:, 0].numel()

    def total(change: Callable[[Tensor], Tensor]) -> Tensor:
        """Chunks keep the float64 copy small."""
        chunks = (chunk.transpose(0, 1).flatten(1).double() for chunk in x.split(2048))
        return _total(torch.stack([_total(change(chunk)) for chunk in chunks], 1))

    # Two passes avoid the cancellation of E[x^2] - E[x]^2.
    mean = total(lambda chunk: chunk) / (per_channel * scale)
    var = total(lambda chunk: (chunk / scale - mean[:, None]).square()) / per_channel
    std = torch.where(var > 1e-20, var.sqrt(), 1.0)
    return tuple(mean.tolist()), tuple(std.tolist())


def _total(a: Tensor) -> Tensor:
    """Sums of the rows, [C, m] -> [C]: one half is added to the other until one column is left, an order that no processor
    and no number of threads changes."""
    while (m := a.shape[1]) > 1:
        half = m // 2
        a = torch.cat([a[:, :half] + a[:, half : 2 * half], a[:, 2 * half :]], 1)
    return a[:, 0]
