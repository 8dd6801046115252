"""What the caller hands to a Problem (weights, buffers, data), checked and brought into one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fldiag.errors import FldiagError
from fldiag.params import Layout, flatten


class Data(Protocol):
    """A data slice: ``n`` examples, a ``name``, and ``batch(start, stop) -> (x, y)`` ready for the model."""

    n: int
    name: str

    def batch(self, start: int, stop: int) -> tuple[Tensor, Tensor]: ...


class TensorData:
    """Inputs and targets held in memory, seen as a slice."""

    def __init__(self, x: Tensor, y: Tensor, name: str = "data"):
        self.x, self.y, self.n, self.name = x, y, len(x), name

    def batch(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.x[start:stop], self.y[start:stop]


def as_data(data: Any) -> Data:
    """A slice as it is, a pair (x, y) of tensors or arrays as a slice. Raises FldiagError otherwise."""
    if all(hasattr(data, a) for a in ("n", "name", "batch")):
        if data.n < 1:
            raise FldiagError(f"the slice {data.name!r} is empty", "choose a slice with at least one example")
        return data
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise FldiagError(f"data is a {type(data).__name__}",
                          "give a pair (x, y) of tensors, or a slice with n, name and batch(start, stop)",
                          usage=True)
    x, y = (torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in data)
    for part, what in ((x, "x"), (y, "y")):
        if not isinstance(part, Tensor) or part.ndim == 0:
            raise FldiagError(f"{what} of the data is a {type(part).__name__} without examples along axis 0",
                              "give tensors whose first axis counts the examples", usage=True)
    if len(x) != len(y):
        raise FldiagError(f"x has {len(x)} examples and y has {len(y)}",
                          "give each example a target", usage=True)
    if len(x) == 0:
        raise FldiagError("the data are empty", "give at least one example", usage=True)
    return TensorData(x.detach(), y.detach())


def convert(x: Tensor, y: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A batch on the device: floating inputs and targets in ``dtype``, integer targets as class numbers."""
    x = x.to(device, dtype if x.is_floating_point() else x.dtype)
    if y.is_floating_point():
        return x, y.to(device, dtype)
    return x, y.to(device, y.dtype if y.dtype == torch.bool else torch.int64)


def _misfit(kind: str, missing: list[str], unexpected: list[str], wrong: list[str]) -> FldiagError:
    def some(names: list[str]) -> str:
        return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

    said = [f"{what} {some(names)}" for what, names in
            (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong)) if names]
    return FldiagError(f"{kind} do not fit the model: {'; '.join(said)}",
                       "give the weights of this very architecture, named as in its state_dict()", usage=True)


def _named(kind: str, given: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], optional: set[str],
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
        found = _named("params", given, shapes, set(), also)
        w = torch.cat([found[n].detach().reshape(-1) for n in layout.names])
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
        own |= _named("buffers", given, {n: b.shape for n, b in own.items()}, optional, set())
    return {n: b.detach().to(device, dtype if b.is_floating_point() else b.dtype, copy=True)
            for n, b in own.items()}
