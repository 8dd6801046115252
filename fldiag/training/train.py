"""The round loop: sample, train cohorts, aggregate, evaluate, store; and how a stored run goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from fldiag.config import Config
from fldiag.data import partition
from fldiag.device import full_precision
from fldiag.errors import FldiagError
from fldiag.execution import Pool, Workspace, open_pool
from fldiag.method import Round
from fldiag.registry import Progress
from fldiag.results import files
from fldiag.results.table import Row, notebook_bar
from fldiag.runs.open_problem import keep_base
from fldiag.runs.run import ABOUT, Run, lock
from fldiag.training.client import CohortResult
from fldiag.training.personalise import fine_tune
from fldiag.training.record import score_rows, step_rows
from fldiag.training.server import Federation, merge
from fldiag.training.setup import Cohort, Setup, kept_initial, provenance

RUNS = Path("checkpoints")
#: With ``checkpoint.clients = "auto"`` every stored round holds its clients while all together have fewer bytes than this.
SMALL = 100_000_000
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
        what = f"config is a {type(config).__name__}"
        raise FldiagError(what, "give a Config, such as Config.load('digits')", usage=True)
    path = Path(out or run_path(config))
    if resume and os.path.exists(path / ABOUT):
        run = Run.open(path)
        stored = run.about["config"], run.about["provenance"].get("method_version")
        now = config.model_dump(mode="json"), config.method_version
        if run.status != "unfinished" and stored == now:
            return run
    worker_device = device if setup is None else None
    setup = setup or Setup(config, device=device, download=download)
    federation, shared = Federation(setup), WorkerSetup(setup, worker_device)
    with (
        lock(path),
        open_pool(executor, work, shared) as pool,
        notebook_bar(config.method.name, on_event and (lambda *_: None)) as progress,
    ):
        emit = on_event or rounds_on_bar(progress)
        run = _open(path, setup, resume)
        federation.restore(run)
        about = {"rounds": config.rounds, "path": str(path)}
        emit({"event": "start", "round": run.done, **about})
        _loop(run, federation, pool, emit)
        if run.status == "unfinished":
            pool.close()
            plan, rows = setup.method.personal, []
            if plan is not None and not setup.dataset.regression:
                with Workspace(executor):
                    rows = fine_tune(federation, plan)
            run.append(run.done, rows, status="finished")
    emit({"event": "end", "round": run.done, **about, "status": run.status})
    return run


def rounds_on_bar(progress: Progress) -> Listener:
    """Shows the events of a run on a progress bar."""

    def show(event: dict[str, Any]) -> None:
        scores = [f"{k} {event[k]:.4g}" for k in ("accuracy", "loss") if k in event]
        progress(event["round"], event["rounds"], ", ".join(scores))

    return show


def run_path(config: Config) -> Path:
    """Where a run goes by default: named by what it is."""
    method = config.method.name.rpartition(":")[2]  # of pkg.mod:function the function
    return RUNS / f"{config.name}-{method}-s{config.seed}-{config.hash[:8]}"


# A run that goes on


def _open(path: Path, setup: Setup, resume: bool) -> Run:
    """The run in a folder that this process owns: new, or as far as it got. Raises FldiagError for one that was begun with
    something else (what the checkpoints are to hold may differ), or that has more rounds than the config."""
    config, about = setup.config, provenance(setup)
    settings = config.model_dump(mode="json")
    if not os.path.exists(path / ABOUT):
        run = Run.create(path, settings, about, hash=config.hash)
        run.put("partition.npz", lambda f: partition.save(f, setup.parts))
        if (words := setup.dataset.words) is not None:
            run.put("tokenizer.json", words.spec.encode())
        if (source := config.train.initial) is not None:
            run.put(kept_initial(source), Path(source).read_bytes())
        keep_base(run, setup.module)
        run.begin()
        return run
    if not resume:
        raise FldiagError(
            f"{path} already holds a run",
            "continue it with --resume, or choose another folder with --out",
            usage=True,
        )
    run = Run.open(path)
    before, now = _facts(run.about["config"], run.about["provenance"]), _facts(settings, about)
    before["rounds"] = max(before.get("rounds", 0), config.rounds)
    different = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if not partition.same(partition.load_parts(run.verified("partition.npz")), setup.parts):
        different.append("partition")
    if different:
        raise FldiagError(
            f"{path} was trained with another config or other data ({', '.join(different[:5])})",
            "give it the same, or choose another folder with --out",
            usage=True,
        )
    run.resume()
    if run.about["config"] != settings:
        run.about |= {"config": settings, "hash": config.hash}
        run.begin()
    return run


def _facts(config: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """What two starts of a run have in common: keys of the config and facts of the data."""
    facts = {name: about.get(name) for name in ("data", "initial", "base", "method_version")}
    for section, value in config.items():
        if section != "checkpoint":
            facts |= (
                {f"{section}.{k}": v for k, v in value.items()}
                if isinstance(value, dict)
                else {section: value}
            )
    return facts


# Rounds


def _loop(run: Run, federation: Federation, pool: Pool, emit: Listener) -> None:
    setup, config = federation.setup, federation.setup.config
    stored, holding = rounds_to_store(setup)
    rows: list[Row] = []
    # Once for each start: on another processor a resumed run differs in the last bits.
    facts: dict[str, Any] = {"machine": files.machine(), **files.provenance(device=setup.device)}
    while run.status != "diverged" and federation.t < config.rounds:
        start, received = time.perf_counter(), federation.sent()
        r = federation.t + 1  # a run's rounds count from 1
        results = []
        if r in holding and config.checkpoint.clients == "all":
            # trained only for their weights: their states stay as they are
            others = {*range(config.clients.total)}.difference(setup.schedule.sampled(federation.t))
            results = [federation.train([*others], pool.map)] if others else []
        round, result = federation.round(pool.map)
        if result.notes is not None:
            steps = step_rows(r, result.notes, **run.common)
            run.put(f"steps/{r:04d}.parquet", steps.to_parquet(index=False))
        if not federation.finite:
            row = {"moment": "aggregated", "scope": "global", "metric": "diverged", "value": 1.0}
            run.append(run.done, [*rows, {"round": r, **row}], status="diverged", **facts)
            return
        scores = federation.evaluate()
        rows += round_rows(scores, round, result, isolated=setup.method.isolated)
        seconds = time.perf_counter() - start
        if r in stored:
            clients = [result, *results] if r in holding else []
            _store(run, federation, clients, received, rows, seconds=seconds, **facts)
            rows, facts = [], {}
        emit({"event": "round", "round": r, "rounds": config.rounds, "seconds": seconds, **scores})


def _store(
    run: Run,
    federation: Federation,
    results: list[CohortResult],
    received: Tensor,
    rows: list[Row],
    **facts: Any,
) -> None:
    """Write the checkpoint and the state after a round, with these clients' weights, and then its line."""
    setup, r = federation.setup, federation.t  # the round that has just ended, from 1
    ids: list[int] = []
    tensors: dict[str, Any] = {}
    if results:
        merged = merge(results)
        ids = merged.ids
        tensors = {"received": received, "clients": merged.rows, "buffers": merged.buffers}
    manifest = {
        "round": r,
        "seed": setup.config.seed,
        "config": run.about["config"],
        "shape": list(setup.dataset.shape),
        "classes": setup.dataset.classes,
        "clients": ids,
        "provenance": run.about["provenance"],
    }
    state = {**setup.network.layout.views(federation.w), **federation.buffers}
    run.put_checkpoint(r, manifest, state, **tensors)
    if federation.state or run.states:
        facts |= run.put_state(r, federation.state, run.states)
    run.append(r, rows, **facts)
    run.states.clear()


