"""What the caller hands to a Problem (weights, buffers, data), checked and brought into one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fldiag.errors import FldiagError, first_line
from fldiag.params import Layout, flatten
from fldiag.problem.trees import Tree, count, cut, join, named


class Data(Protocol):
    """A data slice: ``n`` examples, a ``name``, and ``batch(start, stop) -> (x, y)`` ready for the model."""

    n: int
    name: str

    def batch(self, start: int, stop: int) -> tuple[Tree, Tree]: ...


class TensorData:
    """Inputs and targets held in memory, seen as a slice."""

    def __init__(self, x: Tree, y: Tree, name: str = "data"):
        self.x, self.y, self.n, self.name = x, y, count(x), name
        kinds = list(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in named(x).values()))
        self.inputs = f"as passed ({', '.join(kinds)})"

    def batch(self, start: int, stop: int) -> tuple[Tree, Tree]:
        x = cut(self.x, slice(start, stop))
        return x, x if self.y is self.x else cut(self.y, slice(start, stop))


def as_data(data: Any) -> Data:
    """A slice as it is; a pair (x, y), a dict, a ``Dataset`` or a ``DataLoader`` as a slice.

    A dict is both inputs and targets: the model gets the entries that its forward names, the loss all of them. Raises
    FldiagError for anything else, and for parts of unequal length.
    """
    if all(hasattr(data, a) for a in ("n", "name", "batch")):
        if data.n < 1:
            raise FldiagError(f"the slice {data.name!r} is empty", "choose a slice with at least one example")
        return data
    plain = isinstance(data, (Mapping, tuple, list, str, Tensor, np.ndarray))
    if isinstance(data, (DataLoader, Dataset)) or (not plain and hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        x, y = _drawn(data)
    elif isinstance(data, Mapping):
        x, y = data, data
    elif isinstance(data, (tuple, list)) and len(data) == 2:
        x, y = data
    else:
        raise FldiagError(f"data is a {type(data).__name__}",
                          "give a pair (x, y) of tensors, a dict of tensors, a Dataset, a DataLoader, or a slice with n, name "
                          "and batch(start, stop)", usage=True)
    held = _tensors(x, "x")
    target = held if y is x else _tensors(y, "y")
    lengths = {f"{what}{'.' if n and n[0] != '[' else ''}{n}": len(t)
               for what, part in (("x", held), *((("y", target),) if y is not x else ())) for n, t in named(part).items()}
    (first, n), *others = lengths.items()
    for name, length in others:
        if length != n:
            raise FldiagError(f"{first} has {n} examples and {name} has {length}", "give each example a target", usage=True)
    if n == 0:
        raise FldiagError("the data are empty", "give at least one example", usage=True)
    return TensorData(held, target)


def _tensors(part: Any, what: str) -> Tree:
    """Arrays as tensors, mappings as dicts. Raises FldiagError for what is no tensor with examples along axis 0."""
    if isinstance(part, Mapping):
        held: Tree = {str(k): _tensors(v, f"{what}.{k}") for k, v in part.items()}
    elif isinstance(part, tuple) and hasattr(part, "_fields"):
        held = type(part)(*(_tensors(v, f"{what}.{k}") for k, v in zip(part._fields, part, strict=True)))
    elif isinstance(part, (tuple, list)) and all(isinstance(v, (Mapping, tuple, list, Tensor, np.ndarray)) for v in part):
        held = tuple(_tensors(v, f"{what}[{i}]") for i, v in enumerate(part))
    else:
        held = torch.from_numpy(part) if isinstance(part, np.ndarray) else part
        if not isinstance(held, Tensor) or held.ndim == 0:
            raise FldiagError(f"{what} of the data is a {type(part).__name__} without examples along axis 0",
                              "give tensors whose first axis counts the examples", usage=True)
        return held.detach()
    if not held:
        raise FldiagError(f"{what} of the data holds no tensor", "give tensors whose first axis counts the examples", usage=True)
    return held


def _drawn(source: DataLoader[Any] | Dataset[Any]) -> tuple[Tree, Tree]:
    """Everything that a loader or a data set yields, drawn once and kept in that order.

    Raises FldiagError where nothing comes, where batches do not fit each other, or another number than was announced.
    """
    loader = source if isinstance(source, DataLoader) else DataLoader(
        source, batch_size=256, collate_fn=_collated)
    parts = [_pair(batch, i) for i, batch in enumerate(loader)]
    kind = type(source).__name__
    if not parts:
        raise FldiagError(f"the {kind} yields nothing", "give at least one example", usage=True)
    announced = None if isinstance(loader.dataset, IterableDataset) else len(loader)
    if announced not in (None, len(parts)):
        raise FldiagError(f"the {kind} announces {announced} batches and yields {len(parts)}", "fix its sampler", usage=True)
    shapes = [{f"{what} {n}": list(t.shape[1:]) for what, part in zip("xy", pair, strict=True) for n, t in named(part).items()}
              for pair in parts]
    for i, found in enumerate(shapes):
        for name, shape in shapes[0].items():
            if found.get(name) != shape:
                raise FldiagError(f"batch {i + 1} of the {kind} has {name.strip()} of shape {found.get(name)} an example, and "
                                  f"the first {shape}: the batches have unequal lengths",
                                  "pad all examples to one length (padding='max_length')", usage=True)
    same = parts[0][1] is parts[0][0]
    x = join([p[0] for p in parts])
    y = x if same else join([p[1] for p in parts])
    return x, y


def _collated(examples: list[Any]) -> Any:
    try:
        return default_collate(examples)
    except (RuntimeError, TypeError) as error:
        raise FldiagError(f"the examples of the Dataset cannot be combined into a batch: {first_line(error)}",
                          "pad all examples to one length, or give a DataLoader with a collate_fn", usage=True) from None


def _pair(batch: Any, i: int) -> tuple[Tree, Tree]:
    """Inputs and targets of a batch: of a dict both are the whole, of a tuple the last is the target."""
    if isinstance(batch, Mapping):
        whole = _tensors(batch, f"batch {i + 1}")
        return whole, whole
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise FldiagError(f"batch {i + 1} of the data is a {type(batch).__name__} without targets",
                          "yield (inputs, targets), or a dict that holds both", usage=True)
    first = batch[0] if len(batch) == 2 else tuple(batch[:-1])
    return _tensors(first, f"x of batch {i + 1}"), _tensors(batch[-1], f"y of batch {i + 1}")


def convert(x: Tree, y: Tree, dtype: torch.dtype, device: torch.device) -> tuple[Tree, Tree]:
    """A batch on the device: floating inputs and targets in ``dtype``, integers (tokens, say) as they are, integer targets as
    class numbers."""
    def placed(t: Tensor) -> Tensor:
        return t.to(device, dtype if t.is_floating_point() else t.dtype)

    def target(t: Tensor) -> Tensor:
        return placed(t) if t.is_floating_point() or t.dtype == torch.bool else t.to(device, torch.int64)

    held = tree_map(placed, x)
    return held, held if y is x else tree_map(target, y)


def _misfit(kind: str, missing: list[str], unexpected: list[str], wrong: list[str]) -> FldiagError:
    def some(names: list[str]) -> str:
        return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

    said = [f"{what} {some(names)}" for what, names in
            (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong)) if names]
    return FldiagError(f"{kind} do not fit the model: {'; '.join(said)}",
                       "give the weights of this very architecture, named as in its state_dict()", usage=True)


def _chosen(kind: str, given: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], optional: set[str],
           ignored: set[str]) -> dict[str, Tensor]:
    """The tensors of ``given`` that ``shapes`` asks for; ``optional`` may lack, ``ignored`` may be there."""
    missing = [n for n in shapes if n not in given and n not in optional]
    unexpected = [n for n in given if n not in shapes and n not in ignored]
    wrong = [f"{n} {list(given[n].shape)} instead of {list(s)}" for n, s in shapes.items()
             if n in given and given[n].shape != s]
    if missing or unexpected or wrong:
        raise _misfit(kind, missing, unexpected, wrong)
    return {n: given[n] for n in shapes if n in given}


def _vector(kind: str, given: Tensor, size: int) -> Tensor:
    if given.ndim != 1 or given.numel() != size:
        raise FldiagError(f"{kind} has shape {list(given.shape)}, the model needs a vector of {size} numbers",
                          "give one flat vector in the order of the model's named tensors", usage=True)
    return given


def weights(module: nn.Module, layout: Layout, given: Any, dtype: torch.dtype,
            device: torch.device) -> Tensor:
    """The weights to diagnose as a new vector [P]: the module's own, or a vector, or a dict of named tensors.

    A whole state_dict is welcome: its buffers and second names of tied tensors are passed over.
    Raises FldiagError naming missing and unexpected tensors and wrong shapes.
    """
    if given is None:
        w = flatten(module)
    elif isinstance(given, Mapping):
        also = {n for n, _ in module.named_buffers()}
        also |= {n for n, _ in module.named_parameters(remove_duplicate=False)}
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        found = _chosen("params", given, shapes, set(), also)
        w = layout.row(found).detach()
    elif isinstance(given, Tensor):
        w = _vector("params", given.detach(), layout.size)
    else:
        raise FldiagError(f"params is a {type(given).__name__}",
                          "give a vector or a dict of named tensors", usage=True)
    return w.to(device, dtype, copy=True).contiguous()


def buffers(module: nn.Module, given: Any, params: Any, dtype: torch.dtype,
            device: torch.device) -> dict[str, Tensor]:
    """Own copies of the module's buffers, replaced by those given.

    ``given`` is a dict (non-persistent buffers and batch counters may lack) or one vector of the floating
    point buffers in the order of ``named_buffers()``. Without it, buffers found in a ``params`` dict count.
    Raises FldiagError naming missing and unexpected buffers and wrong shapes.
    """
    own = dict(module.named_buffers())
    if given is None and isinstance(params, Mapping):
        given = {n: t for n, t in params.items() if n in own} or None
    if isinstance(given, Tensor):
        floating = {n: b for n, b in own.items() if b.is_floating_point()}
        flat = _vector("buffers", given.detach(), sum(b.numel() for b in floating.values()))
        parts = flat.split([b.numel() for b in floating.values()]) if floating else ()
        given = {n: part.reshape(b.shape) for (n, b), part in zip(floating.items(), parts, strict=True)}
        given = {**{n: b for n, b in own.items() if n not in floating}, **given}
    if given is not None:
        kept = set(module.state_dict())
        optional = {n for n in own if n not in kept or n.endswith("num_batches_tracked")}
        own |= _chosen("buffers", given, {n: b.shape for n, b in own.items()}, optional, set())
    return {n: b.detach().to(device, dtype if b.is_floating_point() else b.dtype, copy=True)
            for n, b in own.items()}
