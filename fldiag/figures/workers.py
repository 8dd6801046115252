"""Train and question one run, here or in several processes; what is done is kept, and never done twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fldiag.checkpoint import prune
from fldiag.checkpoint.run import Run
from fldiag.errors import FldiagError
from fldiag.figures import questions
from fldiag.figures.plan import Task, answers
from fldiag.figures.scales import Scale
from fldiag.results import files
from fldiag.results.machine import machine
from fldiag.training import rounds

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


def perform(task: Task, bench: Bench, tell: Tell) -> Outcome:
    """Train the run if need be, answer what has no answer yet, and drop the weights that no study wants."""
    path = task.where(bench.store)
    outcome = Outcome(task.core, path)
    try:
        with one_thread():
            run = _train(task, path, bench, tell)
            errors = [e for key, ask in task.asks.items() if (e := _answer(task, run, key, ask, bench, tell, outcome.notes))]
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
        outcome.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return outcome


def _train(task: Task, path: Path, bench: Bench, tell: Tell) -> Run:
    file = path / questions.CLOCK
    clock: list[float] = json.loads(file.read_text())["seconds"] if file.is_file() else []

    now = time.process_time if bench.device == "cpu" else time.perf_counter  # whatever else the machine is doing
    last = now()

    def on_event(event: dict[str, Any]) -> None:
        nonlocal last
        if event["event"] == "round":
            clock.append(now() - last)
            last = now()
            text = json.dumps({"machine": machine(), "seconds": clock})
            files.write_atomic(file, lambda f: f.write(text.encode()))
            tell(task.core, event["round"], event["rounds"], f"{task.text}: round {event['round']}")

    return rounds.train(task.config, out=path, resume=True, on_event=on_event, device=bench.device, download=bench.download)


def _answer(task: Task, run: Run, key: str, ask: Any, bench: Bench, tell: Tell, notes: list[str]) -> str:
    """Answer one question, unless it was. Returns what was wrong."""
    kept = answers(run.path)
    said: list[str] = []
    if kept.get(key, said.append) is not None:
        return ""
    notes += said

    def progress(done: int, total: int, what: str) -> None:
        tell(task.core, task.config.rounds, task.config.rounds, f"{task.text}: {ask.name}")

    there = set(run.rounds)
    subject = questions.Subject(task.config, run, tuple(r for r in task.rounds if r in there), device=bench.device,
                           download=bench.download, progress=progress)
    try:
        found = questions.answer(subject, ask.name, bench.scale.options(ask))
    except FldiagError as error:
        return f"{ask.name}: {error.what}"
    kept.put(key, questions.finite(found), {"run": run.path.name, "question": ask.name, "options": bench.scale.options(ask)})
    return ""


def thin(run: Run, task: Task) -> None:
    """Remove the checkpoints and client states that no study wants."""
    if run.status in ("finished", "diverged") and "thinned" not in run.index:
        prune.thin(run, task.rounds, state=not task.state)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread a run: the same bits however many run at a time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- several at a time

_shared: dict[str, Any] = {}


def _start(stop: Any, queue: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process says when to stop, through ``stop``, or by dying
    torch.set_num_threads(1)
    _shared.update(stop=stop, queue=queue)
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()


def _leave_with(parent: int) -> None:
    """A worker whose main process was killed would wait for tasks for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _remote(task: Task, bench: Bench) -> Outcome:
    def tell(*event: Any) -> None:
        if _shared["stop"].is_set():
            raise KeyboardInterrupt
        _shared["queue"].put(event)

    return perform(task, bench, tell)


def _listen(queue: Any, latest: dict[str, Any], over: threading.Event) -> None:
    """Keep each task's last event: workers wait while the queue is full, as it would be while the main thread is drawing."""
    while not over.is_set():
        if queue.empty():
            time.sleep(0.02)
        else:
            event = queue.get()
            latest[event[0]] = event


def perform_all(tasks: list[Task], bench: Bench, jobs: int, tell: Tell, finished: Callable[[Outcome], None]) -> None:
    """All tasks, ``jobs`` at a time. ``finished`` is told of each. On Ctrl-C the rounds that were stored are kept.

    Raises KeyboardInterrupt, and FldiagError when a worker process dies."""
    if jobs == 1 or len(tasks) <= 1:
        for task in tasks:
            outcome = perform(task, bench, tell)
            finished(outcome)
            if outcome.stopped:
                raise KeyboardInterrupt
        return
    context = multiprocessing.get_context("spawn")
    stop, queue = context.Event(), context.SimpleQueue()
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_start, initargs=(stop, queue))
    waiting: set[Future[Outcome]] = {pool.submit(_remote, task, bench) for task in tasks}
    latest: dict[str, Any] = {}
    over = threading.Event()
    threading.Thread(target=_listen, args=(queue, latest, over), daemon=True).start()
    try:
        while waiting:
            done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            while latest:
                tell(*latest.popitem()[1])
            for future in done:
                finished(future.result())
    except BrokenProcessPool:
        raise FldiagError("a worker process died (out of memory?)", "use fewer --jobs; what was finished is kept, the same "
                          "command goes on from there") from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
        over.set()
