"""Weights in any form that a loop has them, by the names of the model's state_dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fldiag.errors import FldiagError
from fldiag.params import Layout
from fldiag.problem.ingredients import unwrap_model


def named(weights: Any, module: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """A module's state_dict, a mapping, a flat vector [P] of the parameters, or arrays in the order of the state_dict (or of the
    parameters); the buffers, where a vector or arrays leave them out, are those of the ``module``.

    Raises FldiagError when it is none of these, or of another length.
    """
    if isinstance(weights, nn.Module):
        return dict(unwrap_model(weights)[0].state_dict())
    if isinstance(weights, Mapping):
        return {str(k): _tensor(v) for k, v in weights.items()}
    flat = _tensor(weights) if isinstance(weights, (Tensor, np.ndarray)) else None
    if flat is not None and flat.ndim == 1:
        if flat.numel() != layout.size:
            raise FldiagError(
                f"a vector of {flat.numel():,} numbers, and the model has {layout.size:,} parameters",
                "give the parameters in the order of model.parameters()",
            )
        return {
            **{n: b for n, b in module.state_dict().items() if n not in layout.names},
            **layout.views(flat),
        }
    if flat is None and isinstance(weights, Iterable) and not isinstance(weights, (str, bytes)):
        arrays, whole = [_tensor(a) for a in weights], list(module.state_dict())
        names = whole if len(arrays) == len(whole) else list(layout.names)
        if len(arrays) != len(names):
            raise FldiagError(
                f"{len(arrays)} arrays, and the model's state_dict has {len(whole)}",
                "give the arrays of the model's state_dict() in its order",
            )
        return {**module.state_dict(), **dict(zip(names, arrays, strict=True))}
    raise FldiagError(
        f"a {type(weights).__name__} holds no weights",
        "give a state_dict, a module, a flat vector or a list of arrays",
        usage=True,
    )


def _tensor(value: Any) -> Tensor:
    try:
        return value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError):
        raise FldiagError(
            f"a {type(value).__name__} is not an array", "give tensors or arrays", usage=True
        ) from None
