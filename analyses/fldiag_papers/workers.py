"""Train and question one run, here or in several processes; what is done is kept, and never done twice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fldiag.errors import FldiagError, error_text
from fldiag.execution.executor import parse_executor
from fldiag.execution.pools import open_pool
from fldiag.execution.worker import threads
from fldiag.results import files
from fldiag.results.machine import machine
from fldiag.results.provenance import provenance
from fldiag.runs import prune
from fldiag.runs.run import Run
from fldiag.training import rounds
from fldiag_papers import questions
from fldiag_papers.plan import Key, Task, answers, open_run
from fldiag_papers.scales import Scale
from fldiag_papers.study import Ask

#: A run's task, and how many of its rounds are done.
OnRound = Callable[[Task, int], None]
#: A run to train or question: its task and its folder.
Job = tuple[Task, Path]


@dataclass
class Outcome:
    """``error``: why the run or an answer is missing; ``notes``: stored answers that were damaged."""

    task: Task
    path: Path
    error: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """What all runs share. ``is_strict``: errors are raised, to look for their cause; ``executor``: where the clients of a run
    are trained and its diagnostics computed."""

    scale: Scale
    device: str = "cpu"
    download: bool = False
    is_strict: bool = False
    executor: Any = "serial"


def perform(bench: Bench, job: Job, on_round: OnRound | None = None) -> Outcome:
    """Train the run if need be, answer what has no answer yet, and drop the weights that no study wants."""
    task, path = job
    outcome = Outcome(task, path)
    try:
        with threads(1):  # the same bits however many run at a time
            run = open_run(path)
            if run is None or not run.is_record:
                run = _train(task, path, bench, on_round)
            errors = [
                _answer(task, run, key, ask, bench, outcome.notes) for key, ask in task.asks.items()
            ]
            outcome.error = "; ".join(filter(None, errors))
            if not outcome.error and "thinned" not in run.index:
                prune.thin(run, task.rounds, state=not task.has_state)
    except Exception as error:  # one run that fails does not stop the others
        if bench.is_strict:
            raise
        outcome.error = error.what if isinstance(error, FldiagError) else error_text(error)
    return outcome


def perform_all(
    jobs: Sequence[Job], bench: Bench, executor: Any, on_round: OnRound
) -> Generator[Outcome, None, None]:
    """The outcomes as they come: of several runs at a time where ``executor`` says; of a single one the clients.

    Raises FldiagError when a worker dies again and again."""
    choice = parse_executor(executor)
    if choice.kind != "serial" and len(jobs) > 1:
        with open_pool(executor, perform, bench, threads=1, name=_name, most=len(jobs)) as pool:
            for _, outcome in pool.completed(jobs):
                yield outcome
        return
    has_workers = choice.kind == "processes" and (choice.workers_here(threads=1) or 1) > 1
    if has_workers and bench.device == "cpu":
        bench = replace(bench, executor=choice)
    for job in jobs:
        yield perform(bench, job, on_round)


def _name(job: Job) -> str:
    return job[0].text


def _train(task: Task, path: Path, bench: Bench, on_round: OnRound | None) -> Run:
    """The run; of one that is timed the seconds of every round are written, of one thread's work."""
    file = path / questions.CLOCK
    clock: list[float] = json.loads(file.read_text("utf-8"))["seconds"] if file.is_file() else []
    # Whatever else the machine is doing.
    now = time.process_time if bench.device == "cpu" else time.perf_counter
    last = now()

    def on_event(event: dict[str, Any]) -> None:
        nonlocal last
        if event["event"] != "round":
            return
        if task.is_timed:
            # Rounds that were not stored when it was stopped are trained again.
            del clock[event["round"] - 1 :]
            clock.append(now() - last)
            last = now()
            content = {"machine": machine(), "seconds": clock, "round": event["round"]}
            files.write_bytes(file, json.dumps(content).encode())
        if on_round:
            on_round(task, event["round"])

    return rounds.train(
        task.config,
        out=path,
        resume=True,
        on_event=on_event,
        device=bench.device,
        download=bench.download,
        executor="serial" if task.is_timed else bench.executor,
    )


def _answer(task: Task, run: Run, key: Key, ask: Ask, bench: Bench, notes: list[str]) -> str:
    """Answer one question, unless it is answered. Returns what was wrong."""
    cache = answers(run.path)
    if cache.get(*key, notes.append) is not None:
        return ""
    rounds = tuple(r for r in task.rounds if r in set(run.rounds))
    subject = questions.Subject(
        task.config,
        run,
        rounds,
        device=bench.device,
        download=bench.download,
        executor=bench.executor,
    )
    options = bench.scale.options(ask)
    try:
        table = questions.answer(subject, ask.name, options)
    except FldiagError as error:
        return f"{ask.name}: {error.what}"
    about = {"run": run.path.name, "question": ask.name, "options": options}
    cache.put(*key, table, {**provenance(), **about})
    return ""
