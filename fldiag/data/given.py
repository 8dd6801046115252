"""A user's examples as a data set, and who has which of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torch.utils.data import Dataset as TorchDataset

from fldiag.data import Dataset
from fldiag.data.arrays import count_classes, targets
from fldiag.data.packed import Packed
from fldiag.data.partition import read_partition
from fldiag.errors import FldiagError
from fldiag.problem.data import IndexedSlice, as_slice, cut, is_split, join
from fldiag.problem.loss import is_probabilities

#: Client -> sorted indices of its training examples.
Parts = dict[int, np.ndarray]
#: What tables call such data.
NAME = "given"
#: The highest number of a client.
MOST = 10**6
ONE_HOT = "the targets are taken as classes, each example's that of its largest"


def dataset_of(examples: Any, test: Any = None) -> Dataset:
    """A data set of a user's examples.

    Args:
        examples: ``(x, y)``, a dict with ``labels``, a torch ``Dataset`` or a ``DataLoader``; or ``(x, y, test_x, test_y)``.
            Inputs are a tensor, or a dict or tuple of tensors. Targets are class numbers, one-hot rows or probabilities of
            classes (of which the largest counts), or rows of numbers.
        test: Test examples in one of these forms.

    Returns:
        The data set. Its ``remarks`` say how the targets were read.

    Raises:
        FldiagError: Inputs and targets do not fit each other, or the targets are of another kind.
    """
    if is_split(examples):
        examples, test = tuple(examples[:2]), tuple(examples[2:])
    x, y, is_one_hot = _pair(examples)
    test_x, test_y = (cut(x, slice(0)), y[:0]) if test is None else _pair(test)[:2]
    if (y.dtype, y.shape[1:]) != (test_y.dtype, test_y.shape[1:]):
        raise FldiagError("the targets of data and test have different forms", usage=True)
    kinds = {2: (torch.float32, torch.int64), 4: (torch.float32, torch.uint8)}
    packed = None
    if not isinstance(x, Tensor) or x.dtype not in kinds.get(x.ndim, ()):
        packed = Packed.of(x)
        x, test_x = packed.rows(x), packed.rows(test_x)
    classes, remarks = count_classes(y, test_y), (ONE_HOT,) if is_one_hot else ()
    return Dataset(NAME, x, y, test_x, test_y, classes, packed=packed, remarks=remarks)


def _pair(examples: Any) -> tuple[Any, Tensor, bool]:
    """Inputs and targets, and whether these were one-hot; tensors on the CPU, floats in single precision."""
    data = as_slice(examples)
    x, y = data.batch(0, data.n)
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        if "labels" not in x:
            raise FldiagError("a dict without labels", "give (inputs, labels)", usage=True)
        x, y = {key: part for key, part in x.items() if key != "labels"}, x["labels"]
    is_one_hot = isinstance(y, Tensor) and y.ndim == 2 and is_probabilities(y.float())
    y = targets(y.float().argmax(1) if is_one_hot else y, "the targets")
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        x = x.float() if x.is_floating_point() else x if x.dtype == torch.uint8 else x.long()
    return x, y, is_one_hot


def are_examples(clients: Any) -> bool:
    """Whether clients come with their examples, not with indices."""
    if clients is None or isinstance(clients, (str, Path)):
        return False
    part = next(iter(_items(clients).values()))
    if isinstance(part, (tuple, list)):
        return len(part) == 2 and isinstance(part[1], (Tensor, np.ndarray))
    return isinstance(part, (TorchDataset, DataLoader, Mapping))


def examples_of(clients: Any) -> tuple[tuple[Any, Tensor], Parts]:
    """Examples of each client (dict or list) -> those of all, and whose is which."""
    pairs = {k: _pair(part)[:2] for k, part in _items(clients).items()}
    ends = np.cumsum([len(y) for _, y in pairs.values()])
    x, y = (join(side) for side in zip(*pairs.values(), strict=True))
    return (x, y), dict(zip(pairs, np.split(np.arange(ends[-1]), ends[:-1]), strict=True))


def partition_of(clients: Any, data: Any, total: int | None) -> Parts:
    """Who has which of the examples.

    Args:
        clients: Of each client the indices of its examples, or a ``Subset`` (which a ``DataLoader`` may read);
            in a list or dict, or in a file.
        data: What the indices are of.
        total: How many examples there are, where that is known.

    Returns:
        Client -> sorted indices.

    Raises:
        FldiagError: An example that the data do not have, or data in no fixed order, of which indices say nothing.
    """
    if isinstance(data, DataLoader):
        if not isinstance(as_slice(data), IndexedSlice):
            raise FldiagError(
                "data is a DataLoader with an order of its own", "give its data set", usage=True
            )
        data = data.dataset
    if isinstance(clients, (str, Path)):
        clients = read_partition(clients)
    parts = {k: np.sort(_indices(part, k, data, total)) for k, part in _items(clients).items()}
    for k, index in parts.items():
        if len(index) and not 0 <= index[0] <= index[-1] < (total or MOST**2):
            raise FldiagError(f"client {k} has example {index[-1]} of {total}", usage=True)
    return parts


def _indices(part: Any, client: int, data: Any, total: int | None) -> np.ndarray:
    part = part.dataset if isinstance(part, DataLoader) else part
    index: Any = None
    while isinstance(part, Subset) and part is not data:
        own = np.asarray(part.indices)
        index, part = own if index is None else own[index], part.dataset
    is_other = index is not None and total is not None and len(part) != total
    array = np.asarray(part if index is None else index)
    if is_other or array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise FldiagError(
            f"client {client} has a {type(part).__name__} that does not say which of the examples it has",
            "give the indices of its examples in data, or a Subset of data; or leave data out and give its examples",
            usage=True,
        )
    return array.astype(np.int64)


def _items(clients: Any) -> dict[int, Any]:
    pairs = clients.items() if isinstance(clients, Mapping) else enumerate(clients)
    items = {number_of(k): part for k, part in pairs}
    if not items:
        raise FldiagError("there are no clients", usage=True)
    return items


def number_of(client: Any) -> int:
    """A client's number. Raises FldiagError for anything else."""
    if not str(client).isdecimal() or int(client) >= MOST:
        raise FldiagError(f"client {client!r} is not a number from 0", usage=True)
    return int(client)
