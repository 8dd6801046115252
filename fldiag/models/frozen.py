"""Weights that are frozen: neither parameters nor buffers, so that a row of weights, and a checkpoint, holds the others alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from fldiag.errors import FldiagError


def freeze(module: nn.Module, names: Iterable[str]) -> None:
    """These parameters of the module become plain tensors: every layer finds them as before, ``parameters()`` does not."""
    for name in (names := tuple(names)):
        owner, last = place(module, name)
        tensor = owner._parameters.pop(last)
        assert tensor is not None
        setattr(owner, last, tensor.detach())
    module.__dict__["frozen_weights"] = names
    module.__dict__["_apply"] = partial(_apply, module)  # a partial is copied with its module


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The frozen weights by name."""
    return {
        name: getattr(*place(module, name)) for name in module.__dict__.get("frozen_weights", ())
    }


def load(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put other frozen weights in. Raises FldiagError for those of another model."""
    present = weights(module)
    if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in present.items()}:
        raise FldiagError(
            "the frozen weights are those of another model",
            "give those with which the others were trained",
        )
    for name, tensor in present.items():
        setattr(*place(module, name), tensors[name].detach().to(tensor))


def place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the tensor or module of this name, and its last part."""
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def _apply(module: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
    """What ``to`` does with parameters, with the frozen weights, too."""
    for name, tensor in weights(module).items():
        setattr(*place(module, name), fn(tensor))
    return type(module)._apply(module, fn, recurse)
