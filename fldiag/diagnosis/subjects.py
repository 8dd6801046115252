"""What is diagnosed: from paths, runs, checkpoints and modules to Problems and Histories."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import torch

from fldiag import registry
from fldiag.device import device_of
from fldiag.diagnosis import options as shared
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.registry import Diagnostic, Flag
from fldiag.runs import pretrained, schema
from fldiag.runs.history import History
from fldiag.runs.open_problem import open_problem
from fldiag.runs.run import Run, verify
from fldiag.runs.schema import Checkpoint
from fldiag.runs.trust import trust
from fldiag.sections import read_normalisation
from fldiag.user_code import importable

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
#: What a question can be about.
Target = Run | Checkpoint | Problem | History


def load(
    path: str | Path,
    *,
    model: Any = None,
    data: Any = None,
    key: str | None = None,
    allow_code: str | Iterable[str] = (),
    trust_file: bool = False,
) -> Run | Checkpoint:
    """A run folder as Run; a ``.pt`` or ``.safetensors`` file, or a model's folder of transformers, as Checkpoint.

    Args:
        path: a run folder, its run.json, a checkpoint file, or what ``save_pretrained`` wrote (config.json and safetensors).
        model: for a plain state_dict: a module, a registered name or ``pkg.mod:factory``; overrides what a checkpoint says.
        data: what ``Problem`` takes, a data set's name, ``npz:PATH`` or ``pkg.mod:loader``.
        key: which set of weights to read of a file that holds several (``model``, ``model_ema``); by default the plain one.
        allow_code: user code (``pkg.mod:name``, one or several) that may be imported although only the file names it.
        trust_file: a ``.pt`` file, or those of the run, are your own. Torch before 2.10 cannot read those of strangers safely,
            so that they are refused there without this; the consent holds until the process ends.

    Returns:
        What the path is, with this model and these data.

    Raises:
        FldiagError: the file is damaged, foreign or unsafe.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise FldiagError(
            f"a {type(path).__name__} is not a path",
            "give a run folder or a checkpoint file",
            usage=True,
        )
    path = Path(path)
    if trust_file:
        trust(path)
    if pretrained.is_pretrained(path):
        return with_overrides(pretrained.read_pretrained(path), model, data, key).allow(allow_code)
    if os.path.isdir(path) or path.name == "run.json":
        return with_overrides(Run.open(path), model, data, key).allow(allow_code)
    verify(path)
    return replace(schema.read(path, key), model=model, data=data).allow(allow_code)


def with_overrides(
    target: Run | Checkpoint, model: Any = None, data: Any = None, key: str | None = None
) -> Run | Checkpoint:
    """The target with another model, other data, or another of its file's sets of weights."""
    if key is not None and isinstance(target, Run):
        raise FldiagError(
            f"key = {key!r} chooses among the sets of weights of a file, and {target.path} is a run",
            "leave it out",
            usage=True,
        )
    if key is not None and isinstance(target, Checkpoint) and key != target.key:
        target = replace(schema.read(target.path, key), model=target.model, data=target.data)
    model, data = target.model if model is None else model, target.data if data is None else data
    if isinstance(target, Run):
        target = copy(target)
        target.model, target.data = model, data
        return target
    return replace(target, model=model, data=data)


def check_targets(targets: Sequence[Any]) -> None:
    """Raises FldiagError for what cannot be diagnosed."""
    if not targets:
        raise FldiagError(
            "there is nothing to diagnose",
            "give a run, a checkpoint, a Problem or a History",
            usage=True,
        )
    for target in targets:
        if isinstance(target, torch.nn.Module):
            raise FldiagError(
                "a module alone has no loss and no data",
                "give fldiag.Problem(net, loss, (x, y))",
                usage=True,
            )
        if not isinstance(target, Target):
            raise FldiagError(
                f"a {type(target).__name__} cannot be diagnosed",
                "give a run, a checkpoint, their path, a Problem or a History",
                usage=True,
            )


