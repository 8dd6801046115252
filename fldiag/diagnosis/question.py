"""A question put together before anything is computed: the same for the command line, the report and Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from fldiag import data, registry
from fldiag.checkpoint.run import Run
from fldiag.checkpoint.schema import Checkpoint
from fldiag.diagnosis import places, subjects
from fldiag.diagnosis.measure import Subject
from fldiag.diagnosis.options import plain, rounds
from fldiag.diagnosis.subjects import Target
from fldiag.errors import FldiagError
from fldiag.execution.executor import parse_executor
from fldiag.problem.problem import Problem
from fldiag.registry import Choice, Diagnostic
from fldiag.results.provenance import digest
from fldiag.rounds.history import REMEDY, History
from fldiag.user_code import importable


@dataclass
class Question:
    """``asked``: (title, subject, options) of every table; those of one diagnostic stand one below the other. ``more``: the
    further diagnostics that flags ask of the same subjects. ``about``: which files the answer is about. ``stem``: a name for
    it that differs whenever the question does."""

    entry: Diagnostic
    asked: list[tuple[str, Subject, dict[str, Any]]]
    more: dict[Diagnostic, dict[str, Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    stem: str = ""
    executor: Any = "serial"
    notes: list[str] = field(default_factory=list)


def question(name: str, targets: Sequence[Target], options: Mapping[str, Any]) -> Question:
    """Check the question and open what it is about.

    Args:
        name: the diagnostic's.
        targets: runs, checkpoints, Problems or a History: what the diagnostic can be asked of.
        options: the diagnostic's own, those of its subject (``fldiag.diagnosis.options``), and its flags.

    Raises:
        FldiagError: an unknown diagnostic or option, a value out of range, or targets of the wrong kind.
    """
    entry = registry.diagnostic.get(name)
    subjects.known(targets)
    divided = subjects.divide(entry, options)
    executor = parse_executor(divided.where.pop("executor", "serial"))
    more = {
        registry.diagnostic.get(also): registry.diagnostic.get(also).validate(given)
        for also, given in divided.more.items()
    }
    made = {"run": _of_run, "runs": _of_runs}.get(entry.on, _of_weights)(
        entry, targets, divided.where, divided.own
    )
    made.executor = executor
    if executor.kind != "serial" and len(made.asked) == 1 and not made.entry.parts:
        made.notes.append(
            f"{made.entry.name} of a single target cannot be split for {executor}: it is computed in this process"
        )
    for _, subject, _ in made.asked:
        for part in subject if isinstance(subject, Sequence) else [subject]:
            if isinstance(part, Problem | History):
                part.executor = executor
    made.more = more if made.entry is entry else {}
    for _, subject, own in made.asked:
        for asked, given in [
            (made.entry, own | dict.fromkeys(divided.flags, True)),
            *made.more.items(),
        ]:
            if asked.check is not None:
                asked.check(subject, given)
    every = (
        [plain(own) for _, _, own in made.asked],
        divided.flags,
        {k: plain(v) for k, v in divided.more.items()},
    )
    made.stem += f"-{digest(made.about, every)[:8]}"
    return made


def _of_weights(
    entry: Diagnostic, targets: Sequence[Target], where: dict[str, Any], own: dict[str, Any]
) -> Question:
    given = {k: where.pop(k) for k in ("model", "data", "key") if where.get(k) is not None}
    opened: list[Run | Checkpoint | Problem] = []
    for t in targets:
        if isinstance(t, History):
            raise FldiagError(
                f"diagnostic {entry.name!r} cannot be run on a History",
                "give a checkpoint or a Problem",
                usage=True,
            )
        if isinstance(t, Problem):
            subjects.refuse({**given, **where}, t)
        if isinstance(t, Checkpoint) and "round" in where:
            raise FldiagError(
                f"round = {where['round']} chooses a checkpoint of a run, but {t.path} is one checkpoint",
                "leave it out, or give the run's folder",
                usage=True,
            )
        opened.append(t if isinstance(t, Problem) else subjects.given(t, **given))
    where = subjects.settled(where)
    round = where.pop("round", None)
    if round is not None:
        opened = [t.checkpoint(round) if isinstance(t, Run) else t for t in opened]
    with importable():
        choice = (
            entry.choose(opened, own, where) if entry.choose else Choice([(t, {}) for t in opened])
        )
    chosen = [t.checkpoint() if isinstance(t, Run) else t for t, _ in choice.asked]
    problems = subjects.problems(chosen, where)
    if choice.instead:
        entry, own = (
            registry.diagnostic.get(choice.instead),
            registry.diagnostic.get(choice.instead).validate(choice.options),
        )
    asked: list[tuple[str, Subject, dict[str, Any]]] = [
        (p.name, p, {**own, **extra}) for p, (_, extra) in zip(problems, choice.asked, strict=True)
    ]
    if entry.on == "checkpoints":
        asked = [(entry.name, problems, own)]
    named = list(choice.named) or [c for c in chosen if isinstance(c, Checkpoint)]
    where |= {} if round is None else {"round": round}
    about: dict[str, Any] = {
        "checkpoints": {
            p.name: _file(c, p, choice.named) for p, c in zip(problems, chosen, strict=True)
        }
    }
    if choice.named:
        about["through"] = [c.sha256 for c in named]
    what = named[0].path.stem if len(named) == 1 else f"{len(named)}-checkpoints"
    stem = f"{choice.stem or entry.name}-{''.join(ch if ch.isalnum() or ch in '._-' else '-' for ch in what)[:60]}"
    return Question(
        entry,
        asked,
        about={
            **about,
            "where": plain({k: str(v) if k == "dtype" else v for k, v in where.items()}),
        },
        stem=stem,
        notes=[*choice.notes, *remarks(problems)],
    )


def _file(
    target: Checkpoint | Problem, problem: Problem, named: Sequence[Checkpoint]
) -> dict[str, Any]:
    """What an answer is about: the file, and where model or data were given, these too, since the file does not decide them."""
    if isinstance(target, Problem):
        of = (
            {"file": named[0].path.name, "sha256": named[0].sha256} if len(named) == 1 else {}
        )  # its clients
        return {
            "digest": problem.digest(),
            "slice": problem.slice_name,
            "n": problem.n,
            "inputs": problem.inputs,
            "remarks": list(problem.remarks),
            **of,
        }
    given = {k: v for k, v in (("model", target.model), ("data", target.data)) if v is not None}
    more = (
        {
            "digest": problem.digest(),
            "remarks": list(problem.remarks),
            **{k: v for k, v in given.items() if isinstance(v, str)},
        }
        if given
        else {}
    )
    key = {"key": target.key} if target.key else {}
    return {
        "file": target.path.name,
        "sha256": target.sha256,
        **key,
        "run": target.manifest.get("run"),
        "slice": problem.slice_name,
        "n": problem.n,
        "inputs": problem.inputs,
        **more,
    }


def _of_run(
    entry: Diagnostic, targets: Sequence[Target], where: dict[str, Any], own: dict[str, Any]
) -> Question:
    if len(targets) != 1:
        raise FldiagError(
            f"{entry.name} takes one run, and {len(targets)} are given",
            "give one run's folder",
            usage=True,
        )
    target = targets[0]
    if isinstance(target, History):
        subjects.refuse(where, target)
        return Question(
            entry, [(target.name, target, own)], about={"history": target.digest()}, stem=entry.name
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
    if (
        entry.needs == "clients"
        and target.index["config"].get("checkpoint", {}).get("clients") == "none"
    ):
        raise FldiagError(f"run {target.path} holds no client weights", REMEDY)
    where = subjects.settled(where)
    where["rounds"] = rounds(where.get("rounds"), target.rounds)
    if (
        "every_round" in own and own["every_round"] is None
    ):  # settled here, so that the cache tells the two answers apart
        own["every_round"] = where["rounds"] is not None
    history = subjects.history(target, where)
    about = {
        "run": target.path.name,
        "config": target.index["hash"],
        "history": history.digest(),
        "checkpoints": history.files,
        "where": plain(where),
        **({} if history.alone else {"inputs": history.dataset.scaling}),
    }
    return Question(
        entry,
        [(target.path.name, history, own)],
        about=about,
        stem=entry.name,
        notes=[] if history.alone else data.remarks(history.dataset),
    )


def _of_runs(
    entry: Diagnostic, targets: Sequence[Target], where: dict[str, Any], own: dict[str, Any]
) -> Question:
    runs = []
    for target in targets:
        if not isinstance(target, Run):
            raise FldiagError(
                f"diagnostic {entry.name!r} takes runs", "give run folders", usage=True
            )
        runs.append(copy(target))
    for run, name in zip(runs, places.distinct([r.path for r in runs]), strict=True):
        run.name = name
    about = {
        "run": ", ".join(r.name for r in runs),
        "config": ", ".join(str(r.index["hash"]) for r in runs),
        "checkpoints": {
            r.name: {"file": c.path.name, "sha256": c.sha256}
            for r in runs
            for c in [r.checkpoint()]
        },
    }
    return Question(
        entry, [(", ".join(r.name for r in runs), runs, own)], about=about, stem=entry.name
    )


def remarks(problems: Sequence[Problem]) -> list[str]:
    """How data of one's own are seen, what a loss is the mean of, and where frozen parameters are counted as weights."""
    for problem in problems:
        # what their targets look like, and whether what was allowed was there, is found out by looking
        if (problem.in_memory or problem.allow) and bool(problem.w.isfinite().all()):
            problem.probe()
    told = list(dict.fromkeys(text for problem in problems for text in problem.remarks))
    for problem in problems:
        count = sum(p.numel() for p in problem.module.parameters())
        held = sum(p.numel() for p in problem.module.parameters() if not p.requires_grad)
        if held:
            told.append(
                f"{problem.name}: {held:,} of {count:,} parameters are frozen (requires_grad = False); they "
                + (
                    "are treated as constants here"
                    if problem.frozen
                    else "count as weights like the others (--trainable leaves them out)"
                )
            )
    return told
