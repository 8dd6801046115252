"""What a round leaves on disk: its checkpoint, the state to go on from, and what trained it."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.checkpoint.run import Run
from fldiag.config import Config
from fldiag.data import partition
from fldiag.results.machine import capability, commit, machine
from fldiag.training import held
from fldiag.training.client import Trained
from fldiag.training.federation import Federation, merge


class Segment:
    """A stretch of rounds trained without a pause, in ``segments`` of run.json: with which code, on what machine, how long.

    On another processor a resumed run differs in the last bits from one that was not interrupted: here it shows."""

    def __init__(self, run: Run):
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        self.about: dict[str, Any] = {
            "commit": commit(),
            "torch": torch.__version__,
            "machine": machine(),
            "capability": capability(),
            "threads": torch.get_num_threads(),
            "checkpoint": run.index["config"]["checkpoint"],
            "first_round": run.done + 1,
        }
        run.index.setdefault("segments", []).append(self.about)

    def note(self, done: int) -> None:
        """Round ``done`` is about to be stored. ``cpu_seconds``: of this process, without its workers."""
        self.about |= {
            "last_round": done,
            "seconds": round(time.perf_counter() - self.wall, 3),
            "cpu_seconds": round(time.process_time() - self.cpu, 3),
        }


def unsampled(federation: Federation) -> list[int]:
    """Clients whose trained weights the checkpoint is to hold though they are not sampled in the coming round."""
    setup, sampled = federation.setup, federation.setup.schedule.sampled(federation.t)
    return sorted(
        set(held.clients(setup.config, setup.model_bytes, federation.t + 1, sampled)) - set(sampled)
    )


def store(run: Run, federation: Federation, cohorts: list[Trained], received: Tensor) -> None:
    setup, t = federation.setup, federation.t
    config = setup.config
    trained = merge(
        [replace(c, state={}, uploads={}, notes=None) for c in cohorts],
        sorted(i for c in cohorts for i in c.ids),
    )
    wanted = held.clients(config, setup.model_bytes, t, trained.ids)
    chosen = [j for j, i in enumerate(trained.ids) if i in wanted]
    spec = config.model_dump(mode="json")
    manifest = {
        "round": t,
        "seed": config.seed,
        "config": spec,
        **{k: spec[k] for k in ("method", "model", "data", "partition")},
        "shape": list(setup.dataset.shape),
        "classes": setup.dataset.classes,
        "clients": [trained.ids[j] for j in chosen],
        "provenance": run.index["provenance"],
        "run": run.path.name,
    }
    views = {n: v.clone() for n, v in setup.network.layout.views(federation.w).items()}
    extra: dict[str, Any] = {}
    if chosen:
        extra = {
            "received": received.cpu(),
            "clients": trained.rows[chosen].cpu(),
            "buffers": {n: b[chosen].cpu() for n, b in trained.buffers.items()},
        }
    run.put_checkpoint(t, manifest, {**views, **federation.buffers}, **extra)
    run.forget(passed(run, config, t))
    run.put_state(t, {"w": federation.w, "buffers": federation.buffers, "state": federation.state})


def passed(run: Run, config: Config, t: int) -> list[int]:
    """Rounds that were stored because they were among the last, and in round t are no more."""
    if not config.checkpoint.keep:
        return []
    former = {extension["rounds"] for extension in run.index.get("extended", [])}
    return [
        r
        for r in run.rounds
        if r <= t - config.checkpoint.keep and r % config.checkpoint.every and r not in former
    ]


def partition_bytes(parts: Sequence[np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    partition.save(buffer, parts)
    return buffer.getvalue()
