"""The round loop: sample, train cohorts, aggregate, evaluate, store."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from fldiag.checkpoint import base, journal, owner
from fldiag.checkpoint.client_states import HELD
from fldiag.checkpoint.owner import Owner
from fldiag.checkpoint.run import Run
from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.execution.executor import ExecutorSpec, parse_executor
from fldiag.execution.pools import Pool, open_pool
from fldiag.results.table import PERSONAL
from fldiag.training import held, worker
from fldiag.training.evaluate import evaluate, sums, units
from fldiag.training.federation import Federation
from fldiag.training.personalise import measure, planned
from fldiag.training.resume import elsewhere, extend, same_data, same_run, with_weights
from fldiag.training.rows import round_rows, step_rows
from fldiag.training.setup import Setup, provenance
from fldiag.training.storing import Segment, partition_bytes, store, unsampled

RUNS = Path("checkpoints")
Event = Callable[[dict[str, Any]], None]


def run_path(config: Config) -> Path:
    """Where a run goes unless told otherwise: named by what it is. A run that is there under the name that fldiag 0.1.0
    gave it (what the checkpoints hold was part of it) stays there."""
    stem = f"{config.name}-{config.method.name}-s{config.seed}"
    path, before = (
        RUNS / f"{stem}-{digits[:8]}"
        for digits in (config.hash, config.fingerprint(checkpoint=True))
    )
    return before if (before / "run.json").is_file() and not path.exists() else path


def train(
    config: Config,
    *,
    out: str | Path | None = None,
    executor: str | Executor = "serial",
    on_event: Event | None = None,
    resume: bool = False,
    device: str = "auto",
    download: bool = False,
    setup: Setup | None = None,
) -> Run:
    """Train ``config`` and return its run.

    ``out``: run folder (default ``checkpoints/NAME-METHOD-sSEED-HASH``). ``executor``: ``serial``,
    ``processes[:N]``, ``dask[:ADDRESS]`` or a ``concurrent.futures.Executor``. ``on_event`` gets a dict after every round.
    ``resume`` continues a run that was stopped, or that is finished and is to have more rounds; on the same machine the result is
    bitwise that of a run that was not stopped, or had all the rounds from the start. ``setup`` replaces what the config would
    build (own data, partition, module or schedule).

    A run whose weights become NaN or infinite ends with status ``diverged``: that is an outcome, and the
    rounds before it are kept. Raises FldiagError for wrong configs, folders in use and disks that are full.
    """
    choice = parse_executor(executor)
    path = Path(out) if out is not None else run_path(config)
    if os.path.exists(path / "run.json"):
        if not resume:
            raise _there(path)
        run = Run.open(path)
        same_run(run, config)
        if run.status == "diverged" or (
            run.status == "finished" and run.config.rounds == config.rounds
        ):
            if os.path.exists(path / owner.LOCK):  # it was killed at the very end
                with owner.hold(path):
                    _end(run)
            return run
    elif resume and out is None and (other := elsewhere(path, config)) is not None:
        raise FldiagError(
            f"{path} does not exist, but {other.path} is the same run with {other.config.rounds} rounds",
            f"continue that run: --out {other.path}; or leave out --resume to start a new one",
            usage=True,
        )
    given = setup is not None
    setup = setup or Setup(config, device=device, download=download)
    federation = Federation(setup)
    planned(setup)  # what cannot be personalised is refused now rather than after the last round
    emit = on_event or (lambda event: None)
    trainer = worker.Trainer(setup, config, device, given)
    with (
        owner.hold(path) as mine,
        open_pool(choice, worker.work, trainer, name=worker.name) as pool,
    ):
        run = _opened(path, config, setup, federation, resume)
        emit(
            {
                "event": "start",
                "round": run.done,
                "rounds": config.rounds,
                "path": str(path),
                "notes": [*setup.remarks, held.described(config, setup.model_bytes)],
            }
        )
        try:
            _loop(config, run, federation, mine, pool, emit)
            if run.status == "running":
                pool.close()
                _personalise(run, federation, choice, emit)
        except KeyboardInterrupt:
            run = Run.open(path)  # what is in memory may name files that were still being written
            if run.status == "running":
                run.index["status"] = "interrupted"
                run.commit()
            raise
    emit({"event": "end", "status": run.status, "round": run.done, "path": str(path)})
    return run


def _there(path: Path) -> FldiagError:
    return FldiagError(
        f"{path} already holds a run",
        "continue it with --resume, replace it with --overwrite, or choose another "
        "folder with --out",
        usage=True,
    )


def _opened(path: Path, config: Config, setup: Setup, federation: Federation, resume: bool) -> Run:
    """The run in a folder that this process owns, and the federation as it was left: new, or as far as it got."""
    if not os.path.exists(path / "run.json"):
        return _new(path, config, setup, federation)
    if not resume:
        raise _there(path)
    run = Run.open(path)  # again: somebody may have trained it meanwhile
    unfinished = (path / journal.NAME).is_file()
    with_weights(run)
    same_run(run, config)
    same_data(run, setup)
    run.clean()
    keep = config.checkpoint.model_dump(mode="json")
    if (
        run.index["config"]["checkpoint"] != keep
    ):  # from here on; ``segments`` tells what the rounds before kept
        run.index["config"]["checkpoint"], run.index["hash"] = keep, config.hash
    if run.config.rounds != config.rounds:
        extend(run, config)
        run.commit()
    if not run.done:
        federation.clients = run.states
    elif not federation.restore(run, must=not unfinished):
        warnings.warn(
            f"{path}: the end of its journal is lost, and the state of server and clients after round {run.done} is no "
            f"longer there; training with {config.method.name} needs it, so it starts again from the beginning",
            stacklevel=2,
        )
        run = _new(path, config, setup, federation)
        run.clean()
    return run


def _new(path: Path, config: Config, setup: Setup, federation: Federation) -> Run:
    run = Run.create(path, config, partition_bytes(setup.parts), provenance(setup))
    if (words := setup.dataset.words) is not None:
        run.put("tokenizer.json", lambda file: file.write(words.spec.encode()))
    base.keep(run, setup.module)
    federation.clients = run.states
    return run


def _loop(
    config: Config, run: Run, federation: Federation, mine: Owner, pool: Pool, emit: Event
) -> None:
    run.index["status"], plan = "running", planned(federation.setup)
    segment = Segment(run)
    while federation.t < config.rounds:
        before = federation.w, federation.buffers
        began, received, t = time.perf_counter(), federation.sent(), federation.t + 1
        stored = (
            config.checkpoint.keep > 0 or t % config.checkpoint.every == 0 or t == config.rounds
        )
        recorded = (
            federation.train(ids, pool.map) if stored and (ids := unsampled(federation)) else None
        )
        seen, trained = federation.round(pool.map)
        mine.confirm()
        if trained.notes is not None:
            run.put_steps(t, step_rows(t, trained.notes, **run.common))
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
                federation.t, federation.w, federation.buffers = t - 1, *before
                store(run, federation, [replace(trained, ids=[])], received)
                run.index["done"] = t - 1
            segment.note(federation.t)
            return _end(run)
        run.put_clients(HELD)
        scores = _tested(federation, pool)
        run.add_metrics(
            round_rows(t, scores, seen, trained, isolated=federation.setup.method.isolated)
        )
        if stored:
            run.index["done"] = t
            store(run, federation, [trained, *([recorded] if recorded else [])], received)
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
                "seconds": time.perf_counter() - began,
                **scores,
            }
        )


def _tested(federation: Federation, pool: Pool) -> dict[str, float]:
    """The global model on the test set, by the workers where it is large enough for several of them."""
    setup = federation.setup
    parts = units(federation.t, federation.w, federation.buffers, setup.dataset)
    if len(parts) > 1:
        return evaluate(pool.map(parts), setup.dataset)
    return evaluate(
        (sums(setup.network, part, setup.dataset, setup.device) for part in parts), setup.dataset
    )


def _personalise(run: Run, federation: Federation, choice: ExecutorSpec, emit: Event) -> None:
    """What the method does after the last round, which is stored by now: a run stopped here goes on here."""
    plan = planned(federation.setup)
    if plan is not None:
        run.drop_metrics(lambda row: str(row["metric"]).startswith(PERSONAL))
        rows = measure(
            federation.setup,
            plan,
            federation.w,
            federation.buffers,
            federation.clients,
            run.done,
            executor=choice,
            progress=lambda done, total, text: emit(
                {"event": "personalise", "done": done, "total": total}
            ),
        )
        run.add_metrics(rows)
    run.index["status"] = "finished"
    _end(run)


def _end(run: Run) -> None:
    """No round is to come: run.json whole, nothing else."""
    run.commit()
    run.clean()
