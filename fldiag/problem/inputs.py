"""What the caller hands to a Problem (weights, buffers, data), checked and brought into one form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from fldiag import device
from fldiag.data import Dataset as NamedDataset
from fldiag.data import take
from fldiag.errors import FldiagError, counted, first_line
from fldiag.params import Layout, flatten
from fldiag.problem.trees import Tree, count, cut, describe, join, leaves_by_place

#: The part of the memory that the examples of a data set may fill; more of them are read anew for every batch.
MOST = 1 / 4


class DataSlice(Protocol):
    """A data slice: ``n`` examples, a ``name``, and ``batch(start, stop) -> (x, y)`` ready for the model."""

    n: int
    name: str

    def batch(self, start: int, stop: int) -> tuple[Tree, Tree]: ...


class TensorData:
    """Inputs and targets held in memory, seen as a slice; ``remarks``: how entries of the source were taken."""

    def __init__(self, x: Tree, y: Tree, name: str = "data", remarks: tuple[str, ...] = ()):
        self.x, self.y, self.n, self.name, self.remarks = x, y, count(x), name, remarks
        kinds = list(
            dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in leaves_by_place(x).values())
        )
        self.inputs = f"as passed ({', '.join(kinds)})"

    def batch(self, start: int, stop: int) -> tuple[Tree, Tree]:
        x = cut(self.x, slice(start, stop))
        return x, x if self.y is self.x else cut(self.y, slice(start, stop))


class IndexedData:
    """Examples of a data set that would fill the memory, read by index whenever a batch is needed.

    ``collate``: examples -> a batch; ``inputs``: how many entries of a batch are inputs. Raises FldiagError for examples that
    change from one reading to the next.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        inputs: int,
        remarks: tuple[str, ...] = (),
    ):
        self.dataset, self.collate, self.input_count, self.remarks = (
            dataset,
            collate,
            inputs,
            remarks,
        )
        self.n, self.name, self.inputs = len(dataset), "data", "as the data set yields them"
        first, second = (leaves_by_place(self.batch(0, min(4, self.n))) for _ in range(2))
        examples = leaves_by_place(self.batch(0, min(4, self.n))[0]).values()
        if any(bool(x.isnan().any()) for x in examples):
            raise FldiagError(
                f"the first examples of the {type(dataset).__name__} hold NaN",
                "clean the data: every input must be a number",
                usage=True,
            )
        if not all(_equal(first[place], second[place]) for place in first):
            raise FldiagError(
                f"the {type(dataset).__name__} yields other numbers each time that an example is read, as random augmentation "
                "does, and it is too large to be drawn once",
                "give it without what is random, or a part of it: torch.utils.data.Subset(dataset, range(1000))",
                usage=True,
            )

    def batch(self, start: int, stop: int) -> tuple[Tree, Tree]:
        batch = self.collate([self.dataset[i] for i in range(start, min(stop, self.n))])
        return _pair(_entries(batch, 0), self.input_count)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same, NaN in the same places."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


@dataclass(frozen=True)
class Entries:
    """What a source yields, as it is: the entries of every batch (one, where a batch is a dict). Of a ``dataset`` that is too
    large only the first batch; ``collate`` makes others."""

    batches: list[tuple[Any, ...]]
    source: str
    remarks: tuple[str, ...] = ()
    dataset: Any = None
    collate: Callable[[list[Any]], Any] = default_collate

    def __len__(self) -> int:
        return len(self.batches[0])


def as_data(data: Any, forward: inspect.Signature | None = None) -> DataSlice:
    """A slice as it is; a pair (x, y), a dict, a list of batches, a ``Dataset`` or a ``DataLoader`` as a slice; of a data set of
    fldiag its training examples.

    A dict is both inputs and targets: the model gets the entries that its forward names, the loss all of them. Of three or more
    entries the required arguments of ``forward`` are the inputs, and the next one is the target.

    Raises FldiagError for anything else, for parts of unequal length, and where it is not clear which entry is the target.
    """
    entries = draw(data)
    return split(entries, forward) if isinstance(entries, Entries) else entries


