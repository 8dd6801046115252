"""A copy of the user's module, and the weights that it takes from a state_dict by its own rules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fldiag.errors import FldiagError
from fldiag.models import state_dict
from fldiag.params import Layout
from fldiag.problem.data import same


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside torch.compile, DataParallel and the like."""
    parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = getattr(model, "module" if parallel else "_orig_mod", None)
    return unwrap_model(inner) if isinstance(inner, nn.Module) else model


def copy_module(module: nn.Module) -> nn.Module:
    """A copy; results of forward that the module keeps as attributes, as weight_norm does, lose their graph.

    Raises FldiagError for a module that cannot be copied.
    """
    values = [v for m in module.modules() for v in vars(m).values() if isinstance(v, Tensor)]
    memo: dict[int, Any] = {id(v): v.detach().clone() for v in values if v.grad_fn is not None}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # a module may hold anything
        raise FldiagError(
            f"the model cannot be copied: {type(error).__name__}: {error}",
            "keep in the module only what can be copied",
        ) from error


def load(module: nn.Module, params: Any, buffers: Mapping[str, Tensor] | None) -> None:
    """Let a module load weights, and buffers, by its own ``load_state_dict``, strictly.

    Args:
        module: which is changed.
        params: a vector [P], or named tensors; a state_dict has buffers, too. What they call by one of several names of a
            tied tensor goes by all of them.
        buffers: by name. Where neither these nor ``params`` name any, the module keeps its own.

    Raises:
        FldiagError: they do not fit the module, or hold two values of one tied tensor.
    """
    layout = Layout.of(module)
    if params is None:
        tensors: Mapping[str, Any] = dict(module.named_parameters())
    elif isinstance(params, Tensor):
        tensors = layout.views(vector(params, layout))
    elif isinstance(params, Mapping):
        tensors, _ = state_dict.without_prefix(dict(params), module)
    else:
        raise FldiagError(
            f"params is a {type(params).__name__}",
            "give a vector or a dict of named tensors",
            usage=True,
        )
    own = module.state_dict(keep_vars=True)
    state = {**tensors, **(buffers or {})}
    transient = {n: b for n, b in module.named_buffers() if n not in own}
    for name in transient.keys() & state.keys():
        transient[name].copy_(state.pop(name))
    _fill(state, own, set(layout.names), buffers is None)
    try:
        module.load_state_dict(state, strict=True)
    except Exception as error:  # torch's, or of a hook of the module
        raise FldiagError(
            f"the weights do not fit the model: {' '.join(str(error).split())}",
            "give the weights of this very architecture, named as in its state_dict()",
            usage=True,
        ) from error


def _fill(state: dict[str, Any], own: dict[str, Any], weights: set[str], is_bare: bool) -> None:
    """Add the other names of tied tensors, and what the module keeps of its own: counters of batches, and where weights alone
    were given all else."""
    names: dict[int, list[str]] = {}
    for name, t in own.items():
        names.setdefault(id(t), []).append(name)
    for tied in names.values():
        first, *others = [n for n in tied if n in state] or [""]
        for other in others:
            if not same(state[first], state[other]):
                raise FldiagError(
                    f"{first} and {other} are one tensor of the model, and two different ones here",
                    "give the weights of this very architecture",
                )
        if first:
            state.update(dict.fromkeys(tied, state[first]))
    rest = [n for n, t in own.items() if not weights.intersection(names[id(t)])]
    is_bare = is_bare and not state.keys() & set(rest)
    for name in rest:
        if name not in state and (is_bare or name.endswith("num_batches_tracked")):
            state[name] = own[name]


def vector(params: Tensor, layout: Layout) -> Tensor:
    """The vector. Raises FldiagError for one of another length."""
    if params.shape != (layout.size,):
        raise FldiagError(
            f"weights {list(params.shape)} for a model of {layout.size} parameters",
            "give a flat vector in the order of layout.names",
        )
    return params.detach()
