"""Models with gradient checkpointing at weights that are put in place for one call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint

# Gradient checkpointing drops what a layer computes and evaluates the layer again in the backward pass, with the parameters that
# the module then has: not those that ``functional_call`` had put in their place. The gradient would silently be that of other
# weights. So where weights are put in place, what a layer computes is kept, as if the model did not ask for checkpointing.


def _run_layer(layer: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    return layer(*args)


def _no_context(*args: Any, **options: Any) -> Iterator[None]:
    yield


#: What ``checkpoint`` calls (use_reentrant=False: around a layer that it runs itself, by versions of torch), and what instead.
CHECKPOINTING: list[tuple[Any, str, Callable[..., Any]]] = [
    (checkpoint.CheckpointFunction, "apply", _run_layer),
    *(
        (checkpoint, name, _no_context)
        for name in (
            "_checkpoint_without_reentrant_generator",
            "_checkpoint_without_reentrant_generator_impl",
        )
        if hasattr(checkpoint, name)
    ),
]
_lock, _contexts, _restore = threading.Lock(), 0, contextlib.ExitStack()


@contextlib.contextmanager
def without_checkpointing() -> Iterator[None]:
    """In this context checkpointed layers keep what they compute; also in other threads, for which that changes no value."""
    global _contexts
    with _lock:
        _contexts += 1
        if _contexts == 1:
            for owner, name, function in CHECKPOINTING:
                if name in vars(owner):
                    _restore.callback(setattr, owner, name, vars(owner)[name])
                else:  # inherited
                    _restore.callback(delattr, owner, name)
                setattr(owner, name, function)
    try:
        yield
    finally:
        with _lock:
            _contexts -= 1
            if not _contexts:
                _restore.close()