def draw(data: Any) -> Any:
    """A slice as it is, and of anything else its entries; a loader or a data set is read once."""
    if isinstance(data, Entries):
        return data
    if isinstance(data, NamedDataset):
        return take(data, "train")
    if all(hasattr(data, a) for a in ("n", "name", "batch")):
        if data.n < 1:
            raise FldiagError(
                f"the slice {data.name!r} is empty", "choose a slice with at least one example"
            )
        return data
    plain = isinstance(data, (Mapping, tuple, list, str, Tensor, np.ndarray))
    if isinstance(data, (DataLoader, Dataset)) or (
        not plain and hasattr(data, "__getitem__") and hasattr(data, "__len__")
    ):
        return _draw_all(data)
    if isinstance(data, Mapping):
        return Entries([(data,)], "the data")
    if _is_list_of_examples(data):
        return _draw_all(data)
    if _is_list_of_batches(data):
        batches = [_entries(batch, i) for i, batch in enumerate(data)]
        return Entries(
            batches,
            f"the {type(data).__name__}",
            (f"the data are a {type(data).__name__} of {len(data)} batches",),
        )
    if isinstance(data, (tuple, list)) and len(data) > 1:
        return Entries([tuple(data)], f"the {type(data).__name__}")
    raise FldiagError(
        f"data is a {type(data).__name__}",
        "give a pair (x, y) of tensors, a dict of tensors, a list of such batches, a Dataset, a DataLoader, or a "
        "slice with n, name and batch(start, stop)",
        usage=True,
    )


def split(entries: Entries, forward: inspect.Signature | None) -> TensorData | IndexedData:
    """Inputs and targets of what was drawn, for a model with this ``forward`` (None: it takes one input)."""
    inputs, remarks = len(entries) - 1, entries.remarks
    if len(entries) > 2:
        inputs, remark = _input_count(entries, forward)
        remarks = (*remarks, remark)
    if entries.dataset is not None:
        return IndexedData(entries.dataset, entries.collate, inputs, remarks)
    several = len(entries.batches) > 1
    pairs = [
        _pair(batch, inputs, f"batch {i + 1}" if several else "")
        for i, batch in enumerate(entries.batches)
    ]
    if not several:
        return TensorData(*pairs[0], remarks=remarks)
    _check_batches(pairs, entries.source)
    x = join([x for x, _ in pairs])
    return TensorData(
        x, x if pairs[0][0] is pairs[0][1] else join([y for _, y in pairs]), remarks=remarks
    )


def _pair(batch: tuple[Any, ...], inputs: int, name: str = "") -> tuple[Tree, Tree]:
    """Inputs and targets of a batch whose first ``inputs`` entries are inputs (0: all of a dict is both)."""
    of = f" of {name}" if name else ""
    if inputs == 0:
        x = y = _tensors(batch[0], name or "x")
    else:
        x = _tensors(batch[0] if inputs == 1 else batch[:inputs], f"x{of}")
        y = x if batch[inputs] is batch[0] else _tensors(batch[inputs], f"y{of}")
    _check_rows(x, y, f" in {name}" if name else "")
    return x, y


