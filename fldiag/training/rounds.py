"""The round loop: sample, train cohorts, aggregate, evaluate, store."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fldiag.checkpoint import schema
from fldiag.checkpoint.run import Run
from fldiag.config import Config
from fldiag.data import partition
from fldiag.errors import FldiagError
from fldiag.method import Round
from fldiag.results.machine import capability, commit, machine
from fldiag.results.table import table
from fldiag.training import executor as executors
from fldiag.training import keep
from fldiag.training.client import MOMENTUM, Trained
from fldiag.training.evaluate import evaluate
from fldiag.training.personalise import METRIC, measure, planned
from fldiag.training.resume import same_data, same_run
from fldiag.training.rows import round_rows, step_rows
from fldiag.training.server import aggregate, mean_buffers
from fldiag.training.setup import Setup, provenance

RUNS = Path("checkpoints")
Event = Callable[[dict[str, Any]], None]


def run_path(config: Config) -> Path:
    """Where a run goes unless told otherwise: named by what it is. A run that is there under the name that fldiag 0.1.0
    gave it (what the checkpoints hold was part of it) stays there."""
    stem = f"{config.name}-{config.method.name}-s{config.seed}"
    path, before = (RUNS / f"{stem}-{digits[:8]}" for digits in (config.hash, config.fingerprint(checkpoint=True)))
    return before if (before / "run.json").is_file() and not path.exists() else path


class Federation:
    """The state of a run between rounds: global weights, buffers, server state, client states."""

    def __init__(self, setup: Setup):
        self.setup, self.t = setup, 0
        self.w = setup.initial()
        self.buffers = {n: b.clone() for n, b in setup.network.buffers.items()}
        self.state = setup.method.server_init(self.w)
        self._client0 = setup.method.client_init(self.w)
        if setup.config.train.keep_momentum:
            self._client0[MOMENTUM] = torch.zeros_like(self.w)
        self.clients: dict[int, dict[str, Tensor]] = {}  # only clients that have trained: the others hold _client0
        self.changed: set[int] = set()

    def sent(self) -> Tensor:
        """The vector the clients receive, [P]: w_g, unless a part sends another point."""
        w = self.w
        for part in self.setup.method:
            w = part.send(w, self.state)
        return w

    def train(self, ids: list[int], execute: Callable[[list[Any]], Any], record: bool = False) -> Trained:
        """Local training of these clients from the current state; nothing of it is kept here. ``record``: their steps."""
        setup, method = self.setup, self.setup.method
        start = self.sent()
        states = {i: self.clients.get(i, self._client0) for i in ids} if self._client0 else {}
        sent = {name: self.state[name] for name in method.sent if name in self.state}
        units = setup.units(self.t, ids, start, self.buffers, sent, states)
        return merge(list(execute([replace(unit, record=record) for unit in units])), ids)

    def round(self, execute: Callable[[list[Any]], Any]) -> tuple[Round, Trained]:
        """Train one round. Returns what the server saw and the merged clients' results."""
        setup, method = self.setup, self.setup.method
        config, ids = setup.config, sorted(setup.schedule.sampled(self.t))
        trained = self.train(ids, execute, config.metrics.of_round(self.t + 1, config.rounds))
        seen = Round(
            t=self.t, lr=config.train.lr * config.train.lr_decay**self.t, w_g=self.w, ids=ids, rows=trained.rows,
            n=trained.n, steps=trained.steps, effective=trained.effective, uploads=trained.uploads, buffers=trained.buffers,
            clients=config.clients.total, examples=sum(map(len, setup.parts)), state=dict(self.state),
            sent={name: self.state[name] for name in method.sent if name in self.state},
            network=setup.network, seed=config.seed, public=setup.public)
        w = aggregate(seen, method, config.train)
        seen.mean_buffers = mean_buffers(trained.buffers, seen.p)
        with setup.seeded("server", self.t):
            for part in method:
                w = part.refine(seen, w)
        self.w, self.buffers, self.state = w, seen.mean_buffers, seen.state
        for j, i in enumerate(ids):
            if trained.state:
                self.clients[i] = {name: rows[j].clone() for name, rows in trained.state.items()}
                self.changed.add(i)
        self.t += 1
        return seen, trained

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.w).all())

    def restore(self, run: Run) -> None:
        server, clients = run.get_state()
        self.t, self.w = run.done, server["w"].to(self.w.device)
        self.buffers = {k: v.to(self.w.device) for k, v in server["buffers"].items()}
        self.state = {k: v.to(self.w.device) for k, v in server["state"].items()}
        self.clients = {i: {k: v.to(self.w.device) for k, v in s.items()} for i, s in clients.items()}


