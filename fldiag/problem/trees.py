"""Batches as people have them: a tensor, or tensors in dicts, tuples and lists; axis 0 counts the examples."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

#: What a model takes or a loss compares with: a tensor, or tensors in dicts, tuples and lists.
Tree = Any


def cut(part: Tree, examples: slice | Tensor) -> Tree:
    """Some examples of every tensor."""
    return part[examples] if isinstance(part, Tensor) else tree_map(lambda t: t[examples], part)


def join(parts: Sequence[Tree]) -> Tree:
    """Trees of one form, one after the other along axis 0."""
    return (
        torch.cat(list(parts))
        if isinstance(parts[0], Tensor)
        else tree_map(lambda *t: torch.cat(t), *parts)
    )


def count(part: Tree) -> int:
    """The number of examples."""
    return len(part) if isinstance(part, Tensor) else len(tree_leaves(part)[0])


def nbytes(part: Tree) -> int:
    return sum(t.nbytes for t in tree_leaves(part))


def clone(part: Tree) -> Tree:
    return tree_map(lambda t: t.clone(), part)


def of_examples(t: Any, b: int) -> bool:
    """Whether a leaf of a model's outputs on b examples has one entry each."""
    return isinstance(t, Tensor) and t.ndim > 0 and len(t) == b


def rows(part: Any, b: int, examples: slice) -> Any:
    """Some examples of a model's outputs on b of them, which may hold other things too."""
    return tree_map(lambda t: t[examples] if of_examples(t, b) else t, part)


def same(a: Any, b: Any, tolerance: float) -> bool:
    """Equal up to rounding (NaN equals NaN); outputs that are no tensors are not compared."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k], tolerance) for k in a)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(same(p, q, tolerance) for p, q in zip(a, b, strict=True))
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True
    if a.shape != b.shape:
        return False
    scale = (
        float(a.detach().abs().nan_to_num(posinf=0.0).max())
        if a.numel() and a.dtype != torch.bool
        else 0.0
    )
    return torch.allclose(
        a.detach().double(),
        b.detach().double(),
        rtol=tolerance,
        atol=tolerance * scale,
        equal_nan=True,
    )


def leaves_by_place(part: Any) -> dict[str, Any]:
    """The leaves with their places as names, such as ``input_ids`` or ``[1]``; a tensor alone has none."""
    leaves: dict[str, Any] = {}
    if isinstance(part, Mapping):
        pairs: Iterable[tuple[str, Any]] = ((str(k), v) for k, v in part.items())
    elif isinstance(part, (tuple, list)):
        fields = getattr(part, "_fields", None)
        pairs = ((fields[i] if fields else f"[{i}]", v) for i, v in enumerate(part))
    else:
        return {"": part}
    for place, inner in pairs:
        leaves |= {
            f"{place}{'.' if rest and rest[0] != '[' else ''}{rest}": v
            for rest, v in leaves_by_place(inner).items()
        }
    return leaves


def describe(part: Any) -> str:
    """Shapes and types in words."""
    if isinstance(part, Tensor):
        return f"a tensor {list(part.shape)}"
    if not isinstance(part, (Mapping, tuple, list)):
        return f"a {type(part).__name__}"
    leaves = list(leaves_by_place(part).items())[:8]
    inner = ", ".join(
        f"{n} {list(v.shape) if isinstance(v, Tensor) else type(v).__name__}" for n, v in leaves
    )
    return f"a {type(part).__name__} with {inner or 'nothing'}"


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
    if isinstance(x, (tuple, list)):
        places = sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
        return (
            (tuple(x), {})
            if places >= len(x) or inspect.Parameter.VAR_POSITIONAL in kinds
            else ((x,), {})
        )
    return (x,), {}
