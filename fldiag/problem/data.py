"""Data as people have them, in one form: a slice with ``n`` examples, a ``name`` and ``batch(start, stop) -> (x, y)``.

x and y are tensors, or tensors in dicts and tuples (trees); axis 0 counts the examples. A dict is inputs and targets at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from fldiag.data import Dataset as NamedDataset
from fldiag.data import take
from fldiag.errors import FldiagError
from fldiag.registry import Function

#: A tensor, or tensors in dicts and tuples.
Tree = Any
#: Inputs and targets.
Batch = tuple[Tree, Tree]
#: By name.
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class TensorSlice:
    """Inputs and targets in memory."""

    x: Tree
    y: Tree
    name: str = "data"

    @property
    def n(self) -> int:
        return count(self.x)

    def batch(self, start: int, stop: int) -> Batch:
        return cut((self.x, self.y), slice(start, stop))


@dataclass(frozen=True)
class IndexedSlice:
    """Examples of a data set that are read by index, and combined by ``collate``, whenever a batch is needed."""

    dataset: Any
    collate: Function = default_collate
    name: str = "data"

    @property
    def n(self) -> int:
        return len(self.dataset)

    def batch(self, start: int, stop: int) -> Batch:
        return pair(self.collate([self.dataset[i] for i in range(start, min(stop, self.n))]))


def as_slice(data: Any) -> Any:
    """Data in any of these forms as a slice.

    Args:
        data: a pair (x, y); a dict, of which the model gets the arguments of its forward and the loss all entries; a
            ``Dataset``, or a ``DataLoader`` over one, of which examples are read by index; a list of batches; or a slice:
            ``n`` examples, a ``name``, and ``batch(start, stop) -> (x, y)`` ready for the model.

    Returns:
        The slice; of a data set of fldiag its training examples.

    Raises:
        FldiagError: anything else, no examples, or inputs and targets with different numbers of them.
    """
    if isinstance(data, NamedDataset):
        return take(data, "train")
    if isinstance(data, DataLoader):
        whole = IndexedSlice(data.dataset, data.collate_fn)
        is_plain = type(data.sampler) in (SequentialSampler, RandomSampler) and data.batch_size
        data = whole if is_plain and len(data.sampler) == whole.n else list(data)  # type: ignore[arg-type]
    if not all(hasattr(data, name) for name in ("n", "name", "batch")):
        if hasattr(data, "__getitem__") and not isinstance(data, (Mapping, tuple, list, Tensor)):
            data = IndexedSlice(data)
        else:
            batches = data if isinstance(data, list) and data and not _is_array(data[0]) else [data]
            data = TensorSlice(*join([*map(pair, batches)]))
    if data.n < 1:
        raise FldiagError("the data are empty", usage=True)
    return data


def pair(batch: Any) -> Batch:
    """Inputs and targets of a batch, as tensors.

    Raises FldiagError for what is no pair of arrays with one row an example.
    """
    sides: Any = (dict(batch), dict(batch)) if isinstance(batch, Mapping) else batch
    try:
        x, y = sides if isinstance(sides, (tuple, list)) else ()
        x, y = tree_map(torch.as_tensor, (tuple(x) if isinstance(x, list) else x, y))
        (_,) = {len(leaf) for leaf in tree_leaves((x, y))}
    # not two sides, no arrays, or of different lengths
    except (TypeError, ValueError, RuntimeError):
        raise FldiagError(
            f"the data, or a batch of them, are no pair of inputs and targets with a row an example: {describe(batch)}",
            "give pairs (inputs, target), several inputs in a tuple: [((a, b), y) for a, b, y in loader]",
            usage=True,
        ) from None
    return x, y


def is_split(data: Any) -> bool:
    """Whether these are training inputs and targets and test inputs and targets."""
    return isinstance(data, (tuple, list)) and len(data) == 4 and all(map(_is_array, data))


def _is_array(part: Any) -> bool:
    return hasattr(part, "shape")


def count(tree: Tree) -> int:
    """The number of examples."""
    return len(tree_leaves(tree)[0])


def cut(tree: Tree, examples: slice | Tensor) -> Tree:
    """Some of the examples."""
    return tree_map(lambda leaf: leaf[examples], tree)


def join(trees: Sequence[Tree]) -> Tree:
    """Trees of one form, one after the other along axis 0."""
    return tree_map(lambda *leaves: torch.cat(leaves), *trees)


def convert(tree: Tree, dtype: torch.dtype, device: torch.device) -> Tree:
    """On the device: floating-point tensors in ``dtype``, integers as they are."""
    return tree_map(lambda t: t.to(device, dtype if t.is_floating_point() else t.dtype), tree)


def same(a: Tree, b: Tree, tolerance: float = 0.0) -> bool:
    """Equal up to a share of the norm of a tensor (NaN equals NaN); what is no tensor is not compared."""

    for p, q in zip(tree_leaves(a), tree_leaves(b), strict=False):
        if isinstance(p, Tensor):
            p, q = (t.nan_to_num().double() for t in (p, q))
            if p.shape != q.shape or not (p - q).norm() <= tolerance * p.norm():
                return False
    return True


def describe(tree: Tree) -> str:
    """Shapes, and what has none as it is."""
    return str(tree_map(lambda leaf: getattr(leaf, "shape", leaf), tree))


def arguments(module: nn.Module, x: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a module's forward is called on a batch.

    The tensors of a tuple are its positional arguments. Of a dict it gets the entries that it names, or all where it names
    none and takes ``**``, or else the dict itself.
    """
    if isinstance(x, Mapping):
        forward = inspect.signature(module.forward)
        named = {k: v for k, v in x.items() if k in forward.parameters}
        if named or "**" in str(forward):
            return (), named or dict(x)
    return x if isinstance(x, tuple) else (x,), {}
