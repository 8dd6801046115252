"""What an answer is about: its runs, checkpoints and options, as the json beside its table says them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fldiag.diagnosis.options import ProblemOptions, plain
from fldiag.diagnosis.question import Question
from fldiag.diagnosis.subjects import Subject
from fldiag.problem.problem import Problem
from fldiag.results.provenance import digest
from fldiag.runs.history import History
from fldiag.runs.run import Run


def members(subject: Subject) -> Sequence[Problem | History | Run]:
    return [subject] if isinstance(subject, (Problem, History)) else subject


def paths_of(subject: Subject) -> list[Path]:
    """The run folders and checkpoint files that a subject was opened from."""
    origins = []
    for member in members(subject):
        run = member if isinstance(member, Run) else member.run
        if run is not None:
            origins.append(run.path)
        elif isinstance(member, Problem) and member.checkpoint is not None:
            origins.append(member.checkpoint.path)
    return origins


def describe(question: Question, subjects: Sequence[Subject]) -> dict[str, Any]:
    """Which files an answer is about, and under ``where`` the options of the subjects that were passed."""
    options = question.subject_options
    subject_values = plain(options.values(without=("executor", "names")))
    all_members = [member for subject in subjects for member in members(subject)]
    problems = [member for member in all_members if isinstance(member, Problem)]
    runs = [member for member in all_members if isinstance(member, Run)]
    if runs:
        return {
            "run": ", ".join(run.name for run in runs),
            "config": ", ".join(str(run.hash) for run in runs),
            "checkpoints": {
                # as the run lists it: a damaged one is a finding
                run.name: {"file": Path(file).name, "sha256": run.files[file]}
                for run in runs
                for file in [run.round_file(run.some_rounds()[-1])]
            },
        }
    if problems:
        about: dict[str, Any] = {"checkpoints": {p.name: _file(p) for p in problems}}
        if not isinstance(subjects[0], Problem):
            about["through"] = [p.checkpoint.sha256 for p in problems if p.checkpoint is not None]
        values = {k: v for k, v in subject_values.items() if k not in ("model", "data", "key")}
        return {**about, "where": values}
    (history,) = (member for member in all_members if isinstance(member, History))
    about = {"history": history.digest()}
    if history.run is None:
        return about
    return {
        "run": history.run.path.name,
        "config": history.run.hash,
        **about,
        "checkpoints": history.files,
        "where": {
            **subject_values,
            "rounds": history.rounds if "rounds" in options.model_fields_set else None,
        },
        **({} if history.alone else {"inputs": history.dataset.scaling}),
    }


def _file(problem: Problem) -> dict[str, Any]:
    """What an answer is about: the file, and model or data that were passed beside it."""
    about = {"slice": problem.slice_name, "n": problem.n, "inputs": problem.inputs}
    checkpoint = problem.checkpoint
    overrides = {} if checkpoint is None else {"model": checkpoint.model, "data": checkpoint.data}
    if checkpoint is None or any(value is not None for value in overrides.values()):
        about |= {"digest": problem.digest(), "remarks": list(problem.remarks)}
    if checkpoint is None:
        return about
    return {
        "file": checkpoint.path.name,
        "sha256": checkpoint.sha256,
        **({"key": checkpoint.key} if checkpoint.key else {}),
        "run": checkpoint.manifest.get("run"),
        **about,
        **{k: v for k, v in overrides.items() if isinstance(v, str)},
    }


def stem_of(question: Question, subjects: Sequence[Subject], about: Mapping[str, Any]) -> str:
    """How the names of files begin: they differ whenever the question does, whatever files and folders are called."""
    content = {k: v for k, v in about.items() if k != "run"}
    if isinstance(content.get("checkpoints"), dict):
        content["checkpoints"] = [
            {k: v for k, v in file.items() if k not in ("file", "run")}
            if isinstance(file, dict)
            else [key, file]
            for key, file in content["checkpoints"].items()
        ]
    own_options = plain(dict(question.options))
    # the empty parts stand for what went: files have the names they had
    options: Any = ([own_options] * len(subjects), [], {})
    parts = [file_name(question.entry.name)]
    if isinstance(question.subject_options, ProblemOptions):
        problems = [p for s in subjects for p in members(s) if isinstance(p, Problem)]
        checkpoints = [p.checkpoint for p in problems if p.checkpoint is not None]
        is_one = len(checkpoints) == 1
        title = checkpoints[0].path.stem if is_one else f"{len(checkpoints)}-checkpoints"
        parts.append("".join(ch if ch.isalnum() or ch in "._-" else "-" for ch in title)[:60])
    return "-".join([*parts, digest(content, question.subject_options.names, options)[:8]])


def file_name(diagnostic: str) -> str:
    """How names of files begin: a function of one's own is ``pkg.mod:function``."""
    return diagnostic.replace(":", "-")
