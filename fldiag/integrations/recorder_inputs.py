"""What a loop hands to a recorder: examples as a data set and as arrays to keep, partitions, numbers, and weights in any form."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset

from fldiag import data as datasets
from fldiag.config_files import read_partition
from fldiag.data import Dataset
from fldiag.data.arrays import KEYS
from fldiag.errors import FldiagError, first_line
from fldiag.integrations import client_files
from fldiag.params import Layout
from fldiag.problem.data import count, is_split, join
from fldiag.problem.weights import forward_of, unwrap_model
from fldiag.results.table import Row
from fldiag.runs.in_memory import dataset_of, is_dense, one_each, pair
from fldiag.runs.packed import FORM, NO_TEST, TARGETS

#: Arrays of more bytes are not kept with a run.
KEPT = 256 * 2**20
#: Client numbers are kept as they are below this.
MOST = 10**6


def examples_of(
    data: Any, test: Any = None, model: Any = None
) -> tuple[Dataset | None, dict[str, np.ndarray] | None]:
    """The data set, and what to keep of it (None: it is known by its name, too large, or of a kind that an npz does not hold).

    ``data``: a name, a ``Dataset`` of fldiag, or what ``dataset_of`` takes. None for none, and for targets of another kind: such
    a run has weights, and its data are given with every question. ``model``: a module decides which of several entries are
    inputs.

    Raises FldiagError for ``test`` without training examples, or beside data that have test examples of their own.
    """
    split = is_split(data)
    if test is not None and (data is None or isinstance(data, (Dataset, str)) or split):
        kind = (
            "there are no training examples"
            if data is None
            else "the data have a split of their own"
        )
        raise FldiagError(
            f"test examples were given, and {kind}",
            "leave test out, or give the training examples alone as data: data=(x, y)",
            usage=True,
        )
    if data is None:
        return None, None
    if isinstance(data, str):
        return datasets.load(data), None
    if isinstance(data, Dataset):
        return data, _arrays_to_keep(data)
    forward, remarks = forward_of(model), tuple[str, ...]()
    if not split:
        x, y, remarks = pair(data, "data", forward)  # drawn once: a loader may shuffle
        if not one_each(y) and not is_dense(x, y):
            return None, None
        data = x, y
    dataset = _two_classes(dataset_of(data, test, forward))
    dataset = replace(dataset, remarks=(*remarks, *dataset.remarks))
    return dataset, _arrays_to_keep(dataset)


def _arrays_to_keep(dataset: Dataset) -> dict[str, np.ndarray] | None:
    """What an npz file holds of a data set, to be read as the same; None where it is too large, or more than such a file says."""
    if dataset.words is not None or dataset.repeat > 1 or dataset.side:
        return None
    parts = dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y
    targets = parts[1], parts[3]
    is_number = dataset.train_y.is_floating_point()
    if sum(t.nbytes for t in parts) > KEPT:
        return None
    if not is_number and dataset.classes != 1 + max(int(y.max()) for y in targets if len(y)):
        return None  # the classes without examples would be lost
    arrays = {key: _array(t) for key, t in zip(KEYS, parts, strict=True)}
    if dataset.tokens:
        arrays[FORM] = np.array([dataset.packed.text() if dataset.packed else ""])
    if not dataset.tested:
        arrays[NO_TEST] = np.array(True)
    if is_number or dataset.dense:
        arrays[TARGETS] = np.array("numbers" if is_number else "positions")
    return arrays


def _two_classes(dataset: Dataset) -> Dataset:
    """Targets 0.0 and 1.0 of one output, as a binary cross entropy takes them, as the labels that they are."""
    y = torch.cat([dataset.train_y, dataset.test_y])
    if not dataset.regression or y.shape[1] != 1 or set(y.unique().tolist()) != {0.0, 1.0}:
        return dataset
    return replace(
        dataset, train_y=dataset.train_y[:, 0].long(), test_y=dataset.test_y[:, 0].long(), classes=2
    )


def normalisation_of(dataset: Dataset) -> str:
    """How a model sees a data set, as ``data.normalise`` says it."""
    if dataset.mean:
        return "/".join(",".join(map(repr, values)) for values in (dataset.mean, dataset.std))
    return "unit" if dataset.train_x.dtype == torch.uint8 else "none"


def read_clients(
    clients: Any, model: Any = None
) -> tuple[Any, dict[Any, np.ndarray] | None, list[str]]:
    """Examples of each client -> those of all, whose is which, and remarks; indices alone say nothing about the examples."""
    pairs = dict(clients.items() if isinstance(clients, Mapping) else enumerate(clients))
    if all(
        isinstance(v, (range, np.ndarray, list, tuple, Tensor)) and not _is_pair(v)
        for v in pairs.values()
    ):
        return None, clients, []
    examples = {k: pair(v, f"the data of client {k}", forward_of(model)) for k, v in pairs.items()}
    parts, at = {}, 0
    for k, (_, y, _) in examples.items():
        parts[k] = np.arange(at, at + count(y))
        at += count(y)
    try:
        joined = (
            join([x for x, _, _ in examples.values()]),
            join([y for _, y, _ in examples.values()]),
        )
        return (
            joined,
            parts,
            list(dict.fromkeys(text for _, _, remarks in examples.values() for text in remarks)),
        )
    except (RuntimeError, ValueError, TypeError) as error:
        raise FldiagError(
            f"the clients' examples do not go together: {first_line(error)}",
            "give all the same form",
            usage=True,
        ) from None


def _is_pair(v: Any) -> bool:
    """Inputs and targets, not two indices."""
    return (
        isinstance(v, (list, tuple))
        and len(v) == 2
        and isinstance(v[0], (Tensor, np.ndarray, Mapping, list, tuple))
        and isinstance(v[1], (Tensor, np.ndarray))
    )


def _array(x: Tensor) -> np.ndarray:
    """Pictures with their channels last, as an npz has them."""
    return (x.movedim(1, -1) if x.ndim == 4 else x).contiguous().cpu().numpy()


def rows_of(
    record: Mapping[str, Any] | None,
    number_of: Callable[[Any], int] | None = None,
    **about: Any,
) -> list[Row]:
    """A row for every number in a record, for every entry of a list of them, and for every client of a dict; ``number_of``: the
    number of a client."""
    number_of = number_of or Clients().number_of
    about = {k: v for k, v in about.items() if v is not None}
    rows: list[Row] = []
    for name, value in (record or {}).items():
        if isinstance(value, Mapping):
            for k, v in value.items():
                rows += rows_of(
                    {name: v},
                    number_of,
                    **{**about, "moment": "trained", "scope": "client", "client": number_of(k)},
                )
            continue
        entries = enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]
        rows += [
            {**about, "metric": str(name), "value": float(v), **({} if i is None else {"index": i})}
            for i, v in entries
            if isinstance(v, numbers.Real) and not isinstance(v, bool)
        ]
    return rows


def partition_of(clients: Any, dataset: Dataset | None, data: Any = None) -> dict[str, np.ndarray]:
    """Name or number of a client -> sorted indices of its examples, of a list, a dict or a file; ``data``: what the data set was
    made of.

    Raises FldiagError when they do not fit, or say nothing as the data come in no fixed order.
    """
    if isinstance(data, DataLoader):
        sampler = (
            data.sampler
            if data.batch_sampler is None
            else getattr(data.batch_sampler, "sampler", None)
        )
        if not isinstance(data.dataset, IterableDataset) and not isinstance(
            sampler, SequentialSampler
        ):
            raise FldiagError(
                "data is a DataLoader with an order of its own, so numbers do not say which examples clients have",
                "give its data set instead, or shuffle=False",
                usage=True,
            )
        data = data.dataset
    if isinstance(clients, (str, Path)):
        clients = read_partition(Path(clients))
    pairs = clients.items() if isinstance(clients, Mapping) else enumerate(clients)
    total = None if dataset is None else len(dataset.train_y)
    indices = {str(k): np.sort(_indices(v, k, total, data)) for k, v in pairs}
    if not indices:
        raise FldiagError(
            "the partition is of no clients", "number them 0, 1, 2, ..., or name them", usage=True
        )
    if dataset is not None:
        client_files.check(indices, len(dataset.train_y), dataset.name)
    return indices


def _indices(selection: Any, client: Any, total: int | None, data: Any) -> np.ndarray:
    """A client's examples by number, int64 [n]: of numbers, of a mask over all, or of torch's ``Subset`` of the data (which a
    ``DataLoader`` may read), be ``data`` a ``Subset`` itself. Raises FldiagError for anything else."""
    part: Any = selection.dataset if isinstance(selection, DataLoader) else selection
    within: Any = np.arange(len(part)) if isinstance(part, Subset) and part is data else None
    while isinstance(part, Subset) and part is not data:
        within = np.asarray(part.indices) if within is None else np.asarray(part.indices)[within]
        part = part.dataset
    try:
        index = np.asarray(selection if within is None else within)
    except (ValueError, TypeError, RuntimeError):  # of unequal lengths, or on another device
        index = np.empty(0, dtype=object)
    if index.dtype == bool and index.shape == (total,):
        return np.flatnonzero(index)
    fits = index.ndim == 1 and (
        index.dtype.kind in "iu" or (not index.size and index.dtype.kind == "f")
    )
    # another object may be the same examples, but a Subset that was given has an order that its data set does not have
    other = (
        within is not None
        and part is not data
        and (isinstance(data, Subset) or (total is not None and len(part) != total))
    )
    if not fits or other:
        raise FldiagError(
            f"client {client} has a {type(selection).__name__} that does not say which of the examples it has",
            "give the numbers of its examples in data, or a Subset of data; or leave data out and give every "
            "client its examples",
            usage=True,
        )
    return index.astype(np.int64)


class Clients:
    """The numbers of clients, which may have names (of sites, say), or numbers too large to count up to.

    Args:
        names: of the clients of the partition.
        numbered: name -> number, of a run that goes on.
    """

    def __init__(self, names: Iterable[str] = (), numbered: Mapping[str, int] | None = None):
        names = list(names)
        self.are_named = not all(name.isdecimal() and int(name) < MOST for name in names)
        listed = client_files.numbers(names) if self.are_named else {}
        #: Name -> number, of those that have a name.
        self.numbers: dict[str, int] = {**listed, **(numbered or {})}
        #: A partition that has numbers has no names.
        self.may_have_names = self.are_named or not names
        numbers = [*self.numbers.values(), *([] if self.are_named else map(int, names))]
        self.next = max(numbers, default=-1) + 1

    def number_of(self, client: Any) -> int:
        """Raises FldiagError for what is neither a name nor a number from 0."""
        name = str(client)
        is_number = name.isdecimal() and not isinstance(client, bool)
        if not name or not (is_number or (isinstance(client, str) and self.may_have_names)):
            raise FldiagError(
                f"client {client!r} is not a number",
                "number the clients 0, 1, 2, ...; or name them, in the partition, too",
                usage=True,
            )
        if name in self.numbers:
            return self.numbers[name]
        is_free = is_number and int(name) not in self.numbers.values()
        if is_free and not self.are_named and (int(name) < MOST or not self.may_have_names):
            self.next = max(self.next, int(name) + 1)
            return int(name)
        self.numbers[name] = self.next
        self.next += 1
        return self.numbers[name]


def natural(number: Any, label: str, most: int = 2**62) -> int:
    """A number from 0 to ``most`` as an int. Raises FldiagError for anything else, bool and float included."""
    try:
        n = -1 if isinstance(number, (bool, np.bool_)) else operator.index(number)
    except TypeError:
        n = -1
    if not 0 <= n <= most:
        raise FldiagError(
            f"{label} {number!r} is not an integer from 0 to {most:,}",
            "count 1, 2, 3, ..., or leave it out",
            usage=True,
        )
    return n


def confirm_numbers(clients: Iterable[int], parts: Mapping[int, Any]) -> None:
    """Raises FldiagError where clients are numbered from 1 and the partition from 0, or the other way round: each would get the
    examples of its neighbour."""
    ids, first = set(clients), min(parts, default=0)
    lacking = sorted(ids - parts.keys())
    shift = {0: 1, 1: -1}.get(first)
    if not lacking or shift is None or not {k - shift for k in ids} <= parts.keys():
        return
    raise FldiagError(
        f"client {lacking[0]} is not in the partition, which numbers its clients from {first}: the clients' "
        f"numbers seem to be {abs(shift)} {'higher' if shift > 0 else 'lower'} than the partition's",
        "give the partition as a dict, client -> indices, with the clients' own numbers: "
        f"{first + shift} in place of {first}, {first + 1 + shift} in place of {first + 1}, and so on",
        usage=True,
    )


def weights_by_name(weights: Any, module: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """A module's state_dict, a mapping, a flat vector [P] of the parameters, or arrays in the order of the state_dict (or of the
    parameters); the buffers, where a vector or arrays leave them out, are those of the ``module``.

    Raises FldiagError when it is none of these, or of another length.
    """
    if isinstance(weights, nn.Module):
        return dict(unwrap_model(weights)[0].state_dict())
    if isinstance(weights, Mapping):
        return {str(k): _tensor(v) for k, v in weights.items()}
    flat = _tensor(weights) if isinstance(weights, (Tensor, np.ndarray)) else None
    if flat is not None and flat.ndim == 1:
        if flat.numel() != layout.size:
            raise FldiagError(
                f"a vector of {flat.numel():,} numbers, and the model has {layout.size:,} parameters",
                "give the parameters in the order of model.parameters()",
            )
        return {
            **{n: b for n, b in module.state_dict().items() if n not in layout.names},
            **layout.views(flat),
        }
    if flat is None and isinstance(weights, Iterable) and not isinstance(weights, (str, bytes)):
        arrays, state_names = [_tensor(a) for a in weights], list(module.state_dict())
        names = state_names if len(arrays) == len(state_names) else list(layout.names)
        if len(arrays) != len(names):
            raise FldiagError(
                f"{len(arrays)} arrays, and the model's state_dict has {len(state_names)}",
                "give the arrays of the model's state_dict() in its order",
            )
        return {**module.state_dict(), **dict(zip(names, arrays, strict=True))}
    raise FldiagError(
        f"a {type(weights).__name__} holds no weights",
        "give a state_dict, a module, a flat vector or a list of arrays",
        usage=True,
    )


def _tensor(value: Any) -> Tensor:
    try:
        return value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError):
        raise FldiagError(
            f"a {type(value).__name__} is not an array", "give tensors or arrays", usage=True
        ) from None
