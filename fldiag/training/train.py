"""The round loop: sample, train cohorts, aggregate, evaluate, store; and how a stored run goes on."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fldiag.config import Config
from fldiag.config_files import kept_initial
from fldiag.data import partition
from fldiag.device import full_precision
from fldiag.errors import FldiagError
from fldiag.execution import Pool, Workspace, check_executor, open_pool
from fldiag.method import Round
from fldiag.registry import Progress
from fldiag.results.machine import capability, commit, machine
from fldiag.results.progress import progress_bar, shell
from fldiag.results.table import Row
from fldiag.runs import base
from fldiag.runs.run import ABOUT, Run, lock
from fldiag.training.client import CohortResult
from fldiag.training.evaluate import evaluate, score_rows
from fldiag.training.personalise import GlobalModel, measure
from fldiag.training.record import step_rows
from fldiag.training.server import Federation, merge
from fldiag.training.setup import Cohort, Setup, provenance

RUNS = Path("checkpoints")
#: With ``checkpoint.clients = "auto"`` every stored round holds its clients while all of them together stay below this.
SMALL = 100_000_000
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
    if os.path.exists(path / ABOUT):
        run = _stored(path, config, resume)
        if run.status != "unfinished" and run.config.rounds == config.rounds:
            return run
    is_custom = setup is not None
    setup = setup or Setup(config, device=device, download=download)
    federation = Federation(setup)
    shared = WorkerSetup(setup, device, is_custom)
    with (
        lock(path),
        open_pool(executor, work, shared) as pool,
        _listener(on_event, config.method.name) as emit,
    ):
        run = _open(path, config, federation, resume)
        emit(
            {
                "event": "start",
                "round": run.done,
                "rounds": config.rounds,
                "path": str(path),
                "notes": setup.remarks,
            }
        )
        _loop(config, run, federation, pool, emit)
        if run.status == "unfinished":
            pool.close()
            run.append(run.done, _personalise(federation, executor, emit), status="finished")
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


def rounds_on_bar(progress: Progress, tell: Callable[[str], None] = lambda text: None) -> Listener:
    """Shows the events of a run on a progress bar, and tells its notes."""

    def show(event: dict[str, Any]) -> None:
        for text in event.get("notes", ()):
            tell(text)
        if event["event"] == "start":
            progress(event["round"], event["rounds"], f"round {event['round'] + 1}")
        elif event["event"] == "round":
            metric = "accuracy" if "accuracy" in event else "loss"
            what = f"round {event['round']}, {metric} {event[metric]:.4g}"
            progress(event["round"], event["rounds"], what)
        elif event["event"] == "personalise":
            progress(event["done"], event["total"], "clients' own models")

    return show


def run_path(config: Config) -> Path:
    """Where a run goes by default: named by what it is."""
    method = config.method.name.rpartition(":")[2]  # of pkg.mod:function the function
    return RUNS / f"{config.name}-{method}-s{config.seed}-{config.hash[:8]}"


# A run that goes on


def _stored(path: Path, config: Config, resume: bool) -> Run:
    """The run in a folder. Raises FldiagError unless it is to go on and was begun with this config, for no more rounds. What
    the checkpoints are to hold may differ."""
    if not resume:
        raise FldiagError(
            f"{path} already holds a run",
            "continue it with --resume, or choose another folder with --out",
            usage=True,
        )
    run = Run.open(path)
    if run.origin:
        raise FldiagError(f"{path} was trained by another program", "use another --out", usage=True)
    before, now = (_flat(c.model_dump(mode="json")) for c in (run.config, config))
    before["method's version"] = run.about["provenance"].get("method_version", 1)
    now["method's version"] = config.method_version
    before["rounds"] = max(before["rounds"], config.rounds)
    different = [
        f"{key}: {before.get(key)!r} there, {now.get(key)!r} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith("checkpoint.")
    ]
    if different:
        raise FldiagError(
            f"{path} was trained with another config",
            f"{'; '.join(different[:3])}; use another --out, or the same config",
            usage=True,
        )
    return run


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}" if key else section: value
        for section, values in tree.items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    }


def _open(path: Path, config: Config, federation: Federation, resume: bool) -> Run:
    """The run in a folder that this process owns, and the federation as it was left: new, or as far as it got."""
    setup = federation.setup
    about, stored = provenance(setup), config.model_dump(mode="json")
    if not os.path.exists(path / ABOUT):
        run = Run.create(path, stored, about, hash=config.hash)
        run.put("partition.npz", lambda f: partition.save(f, setup.parts))
        if (words := setup.dataset.words) is not None:
            run.put("tokenizer.json", lambda f: f.write(words.spec.encode()))
        if (source := config.train.initial) is not None:
            content = Path(source).read_bytes()
            run.put(kept_initial(source), lambda f: f.write(content))
        base.keep(run, setup.module)
        run.begin()
        federation.clients = run.states
        return run
    run = _stored(path, config, resume)  # again: somebody may have trained it meanwhile
    stored_about, stored_parts = run.about["provenance"], run.verified("partition.npz")
    is_same = {
        f"data set {setup.dataset.name!r}": stored_about.get("data") == about.get("data"),
        "file of initial weights": stored_about.get("initial") == about.get("initial"),
        "frozen model beneath the adapters": stored_about.get("base") == about.get("base"),
        "partition": partition.same(partition.load_parts(stored_parts), setup.parts),
    }
    if different := [name for name in is_same if not is_same[name]]:
        raise FldiagError(
            f"the {different[0]} is not the one {path} was trained with so far",
            "restore it, or train again with another --out",
        )
    if run.is_pruned:
        raise FldiagError(
            f"{path} no longer has the clients' states, from which more rounds would start",
            "train again with another --out",
            usage=True,
        )
    run.resume()
    if run.about["config"] != stored:
        run.about |= {"config": stored, "hash": config.hash}
        run.begin()
    federation.restore(run)
    return run


# Rounds


def _loop(config: Config, run: Run, federation: Federation, pool: Pool, emit: Listener) -> None:
    setup = federation.setup
    stored, holding = rounds_to_store(config, setup.model_bytes)
    rows: list[Row] = []
    facts: dict[str, Any] = {"segment": _segment()}  # once for each start
    while run.status != "diverged" and federation.t < config.rounds:
        start, received, t = time.perf_counter(), federation.sent(), federation.t + 1
        results = []
        if t in holding and config.checkpoint.clients == "all":
            sampled = setup.schedule.sampled(federation.t)
            if others := sorted({*range(config.clients.total)} - {*sampled}):
                results = [federation.train(others, pool.map)]
        round, result = federation.round(pool.map)
        if result.notes is not None:
            run.put_steps(t, step_rows(t, result.notes, **run.common))
        if not federation.finite:
            row = {"moment": "aggregated", "scope": "global", "metric": "diverged", "value": 1.0}
            run.append(run.done, [*rows, {"round": t, **row}], status="diverged", **facts)
            return
        scores = evaluate(setup.network, setup.dataset, federation.w, federation.buffers)
        rows += round_rows(t, scores, round, result, isolated=setup.method.isolated)
        seconds = time.perf_counter() - start
        if t in stored:
            clients = [result, *results] if t in holding else []
            _store(run, federation, clients, received, rows, seconds=seconds, **facts)
            rows, facts = [], {}
        emit({"event": "round", "round": t, "rounds": config.rounds, "seconds": seconds, **scores})


def _segment() -> dict[str, Any]:
    """On what the rounds from here on are trained. On another processor a resumed run differs in the last bits."""
    return {
        "commit": commit(),
        "torch": torch.__version__,
        "machine": machine(),
        "capability": capability(),
        "threads": torch.get_num_threads(),
    }


def _store(
    run: Run,
    federation: Federation,
    results: list[CohortResult],
    received: Tensor,
    rows: list[Row],
    **facts: Any,
) -> None:
    """Write the checkpoint and the state after a round, with these clients' weights, and then its line."""
    setup, t, config = federation.setup, federation.t, run.about["config"]
    ids = sorted(i for result in results for i in result.ids)
    manifest = {
        "round": t,
        "seed": config["seed"],
        "config": config,
        "shape": list(setup.dataset.shape),
        "classes": setup.dataset.classes,
        "clients": ids,
        "provenance": run.about["provenance"],
        "run": run.path.name,
    }
    tensors: dict[str, Any] = {}
    if ids:
        merged = merge([replace(r, state={}, uploads={}, notes=None) for r in results], ids)
        tensors = {"received": received, "clients": merged.rows, "buffers": merged.buffers}
    state = {**setup.network.layout.views(federation.w), **federation.buffers}
    run.put_checkpoint(t, manifest, state, **tensors)
    if federation.state or run.states.new:
        facts |= run.put_state(t, federation.state, run.states.new)
    run.append(t, rows, **facts)
    run.states.new.clear()


