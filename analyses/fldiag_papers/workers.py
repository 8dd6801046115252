"""Train and question one run, here or in several processes; what is done is kept, and never done twice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fldiag.errors import FldiagError, error_text
from fldiag.execution.executor import parse_executor
from fldiag.execution.pools import open_pool
from fldiag.execution.worker import threads
from fldiag.results import files
from fldiag.results.machine import machine
from fldiag.runs import prune
from fldiag.runs.run import Run
from fldiag.training import rounds
from fldiag_papers import questions
from fldiag_papers.plan import Task, answers
from fldiag_papers.scales import Scale

Tell = Callable[[str, int, int, str], None]  # task, done, total, what


@dataclass
class Outcome:
    """``error``: why a run or an answer is missing; ``stopped``: Ctrl-C; ``notes``: kept answers that were damaged."""

    core: str
    path: Path
    error: str = ""
    stopped: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """What all tasks share."""

    scale: Scale
    store: Path
    device: str = "cpu"
    download: bool = False
    strict: bool = False  # errors are raised, to look for their cause
    executor: Any = "serial"  # where the clients of a task are trained and its diagnostics computed


def perform(task: Task, bench: Bench, tell: Tell) -> Outcome:
    """Train the run if need be, answer what has no answer yet, and drop the weights that no study wants."""
    path = task.folder(bench.store)
    outcome = Outcome(task.core, path)
    try:
        with threads(1):  # the same bits however many run at a time
            run = Run.open(path) if task.is_record(path) else _train(task, path, bench, tell)
            errors = [
                e
                for key, ask in task.asks.items()
                if (e := _answer(task, run, key, ask, bench, tell, outcome.notes))
            ]
            outcome.error = "; ".join(errors)
            if not errors:
                thin(run, task)
    except KeyboardInterrupt:
        outcome.stopped = True
    except FldiagError as error:
        if bench.strict:
            raise
        outcome.error = error.what
    except Exception as error:  # one run that fails does not stop the others
        if bench.strict:
            raise
        outcome.error = error_text(error)
    return outcome


def _train(task: Task, path: Path, bench: Bench, tell: Tell) -> Run:
    is_timed = task.timed or parse_executor(bench.executor).kind == "serial"
    file = path / questions.CLOCK
    if not is_timed:  # what this process does in a round is not what the round takes
        file.unlink(missing_ok=True)
    clock: list[float] = json.loads(file.read_text("utf-8"))["seconds"] if file.is_file() else []

    now = (
        time.process_time if bench.device == "cpu" else time.perf_counter
    )  # whatever else the machine is doing
    last = now()

    def on_event(event: dict[str, Any]) -> None:
        nonlocal last
        if event["event"] == "round":
            if is_timed:
                del clock[
                    event["round"] - 1 :
                ]  # of rounds that were not stored when it was stopped, and are trained again
                clock.append(now() - last)
                last = now()
                text = json.dumps({"machine": machine(), "seconds": clock, "round": event["round"]})
                files.write_atomic(file, lambda f: f.write(text.encode()))
            tell(task.core, event["round"], event["rounds"], f"{task.text}: round {event['round']}")

    return rounds.train(
        task.config,
        out=path,
        resume=True,
        on_event=on_event,
        device=bench.device,
        download=bench.download,
        executor="serial" if is_timed else bench.executor,
    )


def _answer(
    task: Task, run: Run, key: str, ask: Any, bench: Bench, tell: Tell, notes: list[str]
) -> str:
    """Answer one question, unless it was. Returns what was wrong."""
    stored_answers = answers(run.path)
    damage: list[str] = []
    if stored_answers.get(key, damage.append) is not None:
        return ""
    notes += damage

    def progress(done: int, total: int, text: str) -> None:
        tell(task.core, task.config.rounds, task.config.rounds, f"{task.text}: {ask.name}")

    rounds = set(run.rounds)
    subject = questions.Subject(
        task.config,
        run,
        tuple(r for r in task.rounds if r in rounds),
        device=bench.device,
        download=bench.download,
        progress=progress,
        executor=bench.executor,
    )
    try:
        table = questions.answer(subject, ask.name, bench.scale.options(ask))
    except FldiagError as error:
        return f"{ask.name}: {error.what}"
    stored_answers.save(
        key,
        questions.finite(table),
        {"run": run.path.name, "question": ask.name, "options": bench.scale.options(ask)},
    )
    return ""


def thin(run: Run, task: Task) -> None:
    """Remove the checkpoints and client states that no study wants."""
    if run.status in ("finished", "diverged") and "thinned" not in run.index:
        prune.thin(run, task.rounds, state=not task.state)


# ---- several at a time


def _elsewhere(bench: Bench, task: Task) -> Outcome:
    return perform(task, bench, lambda *event: None)


def _name(task: Task) -> str:
    return task.text


class Clocks:
    """Progress of runs that train elsewhere, as they write it beside their checkpoints."""

    def __init__(self, tasks: list[Task], bench: Bench, tell: Tell):
        self.tell = tell
        self.tasks = [(task, task.folder(bench.store) / questions.CLOCK) for task in tasks]
        self.modified: dict[Path, float] = {}
        self.looked = 0.0

    def look(self) -> None:
        if (
            time.monotonic() - self.looked < 1
        ):  # a paper's figures are hundreds of files, perhaps on another machine
            return
        self.looked = time.monotonic()
        for task, file in self.tasks:
            with suppress(OSError, ValueError, KeyError):  # not there yet, or gone again
                changed = file.stat().st_mtime
                if changed != self.modified.get(file):
                    self.modified[file], done = (
                        changed,
                        json.loads(file.read_text("utf-8"))["round"],
                    )
                    self.tell(task.core, done, task.config.rounds, f"{task.text}: round {done}")


def perform_all(
    tasks: list[Task], bench: Bench, executor: Any, tell: Tell, finished: Callable[[Outcome], None]
) -> None:
    """All tasks, where ``executor`` says; the parts of a single one, if that is processes. ``finished`` is told of each.
    On Ctrl-C the rounds that were stored are kept.

    Raises KeyboardInterrupt, and FldiagError when a worker dies again and again."""
    choice = parse_executor(executor)
    if choice.kind == "serial" or len(tasks) <= 1:
        if (
            choice.kind == "processes"
            and bench.device == "cpu"
            and (choice.workers_here(threads=1) or 1) > 1
        ):
            bench = replace(bench, executor=choice)
        for task in tasks:
            outcome = perform(task, bench, tell)
            finished(outcome)
            if outcome.stopped:
                raise KeyboardInterrupt
        return
    clocks = Clocks(tasks, bench, tell)
    with open_pool(executor, _elsewhere, bench, threads=1, name=_name, most=len(tasks)) as pool:
        for _, outcome in pool.completed(tasks, clocks.look):
            finished(outcome)
