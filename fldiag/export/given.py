"""What a loop hands to a recorder: data in memory as a data set and as arrays to keep with a run, partitions, numbers."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag import data as datasets
from fldiag.checkpoint import folder
from fldiag.data import Dataset
from fldiag.errors import FldiagError
from fldiag.problem.inputs import as_data
from fldiag.results.table import Row

#: Arrays of more bytes are not kept with a run.
KEPT = 256 * 2**20
NAME = "given"


def examples_of(data: Any, test: Any = None) -> tuple[Dataset | None, dict[str, np.ndarray] | None]:
    """The data set, and what to keep of it (None: it is known by its name, too large, or of a kind that an npz does not hold).

    ``data``: a name, a ``Dataset`` of fldiag, or (x, y), a torch ``Dataset`` or a ``DataLoader`` with one tensor of inputs. None
    for none, and for inputs of another form: such a run has weights, and its data are given with every question.
    """
    if data is None or isinstance(data, Dataset):
        return data, None
    if isinstance(data, str):
        return datasets.load(data), None
    pairs = [_pair(given, what) for given, what in ((data, "data"), (test, "test")) if given is not None]
    if not all(isinstance(part, Tensor) for pair in pairs for part in pair):
        return None, None
    (x, y), (test_x, test_y) = pairs[0], pairs[-1]
    if x.ndim not in (2, 4) or (not y.is_floating_point() and y.ndim != 1):
        return None, None
    classes = y.shape[1] if y.is_floating_point() else 1 + max(int(y.max()), int(test_y.max()))
    made = Dataset(NAME, x, y, test_x, test_y, classes=classes)
    labels_of_numbers = not y.is_floating_point() and x.dtype != torch.int64
    size = sum(t.nbytes for pair in pairs for t in pair)
    if not labels_of_numbers or size > KEPT:
        return made, None
    return made, {"train_images": _array(x), "train_labels": y.numpy(),
                  "test_images": _array(test_x), "test_labels": test_y.numpy()}


def seen_as(keep: Mapping[str, np.ndarray] | None) -> str | None:
    """How a model sees what is kept: pixels divided by 255, numbers as they are."""
    return None if keep is None else "unit" if keep["train_images"].dtype == np.uint8 else "none"


def read_clients(clients: Any) -> tuple[Any, dict[int, np.ndarray] | None]:
    """Examples of each client -> those of all, and whose is which; indices alone say nothing about the examples."""
    pairs = dict(clients.items() if isinstance(clients, Mapping) else enumerate(clients))
    if all(isinstance(v, (range, np.ndarray, list, tuple, Tensor)) and not _is_pair(v) for v in pairs.values()):
        return None, clients
    held = {k: _pair(v, f"the data of client {k}") for k, v in pairs.items()}
    if not all(isinstance(part, Tensor) for pair in held.values() for part in pair):
        raise FldiagError("the clients' inputs are several tensors", "give data=None and clients=None, and the data with every "
                          "question", usage=True)
    parts, at = {}, 0
    for k, (_, y) in held.items():
        parts[int(k)] = np.arange(at, at + len(y))
        at += len(y)
    return (torch.cat([x for x, _ in held.values()]), torch.cat([y for _, y in held.values()])), parts


def _is_pair(v: Any) -> bool:
    return isinstance(v, (list, tuple)) and len(v) == 2 and all(isinstance(p, (Tensor, np.ndarray)) for p in v)


def _pair(given: Any, what: str) -> tuple[Any, Any]:
    try:
        drawn = as_data(given)
    except FldiagError as error:
        raise FldiagError(f"{what}: {error.what}", error.remedy, usage=True) from None
    x, y = drawn.batch(0, drawn.n)
    if isinstance(x, Tensor) and x.is_floating_point():
        x = x.float()
    if isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.uint8:
        x = x.long()
    if isinstance(y, Tensor):
        y = (y[:, None] if y.ndim == 1 else y).float() if y.is_floating_point() else y.long()
    return (x.cpu(), y.cpu()) if isinstance(x, Tensor) and isinstance(y, Tensor) else (x, y)


def _array(x: Tensor) -> np.ndarray:
    """Pictures with their channels last, as an npz has them."""
    return (x.movedim(1, -1) if x.ndim == 4 else x).contiguous().numpy()


def rows_of(record: Mapping[str, Any] | None, **about: Any) -> list[Row]:
    """A row for every number in a record, for every entry of a list of them, and for every client of a dict."""
    about = {k: v for k, v in about.items() if v is not None}
    found: list[Row] = []
    for name, value in (record or {}).items():
        if isinstance(value, Mapping):
            for k, v in value.items():
                found += rows_of({name: v}, **{**about, "moment": "trained", "scope": "client", "client": number_of(k)})
            continue
        entries = enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]
        found += [{**about, "metric": str(name), "value": float(v), **({} if i is None else {"index": i})} for i, v in entries
                  if isinstance(v, numbers.Real) and not isinstance(v, bool)]
    return found


def partition_of(given: Any, dataset: Dataset | None) -> dict[int, np.ndarray]:
    """Client -> sorted indices of its examples, of a list, a dict or a file. Raises FldiagError when they do not fit."""
    if isinstance(given, (str, Path)):
        given = folder.read_partition(Path(given))
    pairs = given.items() if isinstance(given, Mapping) else enumerate(given)
    named = {str(k): np.sort(np.asarray(v, dtype=np.int64)) for k, v in pairs}
    if not named or not all(k.isdigit() for k in named):
        raise FldiagError(f"the partition is of clients {', '.join(list(named)[:4]) or 'none'}",
                          "number them 0, 1, 2, ..., as partition-id does", usage=True)
    if dataset is not None:
        folder.check(named, len(dataset.train_y), dataset.name)
    return {int(k): v for k, v in named.items()}


def number_of(client: Any) -> int:
    if isinstance(client, bool) or not str(client).isdigit():
        raise FldiagError(f"client {client!r} is not a number", "number the clients 0, 1, 2, ...", usage=True)
    return int(client)
