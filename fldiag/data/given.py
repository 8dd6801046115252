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
from fldiag.data.arrays import pack
from fldiag.data.partition import read_partition
from fldiag.errors import FldiagError
from fldiag.losses import is_probabilities
from fldiag.problem.data import IndexedSlice, as_slice, cut, is_split, join

#: Client -> sorted indices of its training examples.
Parts = dict[int, np.ndarray]


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
    kinds = {2: (torch.float32, torch.int64), 4: (torch.float32, torch.uint8)}
    packed = None
    if any(not isinstance(t, Tensor) or t.dtype not in kinds.get(t.ndim, ()) for t in (x, test_x)):
        (x, packed), (test_x, layout) = pack(x), pack(test_x)
        if layout != packed:
            raise FldiagError("the inputs of data and test have different forms", usage=True)
    remark = "the targets are taken as classes, each example's that of its largest"
    remarks = (remark,) if is_one_hot else ()
    return Dataset.of("given", (x, y, test_x, test_y), packed=packed, remarks=remarks)


def _pair(examples: Any) -> tuple[Any, Tensor, bool]:
    """Inputs and targets, and whether these were one-hot; tensors on the CPU, floats in single precision."""
    data = as_slice(examples)
    x, y = data.batch(0, data.n)
    if isinstance(y, Mapping):
        if "labels" not in x:
            raise FldiagError("a dict without labels", "give (inputs, labels)", usage=True)
        x, y = {key: part for key, part in x.items() if key != "labels"}, x["labels"]
    is_one_hot = isinstance(y, Tensor) and is_probabilities(y.float())
    y = y.float().argmax(1) if is_one_hot else y
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
    parts = {}
    for k, part in _items(clients).items():
        part = part.dataset if isinstance(part, DataLoader) else part
        index: Any = None
        while isinstance(part, Subset) and part is not data:
            positions = np.asarray(part.indices)
            index, part = positions if index is None else positions[index], part.dataset
        is_other = index is not None and total is not None and len(part) != total
        index = np.asarray(part if index is None else index)
        if is_other or index.ndim != 1 or (index.dtype.kind not in "iu" and index.size):
            raise FldiagError(
                f"client {k} has a {type(part).__name__} that does not say which of the examples it has",
                "give the indices of its examples in data, or a Subset of data; or leave data out and give its examples",
                usage=True,
            )
        parts[k] = np.sort(index.astype(np.int64))
        if len(index) and not 0 <= parts[k][0] <= parts[k][-1] < (total or np.inf):
            raise FldiagError(f"client {k} has example {parts[k][-1]} of {total}", usage=True)
    return parts


def _items(clients: Any) -> dict[int, Any]:
    pairs = clients.items() if isinstance(clients, Mapping) else enumerate(clients)
    items = {number_of(k): part for k, part in pairs}
    if not items:
        raise FldiagError("there are no clients", usage=True)
    return items


def number_of(client: Any) -> int:
    """A client's number. Raises FldiagError for anything else."""
    if not str(client).isdecimal() or int(client) >= 10**6:
        raise FldiagError(f"client {client!r} is not a number from 0", usage=True)
    return int(client)