def _input_count(entries: Entries, forward: inspect.Signature | None) -> tuple[int, str]:
    """How many of three or more entries are inputs, and which entry is what, in words.

    Raises FldiagError where the required arguments of forward do not decide it.
    """
    size = len(entries)
    parameters = [] if forward is None else list(forward.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least = max(1, sum(p.default is p.empty for p in positional))
    most = (
        size - 1
        if any(p.kind is p.VAR_POSITIONAL for p in parameters)
        else min(size - 1, max(1, len(positional)))
    )
    inside = ", ".join(
        f"entry {i + 1}: {describe_entry(part)}" for i, part in enumerate(entries.batches[0])
    )
    text = f"{entries.source} has {size} entries ({inside}), and the model takes {forward or 'one input'}"
    if least >= size:
        raise FldiagError(
            f"{text}: there is no target",
            "yield a target after the inputs, or a dict that holds both",
            usage=True,
        )
    if least < most:
        raise FldiagError(
            f"{text}: it is not clear which entry is the target",
            "give pairs (inputs, target), with several inputs in a tuple; of a loader a list of them: "
            "[((a, b), y) for a, b, y in loader] or [(x, y) for x, y, _ in loader]",
            usage=True,
        )
    names = [f"entry {i + 1}" for i in range(size)]
    unused = names[least + 1 :]
    return (
        least,
        f"of {size} entries, {_listed(names[:least])} {'is the input' if least == 1 else 'are the inputs'} and "
        f"{names[least]} is the target"
        + (f"; {_listed(unused)} {'is' if len(unused) == 1 else 'are'} not used" if unused else ""),
    )


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def describe_entry(part: Any) -> str:
    """Type and shape of an entry."""
    if isinstance(part, (Tensor, np.ndarray)):
        return f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
    return describe(part)


def is_split(data: Any) -> bool:
    """Whether these are training inputs and targets and test inputs and targets, not four batches or examples."""
    return (
        isinstance(data, (tuple, list))
        and len(data) == 4
        and not _is_list_of_batches(data)
        and not _is_list_of_examples(data)
    )


def _is_list_of_batches(data: Any) -> bool:
    """Whether these are batches, and not inputs and targets: all of one form. Two in a tuple are inputs and targets."""
    if (
        not isinstance(data, (tuple, list))
        or not data
        or (isinstance(data, tuple) and len(data) < 3)
    ):
        return False
    forms = [_form(batch) if isinstance(batch, (Mapping, tuple, list)) else None for batch in data]
    return forms[0] is not None and all(form == forms[0] for form in forms)


def _is_list_of_examples(data: Any) -> bool:
    """Whether a list holds what a ``Dataset`` yields one by one: tensors, and numbers without an axis."""
    return (
        isinstance(data, list)
        and bool(data)
        and all(
            isinstance(example, (Mapping, tuple, list))
            and _has_examples(leaves_by_place(example).values())
            for example in data
        )
    )


def _has_examples(leaves: Collection[Any]) -> bool:
    axes = [leaf.ndim for leaf in leaves if isinstance(leaf, (Tensor, np.ndarray))]
    return bool(axes) and (
        0 in axes or any(isinstance(leaf, (int, float, np.number)) for leaf in leaves)
    )


def _form(batch: Any) -> Any:
    """What batches of one source have in common: the places of tensors, their axes and types."""
    return [
        (place, leaf.ndim, str(leaf.dtype))
        if isinstance(leaf, (Tensor, np.ndarray))
        else (place, type(leaf))
        for place, leaf in leaves_by_place(batch).items()
    ]


def _check_rows(x: Tree, y: Tree, suffix: str) -> None:
    """Raises FldiagError where inputs and targets do not have one row an example."""
    rows = {
        f"{side}{'.' if place and place[0] != '[' else ''}{place}": leaf
        for side, part in (("x", x), *((("y", y),) if y is not x else ()))
        for place, leaf in leaves_by_place(part).items()
    }
    (first, leaf), *rest = rows.items()
    n = len(leaf)
    for name, other in rest:
        if len(other) != n:
            graph = any(
                t.ndim == 2 and 2 in t.shape and not t.is_floating_point() for t in rows.values()
            )
            raise FldiagError(
                f"{name} has {counted(len(other), 'row')} and {first} has {n}{suffix}: every entry needs one row an example",
                "a graph with its edges is one example: give ((nodes[None], edges[None]), targets[None]) and a model that goes "
                "over its examples: torch.stack([net(*graph) for graph in zip(nodes, edges)])"
                if graph
                else "give every example its inputs and its target",
                usage=True,
            )
    if n == 0:
        raise FldiagError("the data are empty", "give at least one example", usage=True)


def _check_batches(pairs: list[tuple[Tree, Tree]], source: str) -> None:
    """Raises FldiagError for batches that do not fit each other."""
    shapes = [
        {
            f"{side} {place}": list(leaf.shape[1:])
            for side, part in zip("xy", pair, strict=True)
            for place, leaf in leaves_by_place(part).items()
        }
        for pair in pairs
    ]
    for i, later in enumerate(shapes):
        for name, shape in shapes[0].items():
            if later.get(name) != shape:
                raise FldiagError(
                    f"batch {i + 1} of {source} has {name.strip()} of shape {later.get(name)} an example, and "
                    f"the first {shape}: the batches have unequal lengths",
                    "pad all examples to one length (padding='max_length')",
                    usage=True,
                )


def _tensors(part: Any, name: str) -> Tree:
    """Arrays as tensors, mappings as dicts. Raises FldiagError for what is no tensor with examples along axis 0."""
    if isinstance(part, Mapping):
        tree: Tree = {str(k): _tensors(v, f"{name}.{k}") for k, v in part.items()}
    elif isinstance(part, tuple) and hasattr(part, "_fields"):
        tree = type(part)(
            *(_tensors(v, f"{name}.{k}") for k, v in zip(part._fields, part, strict=True))
        )
    elif isinstance(part, (tuple, list)) and all(
        isinstance(v, (Mapping, tuple, list, Tensor, np.ndarray)) for v in part
    ):
        tree = tuple(_tensors(v, f"{name}[{i}]") for i, v in enumerate(part))
    else:
        tensor = torch.from_numpy(part) if isinstance(part, np.ndarray) else part
        if not isinstance(tensor, Tensor) or tensor.ndim == 0:
            raise FldiagError(
                f"{name} of the data is a {type(part).__name__} without examples along axis 0",
                "give tensors whose first axis counts the examples",
                usage=True,
            )
        return tensor.detach()
    if not tree:
        raise FldiagError(
            f"{name} of the data holds no tensor",
            "give tensors whose first axis counts the examples",
            usage=True,
        )
    return tree


def _draw_all(source: Any) -> Entries:
    """Everything that a loader or a data set yields, drawn once and kept in that order; of a data set that would fill the memory
    the first batch, and how to read the others.

    Raises FldiagError where nothing comes, or another number of batches than was announced, and for a stream that would fill the
    memory.
    """
    loader = (
        source
        if isinstance(source, DataLoader)
        else DataLoader(source, batch_size=256, collate_fn=_collated)
    )
    kind, is_stream = type(source).__name__, isinstance(loader.dataset, IterableDataset)
    most = MOST * device.memory()
    batches: list[tuple[Any, ...]] = []
    size = 0
    for i, batch in enumerate(loader):
        batches.append(_entries(batch, i))
        size += sum(
            leaf.nbytes
            for leaf in leaves_by_place(batch).values()
            if isinstance(leaf, (Tensor, np.ndarray))
        )
        if is_stream and size > most:
            raise FldiagError(
                f"the {kind} is a stream of more than {most / 2**30:,.1f} GiB, and its examples are needed several times",
                "give a Dataset with __getitem__ and __len__, which is read by index, or a part of the stream: "
                "list(itertools.islice(loader, 100))",
                usage=True,
            )
        if not i and not is_stream and size * len(loader) > most:
            return _indexed(loader, kind, batches)
    if not batches:
        raise FldiagError(f"the {kind} yields nothing", "give at least one example", usage=True)
    announced = None if is_stream else len(loader)
    if announced not in (None, len(batches)):
        raise FldiagError(
            f"the {kind} announces {announced} batches and yields {len(batches)}",
            "fix its sampler",
            usage=True,
        )
    return Entries(batches, f"the {kind}")


def _indexed(loader: DataLoader[Any], kind: str, batches: list[tuple[Any, ...]]) -> Entries:
    """A data set that would fill the memory. Raises FldiagError for a loader that may leave examples out or repeat them."""
    n, sampler = len(loader.dataset), loader.sampler  # type: ignore[arg-type]
    is_whole = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == n
    )
    if not is_whole or loader.drop_last or loader.batch_sampler is None:
        raise FldiagError(
            f"the {kind} chooses its examples itself, and they would fill the memory",
            "give the Dataset itself, or torch.utils.data.Subset(dataset, indices)",
            usage=True,
        )
    remark = f"the {n:,} examples would fill the memory, and are read by index for every batch"
    return Entries(batches, f"the {kind}", (remark,), loader.dataset, loader.collate_fn)