def round_rows(
    t: int, scores: dict[str, float], round: Round, result: CohortResult, *, isolated: bool
) -> list[Row]:
    """The round's numbers: test accuracy and loss, mean local loss, bytes a client sends and receives (none when isolated)."""
    size = round.w_g.numel() * round.w_g.element_size()
    size += sum(b[0].numel() * b.element_size() for b in result.buffers.values())
    up = size + sum(u[0].numel() * u.element_size() for u in round.uploads.values())
    down = size + sum(s.numel() * s.element_size() for s in round.sent.values())
    loss = {
        "scope": "global",
        "slice": "train",
        "metric": "minibatch_loss",
        "value": float(result.loss @ round.p.to(result.loss.device)),
        "n_examples": int(round.n.sum()),
    }
    traffic = {"uplink": 0 if isolated else up, "downlink": 0 if isolated else down}
    trained = [
        {"scope": "client", "metric": metric, "value": float(value), "unit": "bytes"}
        for metric, value in traffic.items()
    ]
    rows = [*score_rows(scores, "test"), *({"moment": "trained", **r} for r in (loss, *trained))]
    return [{"round": t, **row} for row in rows]


# Whose trained weights a checkpoint holds besides the global ones


def rounds_to_store(config: Config, model_bytes: int) -> tuple[set[int], set[int]]:
    """The rounds (from 1) that are stored, and those of them whose checkpoints hold the weights of clients, too."""
    every, last, clients = config.checkpoint.every, config.rounds, config.checkpoint.clients
    stored = {*range(every, last, every), last}
    if clients == "auto":
        is_small = len(stored) * config.clients.per_round * model_bytes <= SMALL
        return stored, stored if is_small else {last}
    return stored, set() if clients == "none" else stored


