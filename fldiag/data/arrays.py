"""Arrays of files and of users, brought into the form of a data set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.errors import FldiagError, first_line

KEYS = ("train_images", "train_labels", "test_images", "test_labels")
VALIDATION = ("val_images", "val_labels")


def read_npz(path: str | os.PathLike[str], *, join_validation: bool = False) -> list[Any]:
    """The arrays ``KEYS`` of an npz file.

    Args:
        path: The file. Images are N,H,W or N,H,W,C; tables N,D.
        join_validation: val_images and val_labels, where the file has them, follow the training examples.

    Returns:
        Images as [n, C, H, W], tables as float32 [n, d], and the labels as they are.

    Raises:
        FldiagError: A missing, damaged or foreign file, and arrays of Python objects, which only unpickling could read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in (*KEYS, *VALIDATION) if key in file}
            names = file.files
    except FileNotFoundError:
        raise FldiagError(f"no file {path}", usage=True) from None
    except Exception as error:  # a damaged archive can make the reader raise anything
        raise FldiagError(
            f"{path} is not a readable npz file of plain arrays ({first_line(error)})",
            "write it with np.savez, without arrays of Python objects",
        ) from None
    if missing := [key for key in KEYS if key not in arrays]:
        raise FldiagError(
            f"{path} lacks {', '.join(missing)}; it has {', '.join(names) or 'nothing'}"
        )
    if join_validation and VALIDATION[0] in arrays:
        for key, other in zip(KEYS, VALIDATION, strict=False):
            arrays[key] = np.concatenate([arrays[key], arrays[other]])
    # a recorded run says in ``form`` that its rows of whole numbers are no features
    for key in KEYS[::2] if "form" not in names else ():
        arrays[key] = _channels_first(arrays[key], f"{path}: {key}")
    return [arrays[key] for key in KEYS]


def _channels_first(array: np.ndarray, source: str) -> np.ndarray:
    if array.ndim == 2 and array.dtype.kind in "biuf":
        # uint8 stands for pixels only in images; a table of small whole numbers is a table of features.
        return array.astype(np.float32)
    if array.ndim == 3:
        return array[:, None]
    if array.ndim != 4 or (array.shape[1] in (1, 3) and array.shape[3] not in (1, 3)):
        raise FldiagError(
            f"{source} has shape {list(array.shape)}",
            "use N,H,W or N,H,W,C (channels last) for images, N,D for features",
        )
    return np.moveaxis(array, -1, 1)


def inputs(x: Any, source: str) -> Tensor:
    """An array of inputs as a tensor.

    Returns:
        uint8 [n, C, H, W], float32 [n, ...] or, for rows of int32 or int64, tokens int64 [n, T]. Images [n, H, W] get a channel.

    Raises:
        FldiagError: No array of real numbers.
    """
    x = _tensor(x, source)
    if x.ndim == 2 and x.dtype in (torch.int32, torch.int64):
        return x.long()
    x = x[:, None] if x.ndim == 3 else x
    return x if x.dtype == torch.uint8 else x.float()


def targets(y: Any, source: str) -> Tensor:
    """An array of targets as a tensor.

    Returns:
        Class labels int64 [n], of which a last axis of length 1 is dropped; or numbers float32 [n, outputs].

    Raises:
        FldiagError: Anything else: a single axis of floats may be labels or numbers.
    """
    y = _tensor(y, source).cpu()
    is_number, is_mask = y.is_floating_point(), y.dtype == torch.bool
    y = y.float() if is_number else y.long()
    if y.ndim == 2 and y.shape[1] == 1 and not is_number:
        y = y[:, 0]
    if y.ndim != 1 + is_number or is_mask or (not is_number and bool((y < 0).any())):
        raise FldiagError(
            f"{source}: targets {y.dtype} {list(y.shape)}",
            "give each input one class, numbered from 0, or a row of floats",
        )
    return y


def _tensor(x: Any, source: str) -> Tensor:
    array = x if isinstance(x, Tensor) else np.asarray(x)
    if isinstance(array, np.ndarray) and array.dtype.kind in "biuf":
        array = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    if not isinstance(array, Tensor) or array.is_complex() or not array.ndim:
        raise FldiagError(f"{source} holds {array.dtype}", "give numbers, a row an example")
    return array.detach().contiguous()


def count_classes(*ys: Tensor) -> int:
    """One more than the largest label, or the outputs of regression targets."""
    if ys[0].is_floating_point():
        return int(ys[0].shape[1])
    return 1 + max((int(y.max()) for y in ys if len(y)), default=0)


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

    def chunks() -> Iterator[Tensor]:
        return (chunk.transpose(0, 1).flatten(1).double() for chunk in x.split(2048))

    # Chunks keep the float64 copy small; two passes avoid the cancellation of E[x^2] - E[x]^2.
    mean = _total(torch.stack([_total(chunk) for chunk in chunks()], 1)) / (per_channel * scale)
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
    """``count`` of the n positions, sorted, evenly spaced through the examples sorted by class; int64 [count].

    So each class keeps its share within one example and the choice uses no random numbers. Regression targets are taken evenly
    in data set order.
    """
    n = len(y)
    is_class = y.ndim == 1 and not y.is_floating_point()
    order = torch.argsort(y, stable=True) if is_class else torch.arange(n, device=y.device)
    pick = (2 * torch.arange(count, device=y.device) + 1) * n // (2 * count)
    return order[pick].sort().values
