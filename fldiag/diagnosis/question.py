"""A question put together before anything is computed: the same for the command line, the report and Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fldiag import data, registry, user_code
from fldiag.diagnosis import places, subjects
from fldiag.diagnosis.measure import Subject
from fldiag.diagnosis.options import plain, read_names, rounds
from fldiag.diagnosis.subjects import Target
from fldiag.errors import FldiagError
from fldiag.execution.executor import parse_executor
from fldiag.problem.problem import Problem
from fldiag.registry import Diagnostic
from fldiag.results.provenance import digest
from fldiag.runs.history import History
from fldiag.runs.run import Run
from fldiag.runs.schema import Checkpoint


@dataclass
class Question:
    """What to measure of what.

    ``items``: (title, subject, options) of every table; those of one diagnostic stand one below the other.
    ``flag_diagnostics``: those that flags add for the same subjects, with their options. ``about``: which files the answer is
    about. ``stem``: a name for it that differs whenever the question does.
    """

    entry: Diagnostic
    items: list[tuple[str, Subject, dict[str, Any]]]
    flag_diagnostics: dict[Diagnostic, dict[str, Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    stem: str = ""
    executor: Any = "serial"
    notes: list[str] = field(default_factory=list)


def open_question(name: str, targets: Sequence[Target], options: Mapping[str, Any]) -> Question:
    """Check the question and open what it is about.

    Args:
        name: the diagnostic's.
        targets: runs, checkpoints, Problems or a History, as the diagnostic takes them.
        options: the diagnostic's own, those of its subject (``fldiag.diagnosis.options``), and its flags.

    Raises:
        FldiagError: an unknown diagnostic or option, a value out of range, or targets of the wrong kind.
    """
    entry = find_diagnostic(name)
    subjects.check_targets(targets)
    split = subjects.split_options(entry, options)
    executor = parse_executor(split.subject_options.pop("executor", "serial"))
    names = split.subject_options.pop("names", None)
    names = None if names is None else read_names(names, len(targets))
    flag_diagnostics = {
        registry.diagnostic.get(other): registry.diagnostic.get(other).validate(values)
        for other, values in split.flag_options.items()
    }
    open_items = {"run": _of_run, "clients": _of_run, "runs": _of_runs}.get(entry.on, _of_weights)
    question = open_items(entry, targets, split.subject_options, split.options, names)
    question.executor = executor
    question.flag_diagnostics = flag_diagnostics if question.entry is entry else {}
    for flag_name in split.flags if question.flag_diagnostics else ():
        flag = entry.flags[flag_name]
        other_options = flag_diagnostics[registry.diagnostic.get(flag.diagnostic)]
        for _, subject, item_options in question.items:
            flag.check(subject, item_options, other_options)
    all_options = (
        [plain(item_options) for _, _, item_options in question.items],
        split.flags,
        {k: plain(v) for k, v in split.flag_options.items()},
    )
    question.stem += f"-{digest(_nameless(question.about), names, all_options)[:8]}"
    return question


def _nameless(about: Mapping[str, Any]) -> dict[str, Any]:
    """What an answer is about, without the names of files and folders."""
    content = {k: v for k, v in about.items() if k != "run"}
    if isinstance(content.get("checkpoints"), dict):
        content["checkpoints"] = [
            {k: v for k, v in file.items() if k not in ("file", "run")}
            if isinstance(file, dict)
            else [key, file]
            for key, file in content["checkpoints"].items()
        ]
    return content


def find_diagnostic(name: str) -> Diagnostic:
    """The diagnostic of this name, or the function ``pkg.mod:function``, which is imported because it is named here.

    Raises FldiagError for an unknown name, and for code that cannot be imported.
    """
    if not user_code.is_code(name):
        return registry.diagnostic.get(name)
    return registry.diagnostic.add_own(name, user_code.load(name, "diagnostic", {name}))


def file_name(diagnostic: str) -> str:
    """How names of files begin: a function of one's own is ``pkg.mod:function``."""
    return diagnostic.replace(":", "-")


def _of_weights(
    entry: Diagnostic,
    targets: Sequence[Target],
    subject_options: dict[str, Any],
    options: dict[str, Any],
    names: list[str] | None,
) -> Question:
    overrides = {
        k: subject_options.pop(k)
        for k in ("model", "data", "key")
        if subject_options.get(k) is not None
    }
    sources: list[Run | Checkpoint | Problem] = []
    for t in targets:
        if isinstance(t, History):
            raise FldiagError(
                f"diagnostic {entry.name!r} cannot be run on a History",
                "give a checkpoint or a Problem",
                usage=True,
            )
        if isinstance(t, Problem):
            subjects.refuse_options({**overrides, **subject_options}, t)
        if isinstance(t, Checkpoint) and "round" in subject_options:
            raise FldiagError(
                f"round = {subject_options['round']} chooses a checkpoint of a run, but {t.path} is one checkpoint",
                "leave it out, or give the run's folder",
                usage=True,
            )
        sources.append(t if isinstance(t, Problem) else subjects.with_overrides(t, **overrides))
    subject_options = subjects.with_dtype(subject_options)
    round = subject_options.pop("round", None)
    if round is not None:
        sources = [t.checkpoint(round) if isinstance(t, Run) else t for t in sources]
    problems = subjects.problems(sources, subject_options, names)
    items: list[tuple[str, Subject, dict[str, Any]]] = (
        [(entry.name, problems, options)]
        if entry.is_joint(options)
        else [(p.name, p, options) for p in problems]
    )
    checkpoints = [p.checkpoint for p in problems if p.checkpoint is not None]
    subject_options |= {} if round is None else {"round": round}
    about: dict[str, Any] = {"checkpoints": {p.name: _file(p) for p in problems}}
    if entry.is_joint(options):
        about["through"] = [c.sha256 for c in checkpoints]
    title = checkpoints[0].path.stem if len(checkpoints) == 1 else f"{len(checkpoints)}-checkpoints"
    title = "".join(ch if ch.isalnum() or ch in "._-" else "-" for ch in title)[:60]
    values = {k: str(v) if k == "dtype" else v for k, v in subject_options.items()}
    return Question(
        entry,
        items,
        about={**about, "where": plain(values)},
        stem=f"{file_name(entry.name)}-{title}",
        notes=remarks(problems),
    )