def merge(cohorts: list[Trained], ids: list[int]) -> Trained:
    """Cohorts' results as one, rows in the order of ``ids``."""
    where = {i: j for j, i in enumerate(i for c in cohorts for i in c.ids)}
    order = [where[i] for i in ids]

    def join(rows: list[Tensor]) -> Tensor:
        return torch.cat(rows)[order]

    def joins(name: str) -> dict[str, Tensor]:
        return {k: join([getattr(c, name)[k] for c in cohorts]) for k in getattr(cohorts[0], name)}

    return Trained(
        ids=ids, rows=join([c.rows for c in cohorts]), n=join([c.n for c in cohorts]), steps=join([c.steps for c in cohorts]),
        effective=join([c.effective for c in cohorts]), loss=join([c.loss for c in cohorts]),
        buffers=joins("buffers"), state=joins("state"), uploads=joins("uploads"),
        notes=join_notes([c.notes for c in cohorts]))


def join_notes(notes: list[pd.DataFrame | None]) -> pd.DataFrame | None:
    there = [n for n in notes if n is not None]
    return pd.concat(there).sort_values("client", kind="stable", ignore_index=True) if there else None


def train(config: Config, *, out: str | Path | None = None, executor: str = "serial", on_event: Event | None = None,
          resume: bool = False, device: str = "auto", download: bool = False, setup: Setup | None = None) -> Run:
    """Train ``config`` and return its run.

    ``out``: run folder (default ``checkpoints/NAME-METHOD-sSEED-HASH``). ``executor``: ``serial`` or
    ``processes[:N]``. ``on_event`` gets a dict after every round. ``resume`` continues a run that was
    stopped; on the same machine the result is bitwise that of a run that was not. ``setup`` replaces what the config would
    build (own data, partition, module or schedule).

    A run whose weights become NaN or infinite ends with status ``diverged``: that is an outcome, and the
    rounds before it are kept. Raises FldiagError for wrong configs, folders in use and disks that are full.
    """
    kind, workers = executors.parse(executor)
    path = Path(out) if out is not None else run_path(config)
    exists = (path / "run.json").is_file()
    if exists and not resume:
        raise FldiagError(f"{path} already holds a run", "continue it with --resume, or choose another folder with --out",
                          usage=True)
    given = setup is not None
    setup = setup or Setup(config, device=device, download=download)
    federation = Federation(setup)
    planned(setup)  # what cannot be personalised is refused now rather than after the last round
    emit = on_event or (lambda event: None)
    if exists:
        run = Run.open(path)
        same_run(run, config)
        if run.status in ("finished", "diverged"):
            return run
        same_data(run, setup)
        wanted = config.checkpoint.model_dump(mode="json")
        if run.index["config"]["checkpoint"] != wanted:  # from here on; ``segments`` tells what the rounds before kept
            run.index["config"]["checkpoint"], run.index["hash"] = wanted, config.hash
        if run.done:
            federation.restore(run)
        rows = _rows_until(run)
    else:
        run, rows = Run.create(path, config, _partition_bytes(setup.parts), provenance(setup)), []
    emit({"event": "start", "round": run.done, "rounds": config.rounds, "path": str(path),
          "notes": [*setup.remarks, keep.described(config, setup.model_bytes)]})
    if kind == "serial" or given:
        pool: executors.Executor = executors.Serial(setup.train)
    else:
        pool = executors.Processes(Setup, {"config": config, "device": device}, "train", workers)
    try:
        _loop(config, run, federation, rows, pool, emit)
    except KeyboardInterrupt:
        run.index = Run.open(path).index  # what is in memory may name files that were still being written
        if run.status == "running":
            run.index["status"] = "interrupted"
            run.commit()
        raise
    finally:
        pool.close()
    emit({"event": "end", "status": run.status, "round": run.done, "path": str(path)})
    return run