def labels(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """A short label for each checkpoint, all different."""
    names = [c.label for c in checkpoints]
    if not names:
        return []
    if max(Counter(names).values()) > 1:
        names = [
            f"{n} ({c.path.parent.parent.name if c.path.parent.name == 'rounds' else c.path.stem})"
            for n, c in zip(names, checkpoints, strict=True)
        ]
    if max(Counter(names).values()) > 1:
        names = [f"{n} #{i}" for i, n in enumerate(names, start=1)]
    return names


def problems(
    targets: Sequence[Run | Checkpoint | Problem],
    subject_options: Mapping[str, Any],
    names: Sequence[str] | None = None,
) -> list[Problem]:
    """The loss around each target; the options are those of ``fldiag.runs.open_problem``. ``names``: of the targets."""
    if any(isinstance(t, Problem) for t in targets) and names is not None:
        raise FldiagError(
            "names are for files and runs, and a Problem has its own", "leave out names", usage=True
        )
    with importable():
        opened = [
            t if isinstance(t, Problem) else open_problem(t, **subject_options) for t in targets
        ]
    if "name" in subject_options:
        return opened
    files = [p for p, t in zip(opened, targets, strict=True) if p is not t]
    for problem, label in zip(files, names or labels([p.checkpoint for p in files]), strict=True):
        client = problem.labels.get("client")
        problem.name = label if names or client is None else f"{label} client {client}"
    return opened


def history(run: Run, subject_options: Mapping[str, Any]) -> History:
    """The stored rounds of a run; the options are those of ``History.of``."""
    with importable():
        return History.of(run, **{"model": run.model, "data": run.data, **subject_options})


@dataclass
class SplitOptions:
    """Options that were passed together, by whose they are; all are checked.

    ``subject_options``: those passed, of the subject; ``options``: of the diagnostic, with its defaults; ``flag_options``: of
    every diagnostic that a flag adds, by its name. ``flags``: those that are set.
    """

    subject_options: dict[str, Any]
    options: dict[str, Any]
    flag_options: dict[str, dict[str, Any]]
    flags: list[str]


def split_options(entry: Diagnostic, values: Mapping[str, Any]) -> SplitOptions:
    """Whose each option is. Raises FldiagError for unknown options and values out of range."""
    names = entry.options.model_fields
    added = [flag for name, flag in entry.flags.items() if values.get(name)]
    only_added = {name for flag in entry.flags.values() for name in flag.options}.difference(names)
    passed = {k: v for flag in added for k, v in flag.sets.items()}
    passed |= {
        k: v for k, v in values.items() if k in names or not (k in entry.flags or k in only_added)
    }
    schema = _schema(entry)
    for name in passed:
        if name not in schema.model_fields and any(option.name == name for option in shared.SHARED):
            raise FldiagError(
                f"option {name!r} has no effect on {entry.name}, which takes another kind of target",
                f"leave it out; fldiag explain {entry.name} lists its options",
                usage=True,
            )
    try:
        checked = dict(schema(**passed))
    except pydantic.ValidationError as error:
        raise registry.explain(error, f"{entry.kind} {entry.name!r}", schema) from None
    if "device" in checked:
        checked["device"] = device_of(checked["device"], DTYPES.get(str(checked.get("precision"))))
    return SplitOptions(
        {k: checked[k] for k, v in passed.items() if k not in names and v is not None},
        {k: checked[k] for k in names},
        {flag.diagnostic: _options_for(flag, set(names), values) for flag in added},
        [name for name in entry.flags if values.get(name)],
    )


def _options_for(flag: Flag, owner_names: set[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a diagnostic that a flag adds: those that it alone has, and those that it shares with the flag's owner."""
    names = set(registry.diagnostic.get(flag.diagnostic).options.model_fields)
    return {
        k: v for k, v in values.items() if k in names and (k in owner_names or k in flag.options)
    }


@cache
def _schema(entry: Diagnostic) -> type[pydantic.BaseModel]:
    """The diagnostic's options and those of its subject, as one."""
    kinds = {"str": str, "int": int, "float": float, "bool": bool}
    fields: dict[str, Any] = {}
    for option in shared.shared_by(entry.on, entry.options.model_fields):
        kind: Any = (
            Annotated[kinds[option.kind], pydantic.Field(ge=option.least)]
            if option.least is not None
            else kinds[option.kind]
        )
        fields[option.name] = (Any if option.any else kind | None, option.default)
    if "precision" in fields:
        fields["precision"] = (Literal["fp32", "fp64"], "fp32")
    if "memory" in fields:
        fields["memory"] = (
            Annotated[Any, pydantic.AfterValidator(lambda v: v if v is None else shared.size(v))],
            None,
        )
    if "normalise" in fields:
        read = pydantic.AfterValidator(lambda v: v if v is None else read_normalisation(v))
        fields["normalise"] = (Annotated[Any, read], None)
    return pydantic.create_model(f"{entry.name}_options", __base__=entry.options, **fields)


def with_dtype(subject_options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as ``open_problem`` and ``History.of`` take them: ``dtype`` instead of ``precision``."""
    options = dict(subject_options)
    if "precision" in options:
        options["dtype"] = DTYPES[options.pop("precision")]
    return options


def refuse_options(subject_options: Mapping[str, Any], subject: Problem | History) -> None:
    """Raises FldiagError for an option that would change nothing, because the subject exists already."""
    for name, value in subject_options.items():
        is_so = (
            (name == "precision" and DTYPES[value] == subject.dtype)
            or (name == "device" and torch.device(value).type == subject.device.type)
            or value is False
        )
        if not is_so:
            kind = type(subject).__name__
            raise FldiagError(
                f"option {name} = {value!r} has no effect on a {kind}, which already has its weights and data",
                f"leave it out, or set it when the {kind} is created",
                usage=True,
            )