def disk_bytes(setup: Setup) -> int:
    """What the weights of a run take on disk, without its tables: models, the clients' states, one for the server."""
    config, size = setup.config, setup.model_bytes
    stored, holding = rounds_to_store(config, size)
    total, sampled = config.clients.total, config.clients.per_round
    clients = 1 + (
        total if config.checkpoint.clients == "all" else sampled
    )  # and what they received
    states = 1 + total * len(setup.method.client_init(setup.initial()))
    return size * (len(stored) + len(holding) * clients + states)


def _personalise(federation: Federation, executor: str | Executor, emit: Listener) -> list[Row]:
    """Rows of what the method does after the last round, if anything."""
    plan = federation.setup.method.personal
    if plan is None or federation.setup.dataset.regression:
        return []
    model = GlobalModel(federation.w, federation.buffers, federation.clients, federation.t)
    with Workspace(
        executor,
        lambda done, total, text: emit({"event": "personalise", "done": done, "total": total}),
    ):
        return measure(federation.setup, plan, model)


def failure(run: Run) -> str | None:
    """Why a run that ended failed, in a sentence: weights that are not finite, or a test loss far above that of guessing, ln C
    for C classes, which is about where training starts. None when it did not."""
    frame = run.metrics
    last = int(frame["round"].max())
    if run.status == "diverged":
        return f"diverged: the global weights are no longer finite after round {last}"
    test = frame.query("slice == 'test' and round == @last and scope == 'global'")
    scores = test.set_index("metric")["value"]
    if not {"loss", "accuracy"} <= {*scores.index}:  # regression, or no common model
        return None
    classes, loss = int(run.checkpoint().manifest["classes"]), float(scores["loss"])
    guess = math.log(max(classes, 2))
    limit = SOME if scores["accuracy"] <= CHANCE / classes else FAR
    if loss <= limit * guess:
        return None
    return (
        f"diverged: the test loss is {loss:.4g} after round {last}, and guessing gives {guess:.2f}"
    )


# What a worker does


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
