"""Weights are rows: a model is one vector ``w`` of length P, a cohort of K clients is ``[K, P]``.

``Layout`` knows where each named tensor lies in the vector, which tensors form a layer (one module) and
which part is the head (the last registered child that has parameters).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import torch
from torch import Tensor, nn

from fldiag.errors import FldiagError, nearest


@dataclass(frozen=True)
class Layout:
    """Names, shapes and sizes of a model's parameters in the order of ``named_parameters()``."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    #: of the child module that is the head ('' if the model has a single module)
    head_name: str

    @staticmethod
    def of(module: nn.Module, trainable: bool = False) -> Layout:
        """Of all parameters, or of the ``trainable`` ones alone (``requires_grad``).

        Raises FldiagError for a module without weights, and for one that only wraps the module that is meant."""
        if unwrap_model(module) is not module:
            raise FldiagError(
                f"the model is a {type(module).__name__}, which wraps the module itself",
                "give the module within: model.module or model._orig_mod",
                usage=True,
            )
        parameters = [p for p in module.named_parameters() if p[1].requires_grad or not trainable]
        if not parameters:
            raise FldiagError(
                "the model has no parameters, or all are frozen (requires_grad = False)",
                "give a model with weights; unfreeze some, or leave trainable out",
                usage=True,
            )
        for name, p in parameters:
            if not p.is_floating_point():
                raise FldiagError(
                    f"parameter {name!r} has dtype {p.dtype}",
                    "only floating point parameters can be trained or diagnosed",
                )
        children = [n for n, c in module.named_children() if any(True for _ in c.parameters())]
        head = children[-1] if len(children) > 1 else ""
        names, shapes = zip(*((name, p.shape) for name, p in parameters), strict=True)
        return Layout(names, shapes, head)

    @cached_property
    def sizes(self) -> list[int]:
        return [s.numel() for s in self.shapes]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def views(self, w: Tensor) -> dict[str, Tensor]:
        """Named views of a vector [P] or of rows [K, P] (then each view is [K, *shape]).

        One ``split``: its backward is a single concatenation, where slicing costs a fifth of a step.
        """
        lead = w.shape[:-1]
        return {
            n: v.reshape(lead + s)
            for n, s, v in zip(
                self.names, self.shapes, torch.split_with_sizes(w, self.sizes, -1), strict=True
            )
        }

    def row(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector [P] of named tensors: ``views`` backwards."""
        return torch.cat([tensors[n].reshape(-1) for n in self.names])

    def slices(self) -> dict[str, slice]:
        """Where each named tensor lies in the vector."""
        ends = torch.tensor(self.sizes).cumsum(0).tolist()
        return {n: slice(e - s, e) for n, s, e in zip(self.names, self.sizes, ends, strict=True)}

    def part(self, start: int, stop: int) -> Layout:
        """The layout of the entries start:stop, which begin and end at tensor boundaries."""
        if (start, stop) == (0, self.size):
            return self
        inside = [s.start >= start and s.stop <= stop for s in self.slices().values()]
        return Layout(tuple(compress(self.names, inside)), tuple(compress(self.shapes, inside)), "")

    def matching(self, pattern: str) -> list[str]:
        """The names of the tensors that match a pattern. Raises FldiagError where none does."""
        names = fnmatch.filter(self.names, pattern)
        if not names:
            remedy = nearest(pattern, self.names)
            raise FldiagError(f"{pattern!r} matches no parameter", remedy, usage=True)
        return names

    @cached_property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """Module name -> its tensors (weight and bias together)."""
        groups: dict[str, list[str]] = {}
        for name in self.names:
            groups.setdefault(name.rpartition(".")[0], []).append(name)
        return {k: tuple(v) for k, v in groups.items()}

    @cached_property
    def head_size(self) -> int:
        """Number of head parameters; they are the tail of the vector.

        Raises FldiagError when the model has no head apart from its body.
        """
        if not self.head_name:
            raise FldiagError(
                "the model has no head: it has a single module with parameters",
                "use part='full', or a model whose last child module is its classifier",
            )
        inside = [n == self.head_name or n.startswith(self.head_name + ".") for n in self.names]
        if sum(inside) == 0 or not all(inside[inside.index(True) :]):
            raise FldiagError(
                f"the head {self.head_name!r} is not the last block of parameters",
                "register the classifier as the last child of the model",
            )
        return sum(s for s, i in zip(self.sizes, inside, strict=True) if i)

    @property
    def has_head(self) -> bool:
        """Whether the head's parameters are the tail of the vector (they are not when they are tied to others)."""
        try:
            return self.head_size > 0
        except FldiagError:
            return False

    def span(self, part: str) -> tuple[int, int]:
        """Where ``part`` (full, body or head) begins and ends in the vector.

        Raises FldiagError for another part, or when the model has no head.
        """
        if part not in ("full", "body", "head"):
            raise FldiagError(
                f"part = {part!r} is not one of full, body, head", "choose one of them", usage=True
            )
        if part == "full":
            return 0, self.size
        cut = self.size - self.head_size
        return (0, cut) if part == "body" else (cut, self.size)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside torch.compile, DataParallel and the like."""
    parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = getattr(model, "module" if parallel else "_orig_mod", None)
    return unwrap_model(inner) if isinstance(inner, nn.Module) else model


def flatten(module: nn.Module) -> Tensor:
    """The module's parameters as one new contiguous vector [P]."""
    with torch.no_grad():
        return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise inner product, [..., P] x [..., P] -> [..., 1]."""
    return (a * b).sum(-1, keepdim=True)


def norm(a: Tensor) -> Tensor:
    """Row-wise Euclidean norm, [..., P] -> [..., 1]."""
    return torch.linalg.vector_norm(a, dim=-1, keepdim=True)


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is not positive: per step where no step was made, relative to a length of 0."""
    positive = b > 0
    # elsewhere the question would wait for the device
    if b.device.type == "cpu" and bool(positive.all()):
        return a / b
    return torch.where(positive, a / b, 0.0)


def cosine(a: Tensor, b: Tensor, floor: float = 0.0) -> Tensor:
    """Row-wise cosine in float64, [..., P] x [..., P] -> [...]; NaN where a is zero, or b is zero or shorter than ``floor``."""
    sizes = [torch.linalg.vector_norm(v, dim=-1, dtype=torch.float64) for v in (a, b)]
    inner = (a * b).sum(-1, dtype=torch.float64) / (sizes[0] * sizes[1])
    return torch.where(sizes[1] >= floor, inner.clamp(-1, 1), torch.nan)
