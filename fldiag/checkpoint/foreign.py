"""Weights of other programs: found inside their containers or folders, and named as the model names its tensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fldiag.checkpoint.schema import Checkpoint
from fldiag.checkpoint.tensor_files import check_kinds, read_tensors
from fldiag.errors import FldiagError, nearest

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
)
#: Words in the names of weights that average or follow others.
AVERAGES = {
    "ema",
    "swa",
    "avg",
    "average",
    "averaged",
    "averages",
    "teacher",
    "target",
    "momentum",
    "shadow",
    "polyak",
}
State = dict[str, Tensor]


@dataclass(frozen=True)
class Weights:
    """A state_dict out of a file. ``key``: the name of its set there, "" where the file is the state_dict. ``alternatives``: the
    file's other sets of weights. ``left``: its entries that are no weights."""

    state: State
    key: str = ""
    alternatives: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


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
    best = plain(sets)
    if best is None:
        names = sorted(sets)
        raise FldiagError(
            f"checkpoint {path} holds several sets of weights: {', '.join(names[:6])}",
            _choose(names[0]),
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
    left = {str(k) for k in content} - {name.partition(".")[0] for name in [best, *alternatives]}
    return Weights(sets[best], best, tuple(sorted(alternatives)), tuple(sorted(left)))


def plain(names: Iterable[str]) -> str | None:
    """Of names of sets of weights that of the trained weights themselves; None where that is not clear."""
    listed = list(names)
    trained = [name for name in listed if not AVERAGES & set(re.split("[^a-z]+", name.lower()))]
    usual = [name for name in trained if all(part in CONTAINERS for part in name.split("."))]
    for candidates in (trained if "" in trained else usual, trained, listed):
        if candidates:
            return candidates[0] if len(candidates) == 1 else None
    return None


def _choose(key: str) -> str:
    return f"choose one, such as --key {key} (fldiag.load(path, key={key!r})), or save it alone: torch.save(state_dict, path)"


def several(key: str, alternatives: Sequence[str]) -> str:
    """What is said of a choice between sets of weights."""
    key, names = (
        key.removesuffix(".") or "the one without a name",
        [name.removesuffix(".") for name in alternatives],
    )
    return (
        f"of several sets of weights, {key} is read, and {', '.join(names)} {'is' if len(names) == 1 else 'are'} not "
        "(choose with --key NAME or key=NAME)"
    )


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
    if inside and (best := key if key in inside else plain(inside)) is not None:
        return Weights(sets[best], best)
    for name, state in sets.items():
        beginning = key.removeprefix(f"{name}.") + "."
        if behind := strip(state, beginning):
            return Weights(behind, key)
    names = sorted(set(sets) - {""}) or sorted({name.partition(".")[0] for name in sets[""]})
    raise FldiagError(
        f"checkpoint {path} holds no set of weights {key!r}",
        nearest(key, inside or names),
        usage=True,
    )


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


def prefixes(names: Iterable[str], module: nn.Module) -> list[str]:
    """What stands before the module's own names in ``names``: "module." of DataParallel, "model." of Lightning, "_orig_mod." of
    torch.compile, "" where they fit as they are. Several where there are several sets of weights; none where none fits."""
    required, present = _required_names(module), set(names)
    if not required:
        return [""]
    first = min(required)
    candidates = {
        name.removesuffix(first) for name in present if name == first or name.endswith("." + first)
    }
    return sorted(p for p in candidates if all(p + n in present for n in required))


def without_prefix(state: State, module: nn.Module) -> tuple[State, str, list[str]]:
    """The plain weights under the module's own names, the prefix that they had, and those of other sets of weights.

    Raises FldiagError when names fit behind several prefixes, and it is not clear which of them is the plain one.
    """
    fits = prefixes(state, module)
    prefix = plain([p.removesuffix(".") for p in fits]) if fits else ""
    if prefix is None:
        raise FldiagError(
            f"the names fit the model behind each of {', '.join(map(repr, fits))}",
            _choose(fits[-1].removesuffix(".")),
        )
    prefix += "." * bool(prefix)
    alternatives = [p for p in fits if p != prefix]
    if not prefix:
        extra = {
            name for p in alternatives for name in state if name.startswith(p)
        } - module.state_dict().keys()
        return (
            ({k: v for k, v in state.items() if k not in extra} if extra else state),
            "",
            alternatives,
        )
    return strip(state, prefix), prefix, alternatives


def strip(state: State, prefix: str) -> State:
    """The tensors behind the prefix, without it; those elsewhere are left out."""
    return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}


def with_first_names(state: State, module: nn.Module) -> State:
    """The state_dict, where a tied tensor that is there under its second name only gets the first too: files often hold one."""
    first: dict[int, str] = {}
    tied = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        first_name = first.setdefault(id(p), name)
        if first_name not in state and name in state:
            tied[first_name] = state[name]
    return {**state, **tied}


def fit(state: State, module: nn.Module) -> tuple[State, str]:
    """(the module's parameters in its own order and the buffers that are there, the prefix that was stripped).

    Raises FldiagError naming the first tensor that has another shape, is missing or is unexpected.
    """
    state, prefix, _ = without_prefix(state, module)
    shapes = {n: t.shape for n, t in [*module.named_parameters(), *module.named_buffers()]}
    model_names = (
        shapes.keys() | module.state_dict().keys()
    )  # also the second names of tied tensors
    problems = [
        f"{n} is {list(state[n].shape)} there and {list(s)} in the model"
        for n, s in shapes.items()
        if n in state and state[n].shape != s
    ][:1]
    problems += [
        f"{complaint} {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        for complaint, names in (
            ("it lacks", sorted(_required_names(module) - state.keys())),
            ("the model has no", sorted(state.keys() - model_names)),
        )
        if names
    ]
    if problems:
        raise FldiagError("; ".join(problems), "give the model of this very architecture")
    return {n: state[n].detach() for n in shapes if n in state}, prefix


def _required_names(module: nn.Module) -> set[str]:
    """Names without which the weights are not whole: a batch counter may lack, and what state_dict() does not keep."""
    parameters = {n for n, _ in module.named_parameters()}
    buffers = {n for n, _ in module.named_buffers()} & module.state_dict().keys()
    return parameters | {n for n in buffers if not n.endswith("num_batches_tracked")}


ONE_FILE, SHARDS = "model.safetensors", "model.safetensors.index.json"


def is_pretrained(path: Path) -> bool:
    return os.path.isfile(path / "config.json") and not os.path.isfile(path / "run.json")


def read_pretrained(folder: Path) -> Checkpoint:
    """The weights in a folder that ``save_pretrained`` of transformers wrote; nothing but tensors is read.

    Raises FldiagError when there are none as safetensors, or a shard is missing or lies elsewhere.
    """
    files = [ONE_FILE]
    if not (folder / ONE_FILE).is_file():
        try:
            files = sorted(
                set(json.loads((folder / SHARDS).read_text("utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise FldiagError(
                f"{folder} holds no {ONE_FILE}",
                "save it with model.save_pretrained(folder)",
                usage=True,
            ) from None
    state: dict[str, Tensor] = {}
    for name in files:
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise FldiagError(
                f"{folder / SHARDS} names {name!r}, which is not a safetensors file in this folder",
                "use the original",
            )
        state |= read_tensors(folder / name)
    check_kinds(folder, state)
    return Checkpoint(folder / files[0], state)