def _collated(examples: list[Any]) -> Any:
    try:
        return default_collate(examples)
    except (RuntimeError, TypeError) as error:
        raise FldiagError(
            f"the examples of the Dataset cannot be combined into a batch: {first_line(error)}",
            "pad all examples to one length, or give a DataLoader with a collate_fn",
            usage=True,
        ) from None


def _entries(batch: Any, i: int) -> tuple[Any, ...]:
    """The entries of a batch: of a dict the whole."""
    if isinstance(batch, Mapping):
        return (batch,)
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise FldiagError(
            f"batch {i + 1} of the data is a {type(batch).__name__} without targets",
            "yield (inputs, targets), or a dict that holds both",
            usage=True,
        )
    return tuple(batch)


def convert(x: Tree, y: Tree, dtype: torch.dtype, device: torch.device) -> tuple[Tree, Tree]:
    """A batch on the device: floating inputs and targets in ``dtype``, integers (tokens, say) as they are, integer targets as
    class numbers."""

    def placed(t: Tensor) -> Tensor:
        return t.to(device, dtype if t.is_floating_point() else t.dtype)

    def target(t: Tensor) -> Tensor:
        return (
            placed(t)
            if t.is_floating_point() or t.dtype == torch.bool
            else t.to(device, torch.int64)
        )

    inputs = tree_map(placed, x)
    return inputs, inputs if y is x else tree_map(target, y)


