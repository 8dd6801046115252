"""The round loop: sample, train cohorts, aggregate, evaluate, store."""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from functools import cached_property
from pathlib import Path
from typing import Any

from fldiag.config import Config
from fldiag.config_files import kept_initial
from fldiag.device import full_precision
from fldiag.errors import FldiagError
from fldiag.execution import Pool, Workspace, check_executor, open_pool
from fldiag.registry import Progress
from fldiag.results.progress import progress_bar, shell
from fldiag.results.table import PERSONAL
from fldiag.runs import base, journal, owner
from fldiag.runs.client_states import HELD
from fldiag.runs.owner import Owner
from fldiag.runs.run import Run
from fldiag.training.client import CohortResult
from fldiag.training.evaluate import evaluate
from fldiag.training.personalise import GlobalModel, measure, personal_plan
from fldiag.training.record import step_rows
from fldiag.training.resume import (
    check_same_config,
    check_same_data,
    check_weights,
    extend,
)
from fldiag.training.server import Federation
from fldiag.training.setup import Cohort, Setup, provenance
from fldiag.training.storing import (
    Segment,
    describe_clients,
    partition_bytes,
    round_rows,
    store,
    unsampled_clients,
)

RUNS = Path("checkpoints")
#: A test loss so many times that of guessing is no trained model's, however far its clients overfit.
FAR = 10.0
#: So many times suffice when the accuracy is that of guessing, too.
SOME, CHANCE = 2.0, 1.5
Listener = Callable[[dict[str, Any]], None]


@full_precision()
def train(
    config: Config,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    executor: str | Executor = "serial",
    device: str = "auto",
    download: bool = False,
    setup: Setup | None = None,
    allow_code: str | Iterable[str] = (),
    on_event: Listener | None = None,
) -> Run:
    """Train a config and return its run.

    Args:
        config: what to train; ``Config.load("digits")`` is a start.
        out: the run's folder; by default ``checkpoints/NAME-METHOD-sSEED-HASH``.
        resume: continue a run that was stopped, or that is finished and is to have more rounds; on the same machine its weights
            are bit-for-bit those of a run that was not stopped, or had all the rounds from the start.
        executor: ``serial``, ``processes[:N]``, ``dask[:ADDRESS]``, or any executor of ``concurrent.futures``.
        device: auto (CUDA if it is usable, else the CPU), cpu, cuda, cuda:N or mps.
        download: fetch a missing public data set.
        setup: replaces what the config would build (own data, partition, module or schedule).
        allow_code: user code (``pkg.mod:name``, one or several) that may be imported although the config comes from a stored run.
        on_event: gets a dict at the start, after every round, and at the end; in a notebook, a bar by default.

    Returns:
        The run. One whose weights become NaN or infinite has status ``diverged``, and the rounds before are kept.

    Raises:
        FldiagError: a wrong config, a folder in use, or a full disk.

    >>> import tempfile, fldiag
    >>> config = fldiag.Config.load("digits", rounds=1, clients__per_round=2, train__epochs=1)
    >>> run = fldiag.train(config, out=tempfile.mkdtemp() + "/run")
    >>> run.status, run.done
    ('finished', 1)
    """
    if not isinstance(config, Config):
        raise FldiagError(
            f"config is a {type(config).__name__}",
            "give a Config, such as Config.load('digits')",
            usage=True,
        )
    config = config.allow(allow_code)
    check_executor(executor)
    path = Path(out) if out is not None else run_path(config)
    if os.path.exists(path / "run.json"):
        if not resume:
            raise _occupied(path)
        run = Run.open(path)
        check_same_config(run, config)
        if run.status == "diverged" or (
            run.status == "finished" and run.config.rounds == config.rounds
        ):
            if os.path.exists(path / owner.LOCK):  # it was killed at the very end
                with owner.hold(path):
                    _end(run)
            return run
    is_custom = setup is not None
    setup = setup or Setup(config, device=device, download=download)
    federation = Federation(setup)
    personal_plan(setup)  # refuses now, rather than after the last round, what cannot be done then
    shared = WorkerSetup(setup, device, is_custom)
    with (
        owner.hold(path) as ownership,
        open_pool(executor, work, shared) as pool,
        _listener(on_event, config.method.name) as emit,
    ):
        run = _open(path, config, setup, federation, resume)
        emit(
            {
                "event": "start",
                "round": run.done,
                "rounds": config.rounds,
                "path": str(path),
                "notes": [*setup.remarks, describe_clients(config, setup.model_bytes)],
            }
        )
        try:
            _loop(config, run, federation, ownership, pool, emit)
            if run.status == "running":
                pool.close()
                _personalise(run, federation, executor, emit)
        except KeyboardInterrupt:
            run = Run.open(path)  # what is in memory may name files that were still being written
            if run.status == "running":
                run.index["status"] = "interrupted"
                run.commit()
            raise
    emit({"event": "end", "status": run.status, "round": run.done, "path": str(path)})
    return run


