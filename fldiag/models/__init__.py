"""Architectures (one a file), how rows of weights meet inputs (network.py), and state_dicts under a model's own names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fldiag import registry
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
    make: Callable[[], Any]
    with torch.random.fork_rng(devices=[]):
        if ":" in name:
            factory = registry.load_user(name, "model")
            make = partial(_call_factory, name, factory, shape, classes, options)
        else:
            entry = registry.model.get(name)
            if shape is None:
                raise FldiagError(
                    f"the model {name!r} takes one tensor, and the data have several",
                    "give pkg.mod:factory",
                    usage=True,
                )
            make = partial(entry.build, shape, classes, **entry.validate(options))
            if most is not None and (parameters := count_parameters(make)) > most:
                raise FldiagError(
                    f"model {name!r} as the file describes it has {parameters:,} parameters, and the file holds "
                    f"{most:,} numbers",
                    "the file was edited; use the original",
                )
        torch.manual_seed(seed_for(seed, "init"))
        module = make()
    if not isinstance(module, nn.Module):
        raise FldiagError(
            f"model factory {name!r} returned {type(module).__name__}", "return a torch.nn.Module"
        )
    return module


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


#: What DataParallel and torch.compile put into names, wherever a part of the model was wrapped.
WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|module)\.")
State = dict[str, Tensor]


def without_prefix(state: State, module: nn.Module) -> State:
    """The weights under the module's own names, without a prefix that these had, such as "model." of Lightning.

    Arrays without names (``arr_0``, ``arr_1``, ...) are taken in the order of the module's state_dict.

    Raises FldiagError when the names fit behind several prefixes, and when arrays without names do not fit.
    """
    state, required = in_order(state, module), required_names(module)
    if not (fits := prefixes(state, required)):
        state = _unwrapped(state, module)
        fits = prefixes(state, required)
    if "" in fits or not fits:
        return state
    if len(fits) > 1:
        key = fits[-1].removesuffix(".")
        raise FldiagError(
            f"the names fit the model behind each of {', '.join(map(repr, fits))}",
            f"choose one, such as --key {key} (fldiag.load(path, key={key!r})), or save it alone: torch.save(state_dict, path)",
        )
    (prefix,) = fits
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


def prefixes(names: Iterable[str], required: set[str]) -> list[str]:
    """What stands before all the required names in ``names``: several where there are several sets of weights."""
    present, first = set(names), min(required, default="")
    candidates = {n.removesuffix(first) for n in present if f".{n}".endswith(f".{first}")}
    return sorted(p for p in candidates if all(p + n in present for n in required))


def _unwrapped(state: State, module: nn.Module) -> State:
    """The state_dict with the wrappers in the module's own names instead of those in its names."""
    own = {WRAPPERS.sub("", n): n for n in module.state_dict()}
    names = {n: WRAPPERS.sub("", n) for n in state}
    if len(set(names.values())) < len(names):
        return state
    return {own.get(names[n], names[n]): t for n, t in state.items()}


def in_order(state: State, module: nn.Module) -> State:
    """Arrays without names under those of the module's state_dict, in its order. Raises FldiagError where they do not fit."""
    if not state or not all(re.fullmatch(r"arr_\d+", name) for name in state):
        return state
    arrays = [state[name] for name in sorted(state, key=lambda name: int(name[4:]))]
    own = module.state_dict()
    if [a.shape for a in arrays] != [t.shape for t in own.values()]:
        pairs = zip(arrays, own.items(), strict=False)
        misfits = [
            f": {list(a.shape)} where {n} is {list(t.shape)}"
            for a, (n, t) in pairs
            if a.shape != t.shape
        ]
        raise FldiagError(
            f"{len(arrays)} arrays without names do not fit the model, whose state_dict has {len(own)} tensors"
            + "".join(misfits[:1]),
            "give the model of these weights; arrays are taken in the order of its state_dict()",
        )
    return dict(zip(own, arrays, strict=True))


def fit_weights(state: State, module: nn.Module) -> State:
    """The module's parameters in its own order, and the buffers that are there.

    Raises FldiagError naming the first tensor that has another shape, is missing or is unexpected.
    """
    state = without_prefix(state, module)
    shapes = {n: t.shape for n, t in [*module.named_parameters(), *module.named_buffers()]}
    all_names = shapes.keys() | module.state_dict().keys()  # also the second names of tied tensors
    misfits = [
        f"{n} is {list(state[n].shape)} there and {list(s)} in the model"
        for n, s in shapes.items()
        if n in state and state[n].shape != s
    ][:1]
    lacking, extra = required_names(module) - state.keys(), state.keys() - all_names
    for kind, names in (("it lacks", sorted(lacking)), ("the model has no", sorted(extra))):
        if names:
            rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
            misfits.append(f"{kind} {names[0]}{rest}")
    if misfits:
        raise FldiagError("; ".join(misfits), "give the model of this very architecture")
    return {n: state[n].detach() for n in shapes if n in state}


def required_names(module: nn.Module) -> set[str]:
    """Names without which the weights are not whole: a batch counter may lack, and what state_dict() does not keep."""
    parameters = {n for n, _ in module.named_parameters()}
    buffers = {n for n, _ in module.named_buffers()} & module.state_dict().keys()
    return parameters | {n for n in buffers if not n.endswith("num_batches_tracked")}
