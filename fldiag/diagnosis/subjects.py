"""What is diagnosed: from paths, runs and checkpoints to Problems and Histories."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fldiag import data as data_sets
from fldiag.device import full_precision
from fldiag.diagnosis.options import (
    HistoryOptions,
    ProblemOptions,
    SubjectOptions,
    read_names,
)
from fldiag.diagnosis.places import distinct
from fldiag.diagnosis.question import Question
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.registry import Diagnostic
from fldiag.runs.checkpoint import Checkpoint, is_pretrained, read_checkpoint, trust_files
from fldiag.runs.history import History
from fldiag.runs.open_problem import open_problem
from fldiag.runs.run import Run, select_rounds, verify

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
        trust_files()
    if (os.path.isdir(path) and not is_pretrained(path)) or path.name == "run.json":
        return with_overrides(Run.open(path), model, data, key).allow(allow_code)
    verify(path)
    return replace(read_checkpoint(path, key), model=model, data=data).allow(allow_code)


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
        target = replace(read_checkpoint(target.path, key), model=target.model, data=target.data)
    model, data = target.model if model is None else model, target.data if data is None else data
    if isinstance(target, Run):
        target = copy(target)
        target.model, target.data = model, data
        return target
    return replace(target, model=model, data=data)


def open_subjects(
    targets: Sequence[Target | str | Path],
    question: Question,
    allow_code: str | Iterable[str] = (),
) -> list[Subject]:
    """What the diagnostic measures, one after the other.

    Args:
        targets: runs, checkpoints, Problems or a History, as the diagnostic takes them, or paths.
        question: the diagnostic and its options.
        allow_code: user code that may be imported although only a run or checkpoint names it.

    Raises:
        FldiagError: targets of the wrong kind, or what cannot be opened.
    """
    entry, options = question.entry, question.subject_options
    sources = [_open_path(t, question) if isinstance(t, (str, Path)) else t for t in targets]
    sources = [t.allow(allow_code) if isinstance(t, (Run, Checkpoint)) else t for t in sources]
    _check_targets(entry, sources)
    names = None if options.names is None else read_names(options.names, len(sources))
    if entry.on == "runs":
        subjects: list[Any] = [open_subject(run, options) for run in sources]
        for run, name in zip(subjects, names or distinct([r.path for r in subjects]), strict=True):
            run.name = name
    else:
        target_options = [options.model_copy(update={"name": name}) for name in names or ()]
        subjects = [
            open_subject(t, o)
            for t, o in zip(sources, target_options or [options] * len(sources), strict=True)
        ]
    if isinstance(options, ProblemOptions) and options.name is None and names is None:
        files = [s for s, t in zip(subjects, sources, strict=True) if s is not t]
        for problem, name in zip(files, _distinct_names(files), strict=True):
            problem.name = name
    own_options = dict(question.options)
    return [subjects] if entry.on == "runs" or entry.is_joint(own_options) else subjects


def open_subject(target: Target, options: SubjectOptions) -> Problem | History | Run:
    """The one door: the loss around weights, the stored rounds of a run, or the run itself. The class of the options says which.

    Raises FldiagError for what cannot be opened, and for an option that would change nothing.
    """
    if isinstance(target, (Problem, History)):
        _refuse_options(options, target)
        return target
    values = options.values(
        without=("executor", "names", "precision", "model", "data", "key", "round")
    )
    if isinstance(options, ProblemOptions):
        target = with_overrides(target, options.model, options.data, options.key)
        if options.round is not None:
            target = _checkpoint_of_round(target, options.round)
        return open_problem(target, dtype=DTYPES[options.precision], **values)
    if isinstance(target, Checkpoint):
        raise FldiagError(
            f"{target.path} is a single checkpoint, and this needs a run",
            "give the run's folder",
            usage=True,
        )
    if not isinstance(options, HistoryOptions):
        return copy(target)
    values |= {
        "model": target.model if options.model is None else options.model,
        "data": target.data if options.data is None else options.data,
        "rounds": select_rounds(options.rounds, target.rounds),
    }
    return History.of(target, dtype=DTYPES[options.precision], **values)


def _checkpoint_of_round(target: Run | Checkpoint, round: int) -> Checkpoint:
    if isinstance(target, Checkpoint):
        raise FldiagError(
            f"round = {round} chooses a checkpoint of a run, but {target.path} is one checkpoint",
            "leave it out, or give the run's folder",
            usage=True,
        )
    return target.checkpoint(round)


def _open_path(path: str | Path, question: Question) -> Run | Checkpoint:
    path = Path(path)
    if question.entry.on in ("run", "clients", "runs") and not os.path.exists(path):
        return Run.open(path)
    return load(path, key=getattr(question.subject_options, "key", None))


def _check_targets(entry: Diagnostic, targets: Sequence[Any]) -> None:
    """Raises FldiagError for what the diagnostic does not take."""
    if not targets:
        raise FldiagError(
            "there is nothing to diagnose",
            "give a run, a checkpoint, a Problem or a History",
            usage=True,
        )
    of_weights, of_one_run = entry.on in ("problem", "checkpoints"), entry.on in ("run", "clients")
    if of_one_run and len(targets) != 1:
        raise FldiagError(
            f"{entry.name} takes one run, and {len(targets)} are given",
            "give one run's folder",
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
        if (isinstance(target, Problem) and not of_weights) or (
            isinstance(target, History) and not of_one_run
        ):
            raise FldiagError(
                f"diagnostic {entry.name!r} cannot be run on a {type(target).__name__}",
                "give a checkpoint or a Problem" if of_weights else "give a run",
                usage=True,
            )


def _refuse_options(options: SubjectOptions, subject: Problem | History) -> None:
    """Raises FldiagError for an option that would change nothing, because the subject exists already."""
    for name, value in options.values(without=("executor",)).items():
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


def _distinct_names(problems: Sequence[Problem]) -> list[str]:
    """Short names of checkpoints, all different."""
    names = [p.name for p in problems]
    if len(set(names)) < len(names):
        paths = [p.checkpoint.path for p in problems if p.checkpoint is not None]
        names = [
            f"{n} ({path.parent.parent.name if path.parent.name == 'rounds' else path.stem})"
            for n, path in zip(names, paths, strict=True)
        ]
    if len(set(names)) < len(names):
        names = [f"{n} #{i}" for i, n in enumerate(names, start=1)]
    return names


@full_precision()
def remarks(subject: Subject) -> list[str]:
    """How data of one's own are seen, what a loss is the mean of, and where frozen parameters are counted as weights."""
    if isinstance(subject, History):
        return [] if subject.alone else data_sets.remarks(subject.dataset)
    texts: list[str] = []
    problems = [subject] if isinstance(subject, Problem) else subject
    for problem in (p for p in problems if isinstance(p, Problem)):
        # the probe sees what targets look like
        if problem.in_memory and bool(problem.w.isfinite().all()):
            problem.probe()
        texts += problem.remarks
        count = sum(p.numel() for p in problem.module.parameters())
        frozen = sum(p.numel() for p in problem.module.parameters() if not p.requires_grad)
        if frozen:
            texts.append(
                f"{problem.name}: {frozen:,} of {count:,} parameters are frozen (requires_grad = False); they "
                + (
                    "are treated as constants here"
                    if problem.frozen
                    else "count as weights like the others (--trainable leaves them out)"
                )
            )
    return texts
