"""State_dicts of other programs: found inside their containers, and named as the model names its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fldiag.errors import FldiagError

#: Names under which training programs keep the model's weights beside epoch, optimiser and the like, best first.
CONTAINERS = ("state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params", "parameters")
State = dict[str, Tensor]


def unwrap(path: Path, content: Any) -> tuple[State, list[str]]:
    """The state_dict in what a file holds: itself, or under a usual name, or the only one there is.

    Second: the names of the entries left out. Raises FldiagError when there is none, or no telling which.
    """
    if _is_state(content):
        return dict(content), []
    if isinstance(content, Mapping):
        inner = {str(k): v for k, v in content.items() if isinstance(v, Mapping)}
        named = [k for k in CONTAINERS if k in inner]
        states = [k for k, v in inner.items() if _is_state(v)]
        if not named and len(states) > 1:
            raise FldiagError(f"checkpoint {path} holds several sets of tensors: {', '.join(sorted(states)[:6])}",
                              "save one of them alone: torch.save(model.state_dict(), path)")
        for key in named or states:
            try:
                state, left = unwrap(path, inner[key])
            except FldiagError:
                continue
            return state, sorted({str(k) for k in content} - {key}) + left
    raise FldiagError(f"checkpoint {path} is not a state_dict (names with tensors): {_describe(content)}",
                      "save it with torch.save(model.state_dict(), path)")


def _is_state(content: Any) -> bool:
    return isinstance(content, Mapping) and bool(content) and all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items())


def _describe(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"it holds a {type(content).__name__}"
    if not content:
        return "it is an empty dict"
    odd = next((f"its entry {k!r} is a {type(v).__name__}" for k, v in content.items() if not isinstance(v, Tensor)), None)
    return odd or "its names are not text"


def prefix_of(names: Mapping[str, Any], module: nn.Module) -> str:
    """What stands before the module's own names in ``names`` ("module." of DataParallel, "model." of Lightning,
    "_orig_mod." of torch.compile, ...), "" when they fit as they are or not at all.

    Raises FldiagError when they fit behind several prefixes.
    """
    needed = _needed(module)
    if not needed or needed <= names.keys():
        return ""
    first = min(needed)
    found = sorted({k[: -len(first)] for k in names if k.endswith("." + first)})
    fits = [p for p in found if all(p + n in names for n in needed)]
    if len(fits) > 1:
        raise FldiagError(f"the names fit the model behind each of {', '.join(map(repr, fits))}",
                          "save the one model that is meant: torch.save(model.state_dict(), path)")
    return fits[0] if fits else ""


def strip(state: State, prefix: str) -> State:
    """The tensors behind the prefix, without it; those elsewhere are left out."""
    return {k[len(prefix):]: v for k, v in state.items() if k.startswith(prefix)} if prefix else state


def with_first_names(state: State, module: nn.Module) -> State:
    """The state_dict, where a tied tensor that is there under its second name only gets the first too: files often hold one."""
    first: dict[int, str] = {}
    more = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(p), name)
        if kept not in state and name in state:
            more[kept] = state[name]
    return {**state, **more}


def fit(state: State, module: nn.Module) -> tuple[State, str]:
    """(the module's parameters in its own order and the buffers that are there, the prefix that was stripped).

    Raises FldiagError naming the first tensor that has another shape, is missing or is unexpected.
    """
    prefix = prefix_of(state, module)
    state = strip(state, prefix)
    shapes = {n: t.shape for n, t in [*module.named_parameters(), *module.named_buffers()]}
    known = shapes.keys() | module.state_dict().keys()  # also the second names of tied tensors
    said = [f"{n} is {list(state[n].shape)} there and {list(s)} in the model" for n, s in shapes.items()
            if n in state and state[n].shape != s][:1]
    said += [f"{what} {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}" for what, names in (
        ("it lacks", sorted(_needed(module) - state.keys())), ("the model has no", sorted(state.keys() - known))) if names]
    if said:
        raise FldiagError("; ".join(said), "give the model of this very architecture")
    return {n: state[n].detach() for n in shapes if n in state}, prefix


def _needed(module: nn.Module) -> set[str]:
    """Names without which the weights are not whole: a batch counter may lack, and what state_dict() does not keep."""
    kept = {n for n, _ in module.named_parameters()}
    own = {n for n, _ in module.named_buffers()} & module.state_dict().keys()
    return kept | {n for n in own if not n.endswith("num_batches_tracked")}
