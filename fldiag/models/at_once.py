"""Layers under torch's gradient checkpointing, evaluated once.

Checkpointing drops what a layer computes and evaluates the layer again in the backward pass, with the parameters that the module
then has: not those that ``functional_call`` had put in their place. The gradient would silently be that of other weights. So
where weights are put in place, what a layer computes is kept, as if the model did not ask for checkpointing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint

_lock, _inside, _before = threading.Lock(), 0, contextlib.ExitStack()


def _nothing(*args: Any, **options: Any) -> Iterator[None]:
    yield


def _run(layer: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    return layer(*args)


#: What ``checkpoint`` calls (use_reentrant=False: around a layer that it runs itself, by versions of torch), and what instead.
INSTEAD: list[tuple[Any, str, Callable[..., Any]]] = [
    (checkpoint.CheckpointFunction, "apply", _run),
    *(
        (checkpoint, name, _nothing)
        for name in (
            "_checkpoint_without_reentrant_generator",
            "_checkpoint_without_reentrant_generator_impl",
        )
        if hasattr(checkpoint, name)
    ),
]


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """In this context checkpointed layers keep what they compute; also in other threads, for which that changes no value."""
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            for place, name, function in INSTEAD:
                own = vars(place).get(name)  # None: inherited
                _before.callback(
                    *((delattr, place, name) if own is None else (setattr, place, name, own))
                )
                setattr(place, name, function)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _before.close()
