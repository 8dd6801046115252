"""Architectures (one a file) and how rows of weights meet inputs (network.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fldiag import registry, user_code
from fldiag.errors import FldiagError
from fldiag.seeding import seed_for


def build(
    name: str,
    shape: tuple[int, ...] | None,
    classes: int,
    options: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    most: int | None = None,
) -> nn.Module:
    """A freshly initialised model (PyTorch's default initialisation under ``seed``); global RNG untouched.

    ``name`` is a registered model, or ``pkg.mod:factory``, which is imported if the user named it, and called as
    factory(shape, classes, **options) or factory(), the latter where the inputs have no one shape (None). ``most``: how many
    parameters there can be, where a file says how large the model is and holds its weights.

    Raises FldiagError for an unknown model or option, for code that is not allowed, and for a registered model that is larger
    than ``most``: before anything is allocated.
    """
    options = dict(options or {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "init"))
        if ":" not in name:
            entry = registry.model.get(name)
            if shape is None:
                raise FldiagError(
                    f"the model {name!r} takes one tensor, and the data have several",
                    "give pkg.mod:factory",
                    usage=True,
                )
            options = entry.validate(options)
            if most is not None:
                check_size(name, lambda: entry.build(shape, classes, **options), most)
            torch.manual_seed(seed_for(seed, "init"))
            return entry.build(shape, classes, **options)
        factory = user_code.load_user(name, "model")
        module = _call_factory(name, factory, shape, classes, options)
    if not isinstance(module, nn.Module):
        raise FldiagError(
            f"model factory {name!r} returned {type(module).__name__}", "return a torch.nn.Module"
        )
    return module


def check_size(name: str, make: Callable[[], nn.Module], most: int) -> None:
    """Raises FldiagError when the model that ``make`` returns has more parameters than ``most``."""
    parameters = count_parameters(make)
    if parameters > most:
        raise FldiagError(
            f"model {name!r} as the file describes it has {parameters:,} parameters, and the file holds {most:,} "
            "numbers",
            "the file was edited; use the original",
        )


def count_parameters(make: Callable[[], nn.Module]) -> int:
    """How many parameters a model has, without allocating them; 0 for one that cannot be built so, and 2**62 for one
    with a tensor of more numbers than can be counted."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in make().parameters())
    except FldiagError:
        raise
    except Exception as error:  # a model of another package may need the values of its tensors; it is then built as it is
        return 2**62 if "overflow" in str(error).lower() else 0


def _call_factory(
    name: str, factory: Any, shape: Any, classes: int, options: Mapping[str, Any]
) -> Any:
    """What a user's factory returns, which may take no shape. Raises FldiagError when it fails."""
    try:
        try:
            return factory(shape, classes, **options) if shape is not None else factory(**options)
        except TypeError:
            return factory(**options)
    except FldiagError:
        raise
    except Exception as error:
        raise FldiagError(
            f"model factory {name!r} failed ({type(error).__name__}: {error})",
            "fix it; it is called as factory(shape, classes), or as factory()",
        ) from error