def round_rows(
    scores: dict[str, float], round: Round, result: CohortResult, *, isolated: bool
) -> list[Row]:
    """The round's numbers: test accuracy and loss, mean local loss, bytes a client sends and receives (none when isolated)."""
    size = round.w_g.nbytes + sum(rows[0].nbytes for rows in result.buffers.values())
    traffic = {
        "uplink": size + sum(rows[0].nbytes for rows in round.uploads.values()),
        "downlink": size + sum(value.nbytes for value in round.sent.values()),
    }
    loss = float(result.loss @ round.p.to(result.loss.device))
    rows = score_rows(scores, "test")
    row = {"moment": "trained", "scope": "global", "slice": "train", "metric": "minibatch_loss"}
    rows.append({**row, "value": loss, "n_examples": int(round.n.sum())})
    row = {"moment": "trained", "scope": "client", "unit": "bytes"}
    for metric, count in traffic.items():
        rows.append({**row, "metric": metric, "value": 0.0 if isolated else float(count)})
    return [{"round": round.t + 1, **row} for row in rows]


# Whose trained weights a checkpoint holds besides the global ones


def rounds_to_store(setup: Setup) -> tuple[set[int], set[int]]:
    """The rounds (from 1) that are stored, and those of them whose checkpoints hold the weights of clients, too."""
    config, section = setup.config, setup.config.checkpoint
    stored = {*range(section.every, config.rounds, section.every), config.rounds}
    is_small = len(stored) * config.clients.per_round * setup.model_bytes <= SMALL
    auto = stored if is_small else {config.rounds}
    return stored, {"none": set[int](), "auto": auto}.get(section.clients, stored)


# What a worker does


class WorkerSetup:
    """A setup for workers. It is pickled without the setup, which each worker builds from the config on ``device``; where
    ``device`` is None (the caller's own data or module), the setup itself is sent."""

    def __init__(self, setup: Setup, device: str | None):
        self.setup, self.config, self.device = setup, setup.config, device

    @cached_property
    def setup(self) -> Setup:
        return Setup(self.config, device=str(self.device))

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "setup" or self.device is None}


def work(shared: WorkerSetup, unit: Cohort) -> CohortResult:
    return shared.setup.train(unit)
