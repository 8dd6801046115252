"""State_dicts of other programs: named as the model names its tensors, and which of several sets of weights is meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from fldiag.errors import FldiagError

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


def prefixes(names: Iterable[str], module: nn.Module) -> list[str]:
    """What stands before the module's own names in ``names``: "module." of DataParallel, "model." of Lightning, "_orig_mod." of
    torch.compile, "" where they fit as they are. Several where there are several sets of weights; none where none fits."""
    required, present = required_names(module), set(names)
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
    state = in_order(state, module)
    fits = prefixes(state, module)
    prefix = plain_name([p.removesuffix(".") for p in fits]) if fits else ""
    if prefix is None:
        raise FldiagError(
            f"the names fit the model behind each of {', '.join(map(repr, fits))}",
            key_remedy(fits[-1].removesuffix(".")),
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
    return strip_prefix(state, prefix), prefix, alternatives


def plain_name(names: Iterable[str]) -> str | None:
    """Of names of sets of weights that of the trained weights themselves; None where that is not clear."""
    listed = list(names)
    trained = [name for name in listed if not AVERAGES & set(re.split("[^a-z]+", name.lower()))]
    usual = [name for name in trained if all(part in CONTAINERS for part in name.split("."))]
    for candidates in (trained if "" in trained else usual, trained, listed):
        if candidates:
            return candidates[0] if len(candidates) == 1 else None
    return None


def describe_choice(key: str, alternatives: Sequence[str]) -> str:
    """What is said of a choice between sets of weights."""
    key, names = (
        key.removesuffix(".") or "the one without a name",
        [name.removesuffix(".") for name in alternatives],
    )
    return (
        f"of several sets of weights, {key} is read, and {', '.join(names)} {'is' if len(names) == 1 else 'are'} not "
        "(choose with --key NAME or key=NAME)"
    )


def key_remedy(key: str) -> str:
    return f"choose one, such as --key {key} (fldiag.load(path, key={key!r})), or save it alone: torch.save(state_dict, path)"


def strip_prefix(state: State, prefix: str) -> State:
    """The tensors behind the prefix, without it; those elsewhere are left out."""
    return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}


def in_order(state: State, module: nn.Module) -> State:
    """Arrays without names (``arr_0``, ``arr_1``, ...) under those of the module's state_dict, or of its parameters alone, in
    that order; or one vector of all. Buffers that they leave out are the module's.

    Raises FldiagError where numbers or shapes do not fit.
    """
    if not state or not all(re.fullmatch(r"arr_\d+", name) for name in state):
        return state
    arrays = [state[name] for name in sorted(state, key=lambda name: int(name[4:]))]
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    tensors = module.state_dict()
    for target in (tensors, parameters):
        values = arrays
        if len(arrays) == 1 and arrays[0].ndim == 1:
            sizes = [t.numel() for t in target.values()]
            if sum(sizes) != len(arrays[0]):
                continue
            values = [
                part.reshape(t.shape)
                for part, t in zip(arrays[0].split(sizes), target.values(), strict=True)
            ]
        if [a.shape for a in values] == [t.shape for t in target.values()]:
            return {**tensors, **dict(zip(target, values, strict=True))}
    shapes = [list(a.shape) for a in arrays]
    target = tensors if len(arrays) == len(tensors) else parameters
    pairs = zip(shapes, target.items(), strict=False)
    misfit = next(
        (f": {a} where {n} is {list(t.shape)}" for a, (n, t) in pairs if a != list(t.shape)), ""
    )
    raise FldiagError(
        f"{len(arrays)} arrays without names do not fit the model, whose state_dict has {len(tensors)} tensors and which has "
        f"{sum(p.numel() for p in parameters.values()):,} parameters{misfit}",
        "give the model of these weights; arrays are taken in the order of its state_dict()",
    )


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
    all_names = shapes.keys() | module.state_dict().keys()  # also the second names of tied tensors
    misfits = [
        f"{n} is {list(state[n].shape)} there and {list(s)} in the model"
        for n, s in shapes.items()
        if n in state and state[n].shape != s
    ][:1]
    misfits += [
        f"{kind} {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        for kind, names in (
            ("it lacks", sorted(required_names(module) - state.keys())),
            ("the model has no", sorted(state.keys() - all_names)),
        )
        if names
    ]
    if misfits:
        raise FldiagError("; ".join(misfits), "give the model of this very architecture")
    return {n: state[n].detach() for n in shapes if n in state}, prefix


def required_names(module: nn.Module) -> set[str]:
    """Names without which the weights are not whole: a batch counter may lack, and what state_dict() does not keep."""
    parameters = {n for n, _ in module.named_parameters()}
    buffers = {n for n, _ in module.named_buffers()} & module.state_dict().keys()
    return parameters | {n for n in buffers if not n.endswith("num_batches_tracked")}