@contextlib.contextmanager
def _listener(on_event: Listener | None, title: str) -> Iterator[Listener]:
    """``on_event``; without one a bar in a notebook, and nothing elsewhere."""
    if on_event is None and shell() is not None:
        with progress_bar(title) as progress:
            yield rounds_on_bar(progress)
    else:
        yield on_event or (lambda event: None)


def rounds_on_bar(progress: Progress) -> Listener:
    """Shows the events of a run on a progress bar."""

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "start":
            progress(event["round"], event["rounds"], f"round {event['round'] + 1}")
        elif event["event"] == "round":
            score = (
                f"accuracy {event['accuracy']:.4f}"
                if "accuracy" in event
                else f"loss {event['loss']:.4g}"
            )
            progress(event["round"], event["rounds"], f"round {event['round']}, {score}")
        elif event["event"] == "personalise":
            progress(event["done"], event["total"], "clients' own models")

    return show


def run_path(config: Config) -> Path:
    """Where a run goes by default: named by what it is."""
    method = config.method.name.rpartition(":")[2]  # of pkg.mod:function the function
    return RUNS / f"{config.name}-{method}-s{config.seed}-{config.hash[:8]}"


def _occupied(path: Path) -> FldiagError:
    return FldiagError(
        f"{path} already holds a run",
        "continue it with --resume, replace it with --overwrite, or choose another "
        "folder with --out",
        usage=True,
    )


def _open(path: Path, config: Config, setup: Setup, federation: Federation, resume: bool) -> Run:
    """The run in a folder that this process owns, and the federation as it was left: new, or as far as it got."""
    if not os.path.exists(path / "run.json"):
        return _create(path, config, setup, federation)
    if not resume:
        raise _occupied(path)
    run = Run.open(path)  # again: somebody may have trained it meanwhile
    is_unfinished = (path / journal.NAME).is_file()
    check_weights(run)
    check_same_config(run, config)
    check_same_data(run, setup)
    run.clean()
    section = config.checkpoint.model_dump(mode="json")
    if run.index["config"]["checkpoint"] != section:
        # From the next round on; ``segments`` tells what the rounds before kept.
        run.index["config"]["checkpoint"], run.index["hash"] = section, config.hash
    if run.config.rounds != config.rounds:
        extend(run, config)
        run.commit()
    _keep_initial(run, config)
    if not run.done:
        federation.clients = run.states
    elif not federation.restore(run, must=not is_unfinished):
        warnings.warn(
            f"{path}: the end of its journal is lost, and the state of server and clients after round {run.done} is no "
            f"longer there; training with {config.method.name} needs it, so it starts again from the beginning",
            stacklevel=2,
        )
        run = _create(path, config, setup, federation)
        run.clean()
    return run


def _create(path: Path, config: Config, setup: Setup, federation: Federation) -> Run:
    run = Run.create(path, config, partition_bytes(setup.parts), provenance(setup))
    if (words := setup.dataset.words) is not None:
        run.put("tokenizer.json", lambda file: file.write(words.spec.encode()))
    _keep_initial(run, config)
    base.keep(run, setup.module)
    federation.clients = run.states
    return run


def _keep_initial(run: Run, config: Config) -> None:
    """Copy the weights that training starts from into the run, unless they are there."""
    source = config.train.initial
    if source is not None and kept_initial(source) not in run.index["files"]:
        content = Path(source).read_bytes()
        run.put(kept_initial(source), lambda file: file.write(content))


