"""Data as people have them, in one form: a slice with ``n`` examples, a ``name`` and ``batch(start, stop) -> (x, y)``.

x and y are tensors, or tensors in dicts and tuples (trees); axis 0 counts the examples. A dict is inputs and targets at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from fldiag.data import Dataset as NamedDataset
from fldiag.data import take
from fldiag.errors import FldiagError, first_line

#: A tensor, or tensors in dicts and tuples.
Tree = Any


class DataSlice(Protocol):
    """A slice of data: ``n`` examples, a ``name``, and ``batch(start, stop) -> (x, y)`` ready for the model."""

    @property
    def n(self) -> int: ...

    @property
    def name(self) -> str: ...

    def batch(self, start: int, stop: int) -> tuple[Tree, Tree]: ...


@dataclass(frozen=True)
class TensorSlice:
    """Inputs and targets in memory."""

    x: Tree
    y: Tree
    name: str = "data"

    @property
    def n(self) -> int:
        return count(self.x)

    @property
    def inputs(self) -> str:
        """What was done to the inputs, in words."""
        kinds = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tree_leaves(self.x))
        return f"as passed ({', '.join(kinds)})"

    def batch(self, start: int, stop: int) -> tuple[Tree, Tree]:
        return cut((self.x, self.y), slice(start, stop))


@dataclass(frozen=True)
class IndexedSlice:
    """Examples of a data set that are read by index, and combined by ``collate``, whenever a batch is needed."""

    dataset: Any
    collate: Callable[[list[Any]], Any] = default_collate
    name: str = "data"

    @property
    def n(self) -> int:
        return len(self.dataset)

    def batch(self, start: int, stop: int) -> tuple[Tree, Tree]:
        examples = [self.dataset[i] for i in range(start, min(stop, self.n))]
        try:
            batch = self.collate(examples)
        except (RuntimeError, TypeError) as error:
            raise FldiagError(
                f"the examples cannot be combined into a batch: {first_line(error)}",
                "pad all examples to one length, or give a DataLoader with a collate_fn",
                usage=True,
            ) from error
        return pair(batch)


def as_slice(data: Any) -> DataSlice:
    """Data in any of these forms as a slice.

    Args:
        data: a pair (x, y); a dict, of which the model gets the arguments of its forward and the loss all entries; a
            ``Dataset``, or a ``DataLoader`` over one, of which examples are read by index; a list of batches; or a slice.

    Returns:
        The slice; of a data set of fldiag its training examples.

    Raises:
        FldiagError: anything else, no examples, or inputs and targets with different numbers of them.
    """
    if isinstance(data, NamedDataset):
        return take(data, "train")
    if not all(hasattr(data, name) for name in ("n", "name", "batch")):
        data = _slice_of(data)
    if data.n < 1:
        raise FldiagError("the data are empty", "give at least one example", usage=True)
    return data


def _slice_of(data: Any) -> DataSlice:
    if isinstance(data, DataLoader):
        sampler = data.sampler
        is_whole = isinstance(sampler, SequentialSampler) or (
            isinstance(sampler, RandomSampler) and sampler.num_samples == len(sampler.data_source)
        )
        if not isinstance(data.dataset, IterableDataset) and is_whole and not data.drop_last:
            return IndexedSlice(data.dataset, data.collate_fn)
        data = list(data)
    if isinstance(data, IterableDataset):
        data = list(DataLoader(data, batch_size=256))
    plain = isinstance(data, (Mapping, tuple, list, str, Tensor, np.ndarray))
    if isinstance(data, Dataset) or (not plain and hasattr(data, "__getitem__")):
        return IndexedSlice(data)
    if not isinstance(data, list) or not data or _is_array(data[0]):
        data = [data]
    batches = [pair(batch) for batch in data]
    return TensorSlice(*(join(side) for side in zip(*batches, strict=True)))


def pair(batch: Any) -> tuple[Tree, Tree]:
    """Inputs and targets of a batch, as tensors.

    Raises FldiagError for what is no pair of arrays with one row an example.
    """
    if isinstance(batch, Mapping):
        x = y = dict(batch)
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        x, y = batch
    else:
        entries = f" with {len(batch)} entries" if isinstance(batch, (tuple, list)) else ""
        raise FldiagError(
            f"the data, or a batch of them, is a {type(batch).__name__}{entries}",
            "give pairs (inputs, target), several inputs in a tuple: [((a, b), y) for a, b, y in loader]",
            usage=True,
        )
    try:
        inputs = tree_map(torch.as_tensor, tuple(x) if isinstance(x, list) else x)
        targets = inputs if y is x else tree_map(torch.as_tensor, y)
        sizes = sorted({len(leaf) for leaf in tree_leaves((inputs, targets))})
    except (TypeError, ValueError, RuntimeError) as error:
        raise FldiagError(
            f"the data hold what is no array of examples: {first_line(error)}",
            "give tensors whose first axis counts the examples",
            usage=True,
        ) from error
    if len(sizes) != 1:
        raise FldiagError(
            f"inputs and targets have {' and '.join(map(str, sizes))} rows",
            "give every example its inputs and its target",
            usage=True,
        )
    return inputs, targets


def is_split(data: Any) -> bool:
    """Whether these are training inputs and targets and test inputs and targets."""
    return isinstance(data, (tuple, list)) and len(data) == 4 and all(map(_is_array, data))


def _is_array(part: Any) -> bool:
    return isinstance(part, (Tensor, np.ndarray))


def count(tree: Tree) -> int:
    """The number of examples."""
    return len(tree_leaves(tree)[0])


def cut(tree: Tree, examples: slice | Tensor) -> Tree:
    """Some of the examples."""
    return tree_map(lambda leaf: leaf[examples], tree)


def join(trees: Sequence[Tree]) -> Tree:
    """Trees of one form, one after the other along axis 0."""
    return tree_map(lambda *leaves: torch.cat(leaves), *trees)


def convert(tree: Tree, dtype: torch.dtype, device: torch.device, is_target: bool = False) -> Tree:
    """On the device: floating-point tensors in ``dtype``, integers as they are, but as int64 where they are targets."""

    def place(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            return leaf.to(device, dtype)
        is_label = is_target and leaf.dtype != torch.bool
        return leaf.to(device, torch.int64 if is_label else leaf.dtype)

    return tree_map(place, tree)


def same(a: Tree, b: Tree, tolerance: float = 0.0) -> bool:
    """Equal up to a share of the largest entry of a tensor (NaN equals NaN); what is no tensor is not compared."""
    pairs = list(zip(tree_leaves(a), tree_leaves(b), strict=True))
    for p, q in ((p.detach(), q.detach()) for p, q in pairs if isinstance(p, Tensor)):
        if p.shape != q.shape:
            return False
        if p.is_floating_point():
            scale = float(p.abs().nan_to_num(0.0, 0.0).max()) if p.numel() else 0.0
            if not torch.allclose(p, q, tolerance, tolerance * scale, equal_nan=True):
                return False
        elif not torch.equal(p, q):
            return False
    return True


def describe(tree: Tree) -> str:
    """Shapes and types in words."""
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        return "(" + ", ".join(map(describe, tree)) + ")"
    return f"{str(tree.dtype)[6:]} {list(tree.shape)}" if isinstance(tree, Tensor) else repr(tree)


def arguments(forward: inspect.Signature, x: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a forward method is called on a batch.

    The tensors of a tuple are its positional arguments. Of a dict it gets the entries that it names, or all where it names
    none and takes ``**``. Where it cannot take them one by one it gets them all as one argument.
    """
    kinds = [p.kind for p in forward.parameters.values()]
    if isinstance(x, Mapping):
        kwargs = {k: v for k, v in x.items() if k in forward.parameters}
        if not kwargs and inspect.Parameter.VAR_KEYWORD in kinds:
            kwargs = dict(x)
        return ((), kwargs) if kwargs else ((x,), {})
    if isinstance(x, tuple):
        places = sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
        if places >= len(x) or inspect.Parameter.VAR_POSITIONAL in kinds:
            return x, {}
    return (x,), {}