def _fitting(
    kind: str,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    optional: set[str],
    ignored: set[str],
) -> dict[str, Tensor]:
    """The tensors that ``shapes`` names; ``optional`` may lack, ``ignored`` may be there."""

    def listed(names: list[str]) -> str:
        return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

    misfits = {
        "missing": [n for n in shapes if n not in tensors and n not in optional],
        "unexpected": [n for n in tensors if n not in shapes and n not in ignored],
        "wrong shape": [
            f"{n} {list(tensors[n].shape)} instead of {list(shape)}"
            for n, shape in shapes.items()
            if n in tensors and tensors[n].shape != shape
        ],
    }
    if any(misfits.values()):
        text = "; ".join(f"{how} {listed(names)}" for how, names in misfits.items() if names)
        raise FldiagError(
            f"{kind} do not fit the model: {text}",
            "give the weights of this very architecture, named as in its state_dict()",
            usage=True,
        )
    return {n: tensors[n] for n in shapes if n in tensors}


def _vector(kind: str, tensor: Tensor, size: int) -> Tensor:
    if tensor.ndim != 1 or tensor.numel() != size:
        raise FldiagError(
            f"{kind} has shape {list(tensor.shape)}, the model needs a vector of {size} numbers",
            "give one flat vector in the order of the model's named tensors",
            usage=True,
        )
    return tensor


def weights(
    module: nn.Module, layout: Layout, params: Any, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The weights to diagnose as a new vector [P]: the module's own, or a vector, or a dict of named tensors.

    A whole state_dict is welcome: its buffers and second names of tied tensors are passed over.
    Raises FldiagError naming missing and unexpected tensors and wrong shapes.
    """
    if params is None:
        w = flatten(module)
    elif isinstance(params, Mapping):
        ignored = {n for n, _ in module.named_buffers()}
        ignored |= {n for n, _ in module.named_parameters(remove_duplicate=False)}
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        w = layout.row(_fitting("params", params, shapes, set(), ignored)).detach()
    elif isinstance(params, Tensor):
        w = _vector("params", params.detach(), layout.size)
    else:
        raise FldiagError(
            f"params is a {type(params).__name__}",
            "give a vector or a dict of named tensors",
            usage=True,
        )
    return w.to(device, dtype, copy=True).contiguous()


def buffers(
    module: nn.Module, buffers: Any, params: Any, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Copies of the module's buffers, or of ``buffers`` in their place.

    ``buffers`` is a dict (non-persistent buffers and batch counters may lack) or one vector of the floating
    point buffers in the order of ``named_buffers()``. Without it, buffers found in a ``params`` dict count.
    Raises FldiagError naming missing and unexpected buffers and wrong shapes.
    """
    result = dict(module.named_buffers())
    if buffers is None and isinstance(params, Mapping):
        buffers = {n: t for n, t in params.items() if n in result} or None
    if isinstance(buffers, Tensor):
        floating = {n: b for n, b in result.items() if b.is_floating_point()}
        sizes = [b.numel() for b in floating.values()]
        flat = _vector("buffers", buffers.detach(), sum(sizes))
        parts = flat.split(sizes) if floating else ()
        buffers = result | {
            n: part.reshape(b.shape) for (n, b), part in zip(floating.items(), parts, strict=True)
        }
    if buffers is not None:
        persistent = set(module.state_dict())
        optional = {n for n in result if n not in persistent or n.endswith("num_batches_tracked")}
        shapes = {n: b.shape for n, b in result.items()}
        result |= _fitting("buffers", buffers, shapes, optional, set())
    return {
        n: b.detach().to(device, dtype if b.is_floating_point() else b.dtype, copy=True)
        for n, b in result.items()
    }
