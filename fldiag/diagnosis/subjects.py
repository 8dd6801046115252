"""What is diagnosed: from paths, runs and checkpoints to Problems and Histories."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fldiag import data as data_sets
from fldiag.diagnosis.options import (
    HistoryOptions,
    OpenedOptions,
    ProblemOptions,
    SubjectOptions,
)
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.registry import Diagnostic
from fldiag.runs.checkpoint import Checkpoint, is_pretrained, trust_files
from fldiag.runs.history import History
from fldiag.runs.open_problem import open_problem
from fldiag.runs.run import Run, open_checkpoint, select_rounds

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
#: What a question can be about.
Target = Run | Checkpoint | Problem | History
#: What a diagnostic measures.
Subject = Problem | History | Sequence[Run] | Sequence[Problem]


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
        key: which set of weights to read of a file that holds several (``model``, ``model_ema``).
        allow_code: user code (``pkg.mod:name``, one or several) that may be imported although only the file names it.
        trust_file: a ``.pt`` file, or those of the run, are your own. Torch before 2.10 cannot read those of strangers safely,
            so that they are refused there without this; the consent holds until the process ends.

    Returns:
        What the path is, with this model and these data.

    Raises:
        FldiagError: the file is damaged, foreign or unsafe.
    """
    if not isinstance(path, (str, os.PathLike)):
        what = f"a {type(path).__name__} is not a path"
        raise FldiagError(what, "give a run folder or a checkpoint file", usage=True)
    path = Path(path)
    if trust_file:
        trust_files()
    path = path.parent if path.name == "run.json" else path
    if os.path.isdir(path) and not is_pretrained(path):
        return with_overrides(Run.open(path), model, data, key).allow(allow_code)
    return replace(open_checkpoint(path, key), model=model, data=data).allow(allow_code)


def with_overrides(
    target: Run | Checkpoint, model: Any = None, data: Any = None, key: str | None = None
) -> Run | Checkpoint:
    """The target with another model, other data, or another of its file's sets of weights."""
    model, data = target.model if model is None else model, target.data if data is None else data
    if isinstance(target, Run):
        if key is not None:
            what = f"key = {key!r} chooses among the weights of a file, and {target.path} is a run"
            raise FldiagError(what, "leave it out", usage=True)
        target = copy(target)
        target.model, target.data = model, data
        return target
    if key is not None and key != target.key:
        target = open_checkpoint(target.path, key)
    return replace(target, model=model, data=data)


def open_subjects(
    entry: Diagnostic,
    own_options: Mapping[str, Any],
    targets: Sequence[Target | str | Path],
    options: SubjectOptions,
    allow_code: str | Iterable[str] = (),
) -> list[Subject]:
    """What the diagnostic measures, one after the other.

    Args:
        entry: the diagnostic.
        own_options: its own options.
        targets: runs, checkpoints, Problems or a History, as the diagnostic takes them, or paths.
        options: of the targets.
        allow_code: user code that may be imported although only a run or checkpoint names it.

    Raises:
        FldiagError: targets of the wrong kind, or what cannot be opened.
    """
    of_one_run = entry.on in ("run", "clients")
    names = options.names or [None] * len(targets)
    if not targets or (of_one_run and len(targets) > 1):
        remedy = "give one run" if of_one_run else "give a run, a checkpoint or a Problem"
        what = f"{len(targets)} targets are given to {entry.name}"
        raise FldiagError(what, remedy, usage=True)
    if len(names) != len(targets):
        what = f"names = {','.join(names)!r} has {len(names)} names for {len(targets)} targets"
        raise FldiagError(what, "give a name for each, with commas between them", usage=True)
    subjects: list[Any] = []
    for target in targets:
        if isinstance(target, (str, Path)):
            target = load(target, key=getattr(options, "key", None))
        if isinstance(target, (Run, Checkpoint)):
            target = target.allow(allow_code)
        subjects.append(open_subject(target, options, entry.name))
    opened = [subject.name for subject in subjects]
    for number, (subject, name) in enumerate(zip(subjects, names, strict=True), start=1):
        is_one = opened.count(subject.name) == 1 or isinstance(targets[number - 1], Problem)
        subject.name = name or (subject.name if is_one else f"{subject.name} ({number})")
    is_joint = entry.on in ("runs", "checkpoints") or entry.joint(own_options)
    return [subjects] if is_joint else subjects


def open_subject(
    target: Any, options: SubjectOptions, diagnostic: str = ""
) -> Problem | History | Run:
    """The one door: the loss around weights, the stored rounds of a run, or the run itself. The class of the options says which.

    Raises FldiagError for what cannot be opened, and for an option that would change nothing.
    """
    kind = Problem if isinstance(options, ProblemOptions) else History
    if isinstance(target, kind) and isinstance(options, OpenedOptions):
        for name, value in options.values(without=("executor", "names")).items():
            what = f"option {name} = {value!r} has no effect on a {kind.__name__}, which has its weights and data"
            raise FldiagError(what, "leave it out, or set it where that is created", usage=True)
        return target
    if not isinstance(target, Run) and (kind is History or not isinstance(target, Checkpoint)):
        remedy = "give a run, a checkpoint or fldiag.Problem(net, loss, (x, y))"
        what = f"a {type(target).__name__} cannot be diagnosed by {diagnostic}"
        raise FldiagError(what, "give a run" if kind is History else remedy, usage=True)
    if not isinstance(options, OpenedOptions):
        return copy(target)  # type: ignore[return-value]
    aside = ("executor", "names", "precision", "model", "data", "key", "round")
    values = {"dtype": DTYPES[options.precision], **options.values(without=aside)}
    target = with_overrides(target, options.model, options.data, getattr(options, "key", None))
    if isinstance(options, HistoryOptions):
        values["rounds"] = select_rounds(options.rounds, target.rounds)
        return History(target, model=target.model, data=target.data, **values)
    round = getattr(options, "round", None)
    if round is not None and isinstance(target, Checkpoint):
        what = f"round = {round} chooses a checkpoint of a run, but {target.path} is one checkpoint"
        raise FldiagError(what, "leave it out, or give the run's folder", usage=True)
    return open_problem(target if round is None else target.checkpoint(round), **values)


def members(subject: Subject) -> Sequence[Problem | History | Run]:
    """The weights or runs that a subject consists of."""
    return [subject] if isinstance(subject, (Problem, History)) else subject


def remarks(subject: Subject) -> list[str]:
    """How data of one's own are seen, what a loss is the mean of, and where frozen parameters are counted as weights."""
    if isinstance(subject, History):
        return [] if subject.alone else data_sets.remarks(subject.dataset)
    texts: list[str] = []
    for problem in (member for member in members(subject) if isinstance(member, Problem)):
        # of one's own data, the probe sees what the targets look like
        if problem.inputs == "as passed" and bool(problem.w.isfinite().all()):
            problem.probe()
        texts += problem.remarks
        frozen = sum(p.numel() for p in problem.module.parameters() if not p.requires_grad)
        if frozen:
            how = "constants" if problem.trainable else "weights (--trainable: as constants)"
            texts.append(f"{problem.name}: {frozen:,} frozen parameters count as {how}")
    return texts