def _file(problem: Problem) -> dict[str, Any]:
    """What an answer is about: the file, and model or data that were passed beside it."""
    target = problem.checkpoint
    about = {
        "slice": problem.slice_name,
        "n": problem.n,
        "inputs": problem.inputs,
    }
    if target is None:
        return {"digest": problem.digest(), **about, "remarks": list(problem.remarks)}
    file = {
        "file": target.path.name,
        "sha256": target.sha256,
        **({"key": target.key} if target.key else {}),
        "run": target.manifest.get("run"),
    }
    if target.model is None and target.data is None:
        return file | about
    overrides = {"model": target.model, "data": target.data}
    return {
        **file,
        **about,
        "digest": problem.digest(),
        "remarks": list(problem.remarks),
        **{k: v for k, v in overrides.items() if isinstance(v, str)},
    }


def _of_run(
    entry: Diagnostic,
    targets: Sequence[Target],
    subject_options: dict[str, Any],
    options: dict[str, Any],
    names: list[str] | None,
) -> Question:
    if len(targets) != 1:
        raise FldiagError(
            f"{entry.name} takes one run, and {len(targets)} are given",
            "give one run's folder",
            usage=True,
        )
    target = targets[0]
    if isinstance(target, History):
        subjects.refuse_options(subject_options, target)
        if names is not None:
            subjects.refuse_options({"names": ",".join(names)}, target)
        return Question(
            entry,
            [(target.name, target, options)],
            about={"history": target.digest()},
            stem=file_name(entry.name),
        )
    if isinstance(target, Problem):
        raise FldiagError(
            f"diagnostic {entry.name!r} cannot be run on a Problem", "give a run", usage=True
        )
    if not isinstance(target, Run):
        raise FldiagError(
            f"diagnostic {entry.name!r} needs a run, but {target.path} is a single checkpoint",
            "give the run's folder",
            usage=True,
        )
    subject_options = subjects.with_dtype(subject_options)
    subject_options["rounds"] = rounds(subject_options.get("rounds"), target.rounds)
    # decided here, so that the cache tells the two answers apart
    if "every_round" in options and options["every_round"] is None:
        options["every_round"] = subject_options["rounds"] is not None
    if names is not None:
        subject_options["name"] = names[0]
    history = subjects.history(target, subject_options)
    about = {
        "run": target.path.name,
        "config": target.index["hash"],
        "history": history.digest(),
        "checkpoints": history.files,
        "where": plain(subject_options),
        **({} if history.alone else {"inputs": history.dataset.scaling}),
    }
    return Question(
        entry,
        [(target.path.name, history, options)],
        about=about,
        stem=file_name(entry.name),
        notes=[] if history.alone else data.remarks(history.dataset),
    )


def _of_runs(
    entry: Diagnostic,
    targets: Sequence[Target],
    subject_options: dict[str, Any],
    options: dict[str, Any],
    names: list[str] | None,
) -> Question:
    runs = []
    for target in targets:
        if not isinstance(target, Run):
            raise FldiagError(
                f"diagnostic {entry.name!r} takes runs", "give run folders", usage=True
            )
        runs.append(copy(target))
    for run, name in zip(runs, names or places.distinct([r.path for r in runs]), strict=True):
        run.name = name
    about = {
        "run": ", ".join(r.name for r in runs),
        "config": ", ".join(str(r.index["hash"]) for r in runs),
        "checkpoints": {
            # as the run lists it: a damaged one is a finding
            r.name: {"file": Path(file).name, "sha256": r.index["files"][file]}
            for r in runs
            for file in [r.round_file(r.some_rounds()[-1])]
        },
    }
    return Question(
        entry,
        [(", ".join(r.name for r in runs), runs, options)],
        about=about,
        stem=file_name(entry.name),
    )


def remarks(problems: Sequence[Problem]) -> list[str]:
    """How data of one's own are seen, what a loss is the mean of, and where frozen parameters are counted as weights."""
    for problem in problems:
        # the probe sees what targets look like, and whether what was allowed occurs
        if (problem.in_memory or problem.allow) and bool(problem.w.isfinite().all()):
            problem.probe()
    texts = list(dict.fromkeys(text for problem in problems for text in problem.remarks))
    for problem in problems:
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