def _loop(config: Config, run: Run, federation: Federation, rows: list[dict[str, Any]], pool: executors.Executor,
          emit: Event) -> None:
    common = {"run": run.path.name, "method": config.method.name, "seed": config.seed}
    run.index["status"], plan = "running", planned(federation.setup)
    segment = Segment(run)
    while federation.t < config.rounds:
        before = federation.w, federation.buffers
        began, received, t = time.perf_counter(), federation.sent(), federation.t + 1
        stored = t % config.checkpoint.every == 0 or t == config.rounds
        recorded = federation.train(ids, pool.map) if stored and (ids := unsampled(federation)) else None
        seen, trained = federation.round(pool.map)
        if trained.notes is not None:
            run.put_steps(t, step_rows(t, trained.notes, **common))
        if not federation.finite:
            rows.append({"round": t, "moment": "aggregated", "scope": "global", "metric": "diverged", "value": 1.0})
            run.index["status"] = "diverged"
            if t > 1 and t - 1 not in run.rounds:  # the last finite state is worth keeping
                federation.t, federation.w, federation.buffers = t - 1, *before
                _store(run, federation, [replace(trained, ids=[])], received)
                run.index["done"] = t - 1
            run.put_metrics(table(rows, **common))
            segment.note(federation.t)
            run.commit()
            run.clean()
            return
        scores = evaluate(federation.setup.network, federation.w, federation.buffers, federation.setup.dataset)
        rows += round_rows(t, scores, seen, trained, isolated=federation.setup.method.isolated)
        if stored:
            run.index["done"] = t
            run.index["status"] = "finished" if t == config.rounds and plan is None else "running"
            _store(run, federation, [trained, *([recorded] if recorded else [])], received)
            run.put_metrics(table(rows, **common))
            segment.note(t)
            run.commit()
            run.clean()
        emit({"event": "round", "round": t, "rounds": config.rounds, "seconds": time.perf_counter() - began, **scores})
    if plan is not None:  # the last round is stored by now: a run stopped here goes on here
        rows = [row for row in rows if not row["metric"].startswith(METRIC)]
        rows += measure(federation.setup, plan, federation.w, federation.buffers, federation.clients, config.rounds,
                        progress=lambda done, total, text: emit({"event": "personalise", "done": done, "total": total}))
        run.index["status"] = "finished"
        run.put_metrics(table(rows, **common))
        run.commit()
        run.clean()


class Segment:
    """A stretch of rounds trained without a pause, in ``segments`` of run.json: with which code, on what machine, how long.

    On another processor a resumed run differs in the last bits from one that was not interrupted: here it shows."""

    def __init__(self, run: Run):
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        self.about: dict[str, Any] = {
            "commit": commit(), "torch": torch.__version__, "machine": machine(), "capability": capability(),
            "threads": torch.get_num_threads(), "checkpoint": run.index["config"]["checkpoint"], "first_round": run.done + 1}
        run.index.setdefault("segments", []).append(self.about)

    def note(self, done: int) -> None:
        """Round ``done`` is about to be stored. ``cpu_seconds``: of this process, without its workers."""
        self.about |= {"last_round": done, "seconds": round(time.perf_counter() - self.wall, 3),
                       "cpu_seconds": round(time.process_time() - self.cpu, 3)}


def unsampled(federation: Federation) -> list[int]:
    """Clients whose trained weights the checkpoint is to hold though they are not sampled in the coming round."""
    setup, sampled = federation.setup, federation.setup.schedule.sampled(federation.t)
    return sorted(set(keep.clients(setup.config, setup.model_bytes, federation.t + 1, sampled)) - set(sampled))


def _store(run: Run, federation: Federation, cohorts: list[Trained], received: Tensor) -> None:
    setup, t = federation.setup, federation.t
    config = setup.config
    trained = merge([replace(c, state={}, uploads={}, notes=None) for c in cohorts], sorted(i for c in cohorts for i in c.ids))
    wanted = keep.clients(config, setup.model_bytes, t, trained.ids)
    chosen = [j for j, i in enumerate(trained.ids) if i in wanted]
    spec = config.model_dump(mode="json")
    manifest = {
        "round": t, "seed": config.seed, "config": spec, **{k: spec[k] for k in ("method", "model", "data", "partition")},
        "shape": list(setup.dataset.shape), "classes": setup.dataset.classes, "clients": [trained.ids[j] for j in chosen],
        "provenance": run.index["provenance"], "run": run.path.name}
    views = {n: v.clone() for n, v in setup.network.layout.views(federation.w).items()}
    name = f"rounds/{t:04d}.pt"
    extra: dict[str, Any] = {}
    if chosen:
        extra = {"received": received.cpu(), "clients": trained.rows[chosen].cpu(),
                 "buffers": {n: b[chosen].cpu() for n, b in trained.buffers.items()}}
    run.index["files"][name] = schema.write(run.path / name, manifest, {**views, **federation.buffers}, **extra)
    changed = {i: federation.clients[i] for i in sorted(federation.changed)}
    run.put_state(t, {"w": federation.w, "buffers": federation.buffers, "state": federation.state}, changed)
    federation.changed.clear()


def _rows_until(run: Run) -> list[dict[str, Any]]:
    """Metric rows of the rounds that are safely stored."""
    if not run.done:
        return []
    frame = run.metrics
    kept = frame[frame["round"] <= run.done].drop(columns=["run", "method", "seed"]).astype(object)
    return [{k: v for k, v in row.items() if not pd.isna(v)} for row in kept.to_dict("records")]


def _partition_bytes(parts: list[np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    partition.save(buffer, parts)
    return buffer.getvalue()
