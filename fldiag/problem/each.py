"""The loss of every example of a batch, where a loss gives its mean."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fldiag.problem.trees import count, of_examples, same

#: (outputs, y) -> a number of each example [b].
Each = Callable[[Any, Any], Tensor]


def mapped(loss: Callable[[Any, Any], Tensor], z: Any, y: Any) -> Tensor:
    """The loss of each example alone, by mapping it over the batch."""
    b = count(y)

    def one(*leaves: Tensor) -> Tensor:
        given = iter(leaves)
        whole = [next(given).unsqueeze(0) if of_examples(t, b) else t for t in flat]
        return loss(*tree_unflatten(whole, form))

    flat, form = tree_flatten((z, y))
    return torch.func.vmap(one)(*(t for t in flat if of_examples(t, b)))


def per_example(criterion: Callable[..., Tensor], z: Any, y: Any, mean: Tensor) -> Each | None:
    """The loss of each example [b]: by its own ``reduction="none"``, else by mapping it over the batch."""
    ways: list[Callable[..., Tensor]] = []
    if isinstance(criterion, nn.Module):
        if isinstance(getattr(criterion, "reduction", None), str):
            each = copy.deepcopy(criterion)
            setattr(each, "reduction", "none")  # noqa: B010 (modules declare no such attribute)
            ways.append(each)
    else:
        try:
            if "reduction" in inspect.signature(criterion).parameters:
                ways.append(functools.partial(criterion, reduction="none"))
        except (TypeError, ValueError):
            pass
    ways.append(functools.partial(mapped, criterion))
    for way in ways:

        def take(z: Any, y: Any, way: Callable[..., Tensor] = way) -> Tensor:
            return way(z, y).reshape(count(y), -1).double().mean(1)

        if fits(take, z, y, mean):
            return take
    return None


def fits(take: Each, z: Any, y: Any, mean: Tensor) -> bool:
    """Whether these losses of the examples are there, and their mean is the mean."""
    try:
        losses = take(z, y)
    except Exception:  # whatever the user's loss cannot do this way, the mean loss still stands
        return False
    return losses.shape == (count(y),) and same(losses.mean(), mean.double().reshape(()), 1e-4)
