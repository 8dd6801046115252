"""State_dicts of other programs, found inside their containers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fldiag.errors import FldiagError, nearest
from fldiag.models.state_dict import State, key_remedy, strip_prefix

#: Names under which training programs keep the model's weights beside epoch, optimiser and the like.
CONTAINERS = (
    "state_dict",
    "model_state_dict",
    "model",
    "net",
    "network",
    "module",
    "weights",
    "params",
    "parameters",
    "modopt",
)


@dataclass(frozen=True)
class Weights:
    """A state_dict out of a file. ``key``: the name of its set there, "" where the file is the state_dict. ``alternatives``: the
    file's other sets of weights."""

    state: State
    key: str = ""
    alternatives: tuple[str, ...] = ()


def unwrap(path: Path, content: Any, key: str | None = None) -> Weights:
    """The weights in what a file holds: the set that ``key`` names, or the plain one, which averages no others.

    A set is a dict of tensors, named by the entries that lead to it (``model``, ``model.state_dict``), or within such a dict
    what stands behind a common beginning of names (``ema_model`` for ``ema_model.0.weight``).

    Raises FldiagError when there is none, none of this name, or no telling which.
    """
    sets = (
        {"": dict(content)}
        if _is_state(content)
        else _sets(content)
        if isinstance(content, Mapping)
        else {}
    )
    if not sets:
        raise FldiagError(
            f"checkpoint {path} is not a state_dict (names with tensors): {_describe(content)}",
            "save it with torch.save(model.state_dict(), path)",
        )
    if key is not None:
        return _named_set(path, sets, key)
    best = plain_name(sets)
    if best is None:
        names = sorted(sets)
        raise FldiagError(
            f"checkpoint {path} holds several sets of weights: {', '.join(names[:6])}",
            key_remedy(names[0]),
        )
    if not best:
        return Weights(sets[best])
    large = _size(sets[best]) / 2  # what holds about as many numbers may be weights, too
    roots = {name.partition(".")[0] for name in sets}
    entries = {
        str(k): v for k, v in content.items() if k not in roots and not _is_optimiser(str(k), v)
    }
    alternatives = [
        name
        for name, value in [*sets.items(), *entries.items()]
        if name != best and _size(value) >= large
    ]
    return Weights(sets[best], best, tuple(sorted(alternatives)))


def _sets(content: Mapping[Any, Any], beginning: str = "") -> dict[str, State]:
    """The dicts of tensors in a container, by the entries that lead to them."""
    sets: dict[str, State] = {}
    for name, value in content.items():
        if isinstance(name, str) and isinstance(value, Mapping) and not _is_optimiser(name, value):
            sets |= (
                {beginning + name: dict(value)}
                if _is_state(value)
                else _sets(value, f"{beginning}{name}.")
            )
    return sets


def _named_set(path: Path, sets: Mapping[str, State], key: str) -> Weights:
    """The set of this name, or the only one within it, or within one of them what stands behind this beginning of names."""
    inside = [name for name in sets if name == key or name.startswith(f"{key}.")]
    if inside and (best := key if key in inside else plain_name(inside)) is not None:
        return Weights(sets[best], best)
    for name, state in sets.items():
        beginning = key.removeprefix(f"{name}.") + "."
        if behind := strip_prefix(state, beginning):
            return Weights(behind, key)
    names = sorted(set(sets) - {""}) or sorted({name.partition(".")[0] for name in sets[""]})
    raise FldiagError(
        f"checkpoint {path} holds no set of weights {key!r}",
        nearest(key, inside or names),
        usage=True,
    )


def plain_name(names: Iterable[str]) -> str | None:
    """Of names of sets of weights the only one, or the only one under usual names; None where that is not clear."""
    listed = list(names)
    usual = [name for name in listed if all(part in CONTAINERS for part in name.split("."))]
    listed = usual or listed
    return listed[0] if len(listed) == 1 else None


def describe_choice(key: str, alternatives: Sequence[str]) -> str:
    """What is said of a choice between sets of weights."""
    names, verb = ", ".join(alternatives), "is" if len(alternatives) == 1 else "are"
    return f"of several sets of weights, {key} is read, and {names} {verb} not (choose with --key NAME or key=NAME)"


def _is_optimiser(name: str, content: Any) -> bool:
    return "optim" in name.lower() or (isinstance(content, Mapping) and "param_groups" in content)


def _size(content: Any) -> int:
    """How many numbers are in a container."""
    if isinstance(content, Tensor):
        return content.numel()
    inner = (
        content.values()
        if isinstance(content, Mapping)
        else content
        if isinstance(content, (list, tuple))
        else ()
    )
    return sum(_size(value) for value in inner)


def _is_state(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and bool(content)
        and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items())
    )


def _describe(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"it holds a {type(content).__name__}"
    if not content:
        return "it is an empty dict"
    odd = next(
        (
            f"its entry {k!r} is a {type(v).__name__}"
            for k, v in content.items()
            if not isinstance(v, Tensor)
        ),
        None,
    )
    return odd or "its names are not text"
