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
    """A copy; results of forward that the module keeps as attributes, as weight_norm does, lose their graph."""
    values = [v for m in module.modules() for v in vars(m).values() if isinstance(v, Tensor)]
    memo: dict[int, Any] = {id(v): v.detach().clone() for v in values if v.grad_fn is not None}
    return copy.deepcopy(module, memo)


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
    if isinstance(params, Tensor):
        layout = Layout.of(module)
        tensors = layout.views(vector(params, layout))
    else:
        tensors = dict(module.named_parameters() if params is None else params)
        tensors, _ = state_dict.without_prefix(tensors, module)
    own, state = module.state_dict(keep_vars=True), {**tensors, **(buffers or {})}
    for name, b in module.named_buffers():
        if name in state and name not in own:  # a buffer that is not persistent
            b.copy_(state.pop(name))
    names: dict[int, list[str]] = {}
    for name, t in own.items():
        if isinstance(t, Tensor):
            names.setdefault(id(t), []).append(name)
    for tied in names.values():
        present = [n for n in tied if n in state]
        for name in present:
            if not same(state[present[0]], state[name]):
                raise FldiagError(
                    f"{present[0]} and {name} are one tensor of the model, and two different ones here",
                    "give the weights of this very architecture",
                )
        state |= {n: state[present[0]] for n in tied if present}
    rest = {n: t for n, t in own.items() if not isinstance(t, nn.Parameter)}
    if buffers is None and not state.keys() & rest.keys():
        state |= rest
    try:
        module.load_state_dict(state, strict=True)
    except Exception as error:  # torch's, or of a hook of the module
        raise FldiagError(
            f"the weights do not fit the model: {' '.join(str(error).split())}",
            "give the weights of this very architecture, named as in its state_dict()",
            usage=True,
        ) from error


def vector(params: Tensor, layout: Layout) -> Tensor:
    """The vector. Raises FldiagError for one of another length."""
    if params.shape != (layout.size,):
        raise FldiagError(
            f"weights {list(params.shape)} for a model of {layout.size} parameters",
            "give a flat vector in the order of layout.names",
        )
    return params.detach()