def _loop(
    config: Config, run: Run, federation: Federation, ownership: Owner, pool: Pool, emit: Listener
) -> None:
    run.index["status"] = "running"
    setup, segment = federation.setup, Segment(run)
    plan = personal_plan(setup)
    while federation.t < config.rounds:
        former = federation.w, federation.buffers
        start, received, t = time.perf_counter(), federation.sent(), federation.t + 1
        is_stored = t % config.checkpoint.every == 0 or t == config.rounds
        unsampled: list[CohortResult] = []
        if is_stored and (ids := unsampled_clients(federation)):
            unsampled.append(federation.train(ids, pool.map))
        round, result = federation.round(pool.map)
        ownership.confirm()
        if result.notes is not None:
            run.put_steps(t, step_rows(t, result.notes, **run.common))
        if not federation.finite:
            run.add_metrics(
                [
                    {
                        "round": t,
                        "moment": "aggregated",
                        "scope": "global",
                        "metric": "diverged",
                        "value": 1.0,
                    }
                ]
            )
            run.index["status"] = "diverged"
            if t > 1 and t - 1 not in run.rounds:  # the last finite state is worth keeping
                federation.t, federation.w, federation.buffers = t - 1, *former
                store(run, federation, [], received)
                run.index["done"] = t - 1
            segment.note(federation.t)
            return _end(run)
        run.put_clients(HELD)
        scores = evaluate(setup.network, setup.dataset, federation.w, federation.buffers)
        run.add_metrics(round_rows(t, scores, round, result, isolated=setup.method.isolated))
        if is_stored:
            run.index["done"] = t
            store(run, federation, [result, *unsampled], received)
            segment.note(t)
            if t == config.rounds and plan is None:
                run.index["status"] = "finished"
                _end(run)
            else:
                run.append()
        emit(
            {
                "event": "round",
                "round": t,
                "rounds": config.rounds,
                "seconds": time.perf_counter() - start,
                **scores,
            }
        )


def _personalise(
    run: Run, federation: Federation, executor: str | Executor, emit: Listener
) -> None:
    """What the method does after the last round, which is stored by now: a run stopped meanwhile goes on from it."""
    plan = personal_plan(federation.setup)
    if plan is not None:
        run.drop_metrics(lambda row: str(row["metric"]).startswith(PERSONAL))
        model = GlobalModel(federation.w, federation.buffers, federation.clients, run.done)
        with Workspace(
            executor,
            lambda done, total, text: emit({"event": "personalise", "done": done, "total": total}),
        ):
            rows = measure(federation.setup, plan, model)
        run.add_metrics(rows)
    run.index["status"] = "finished"
    _end(run)


def _end(run: Run) -> None:
    """No round is to come: run.json whole, nothing else."""
    run.commit()
    run.clean()


def failure(run: Run) -> str | None:
    """Why a run that ended failed, in a sentence: weights that are not finite, or a test loss far above that of guessing, ln C
    for C classes, which is about where training starts. None when it did not."""
    frame = run.metrics
    last = int(frame["round"].max())
    if run.status == "diverged":
        return f"diverged: the global weights are no longer finite after round {last}"
    test = frame[
        (frame["slice"] == "test") & (frame["round"] == last) & (frame["scope"] == "global")
    ]
    scores = {str(m): float(v) for m, v in zip(test["metric"], test["value"], strict=True)}
    if "loss" not in scores or "accuracy" not in scores:  # regression, or no common model
        return None
    classes = int(run.checkpoint().manifest["classes"])
    loss, guess = scores["loss"], math.log(max(classes, 2))
    is_guess = scores["accuracy"] <= CHANCE / classes
    if loss > FAR * guess or (is_guess and loss > SOME * guess):
        return f"diverged: the test loss is {loss:.4g} after round {last}, and guessing gives {guess:.2f}"
    return None


# -- what a worker does


class WorkerSetup:
    """A setup for workers: each builds it from the config; a custom one (the caller's data, module) is sent as it is."""

    def __init__(self, setup: Setup, device: str, is_custom: bool):
        self.config, self.device, self.is_custom = setup.config, device, is_custom
        self.setup = setup

    @cached_property
    def setup(self) -> Setup:
        return Setup(self.config, device=self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if self.is_custom or k != "setup"}


def work(shared: WorkerSetup, unit: Cohort) -> CohortResult:
    return shared.setup.train(unit)
