"""What a round leaves in the run: its numbers, its checkpoint, the state to go on from, and what trained it."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fldiag.config import Config
from fldiag.data import partition
from fldiag.method import Round
from fldiag.results.machine import capability, commit, machine
from fldiag.results.table import Row
from fldiag.runs.run import Run
from fldiag.training.client import CohortResult
from fldiag.training.evaluate import score_rows
from fldiag.training.server import Federation, merge
from fldiag.training.setup import Setup

#: With ``checkpoint.clients = "auto"`` every stored round holds its clients while all of them together stay below this.
SMALL = 100_000_000


def round_rows(
    t: int, scores: dict[str, float], round: Round, result: CohortResult, *, isolated: bool
) -> list[Row]:
    """The round's numbers: test accuracy and loss, mean local loss, bytes a client sends and receives (none when isolated)."""
    size = round.w_g.numel() * round.w_g.element_size()
    size += sum(b[0].numel() * b.element_size() for b in result.buffers.values())
    up = size + sum(u[0].numel() * u.element_size() for u in round.uploads.values())
    down = size + sum(s.numel() * s.element_size() for s in round.sent.values())
    rows: list[Row] = [{"round": t, **row} for row in score_rows(scores, "test")]
    rows.append(
        {
            "round": t,
            "moment": "trained",
            "scope": "global",
            "slice": "train",
            "metric": "minibatch_loss",
            "value": float(result.loss @ round.p.to(result.loss.device)),
            "n_examples": int(round.n.sum()),
        }
    )
    rows += [
        {
            "round": t,
            "moment": "trained",
            "scope": "client",
            "metric": metric,
            "value": float(0 if isolated else value),
            "unit": "bytes",
        }
        for metric, value in (("uplink", up), ("downlink", down))
    ]
    return rows


# -- whose trained weights a checkpoint holds besides the global ones


def count_checkpoints(config: Config) -> int:
    """How many rounds are stored: every ``checkpoint.every``-th and the last."""
    return -(-config.rounds // config.checkpoint.every)


def every_round_holds_clients(config: Config, model_bytes: int) -> bool:
    """Whether all stored rounds hold clients' weights, rather than the last alone or none."""
    if config.checkpoint.clients != "auto":
        return config.checkpoint.clients != "none"
    return count_checkpoints(config) * config.clients.per_round * model_bytes <= SMALL


def clients_to_store(config: Config, model_bytes: int, t: int, sampled: Iterable[int]) -> list[int]:
    """The clients whose trained weights the checkpoint of round t (from 1) holds, where ``sampled`` train in it."""
    clients = config.checkpoint.clients
    is_last = t == config.rounds
    if clients == "none" or (
        clients == "auto" and not is_last and not every_round_holds_clients(config, model_bytes)
    ):
        return []
    if clients == "all":
        return list(range(config.clients.total))
    return sorted(clients) if isinstance(clients, tuple) else sorted(sampled)


def client_bytes(config: Config, model_bytes: int) -> int:
    """What the clients' weights take on disk in the whole run; a file that holds any holds what they received, too."""
    clients = clients_to_store(config, model_bytes, config.rounds, range(config.clients.per_round))
    if not clients:
        return 0
    is_every = every_round_holds_clients(config, model_bytes)
    return (count_checkpoints(config) if is_every else 1) * (len(clients) + 1) * model_bytes


def disk_bytes(setup: Setup) -> int:
    """What the weights of a run take on disk, without its tables: models, the clients' states, one for the server."""
    config, size = setup.config, setup.model_bytes
    states = config.clients.total * len(setup.method.client_init(setup.initial())) + 1
    return size * (count_checkpoints(config) + states) + client_bytes(config, size)


def describe_clients(config: Config, model_bytes: int) -> str:
    """For the start of a run: which rounds hold whose weights, and why."""
    clients, size = config.checkpoint.clients, client_bytes(config, model_bytes) / 1e6
    if clients == "none":
        return "checkpoints hold no client's weights (checkpoint.clients = none)"
    owners = "all clients'" if clients == "all" else "the sampled clients'"
    if isinstance(clients, tuple):
        owners = f"{len(clients)} clients'"
    if every_round_holds_clients(config, model_bytes):
        return (
            f"every stored round holds {owners} weights: {size:,.0f} MB in all (checkpoint.clients)"
        )
    return (
        f"the last round holds {owners} weights: {size:,.0f} MB; in every stored round they would take "
        f"{size * count_checkpoints(config):,.0f} MB (checkpoint.clients = sampled)"
    )


def unsampled_clients(federation: Federation) -> list[int]:
    """Clients whose trained weights the checkpoint is to hold though they are not sampled in the coming round."""
    setup, t = federation.setup, federation.t
    sampled = setup.schedule.sampled(t)
    clients = clients_to_store(setup.config, setup.model_bytes, t + 1, sampled)
    return sorted(set(clients) - set(sampled))


# -- files


class Segment:
    """A stretch of rounds trained without a pause, in ``segments`` of run.json: with which code, on what machine, how long.

    On another processor a resumed run differs in the last bits from one that was not interrupted: it shows in this list."""

    def __init__(self, run: Run):
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        self.entry: dict[str, Any] = {
            "commit": commit(),
            "torch": torch.__version__,
            "machine": machine(),
            "capability": capability(),
            "threads": torch.get_num_threads(),
            "checkpoint": run.index["config"]["checkpoint"],
            "first_round": run.done + 1,
        }
        run.index.setdefault("segments", []).append(self.entry)

    def note(self, done: int) -> None:
        """Round ``done`` is about to be stored. ``cpu_seconds``: of this process, without its workers."""
        self.entry |= {
            "last_round": done,
            "seconds": round(time.perf_counter() - self.wall, 3),
            "cpu_seconds": round(time.process_time() - self.cpu, 3),
        }


def store(run: Run, federation: Federation, results: list[CohortResult], received: Tensor) -> None:
    """Write the checkpoint and the state after a round, of whose clients ``results`` are (none: without clients' weights)."""
    setup, t = federation.setup, federation.t
    config = setup.config
    ids = sorted(i for result in results for i in result.ids)
    clients = clients_to_store(config, setup.model_bytes, t, ids)
    rows = [j for j, i in enumerate(ids) if i in clients]
    spec = config.model_dump(mode="json")
    manifest = {
        "round": t,
        "seed": config.seed,
        "config": spec,
        **{k: spec[k] for k in ("method", "model", "data", "partition")},
        "shape": list(setup.dataset.shape),
        "classes": setup.dataset.classes,
        "clients": [ids[j] for j in rows],
        "provenance": run.index["provenance"],
        "run": run.path.name,
    }
    views = {n: v.clone() for n, v in setup.network.layout.views(federation.w).items()}
    extra: dict[str, Any] = {}
    if rows:
        result = merge(
            [replace(result, state={}, uploads={}, notes=None) for result in results], ids
        )
        extra = {
            "received": received.cpu(),
            "clients": result.rows[rows].cpu(),
            "buffers": {n: b[rows].cpu() for n, b in result.buffers.items()},
        }
    run.put_checkpoint(t, manifest, {**views, **federation.buffers}, **extra)
    run.put_state(t, {"w": federation.w, "buffers": federation.buffers, "state": federation.state})


def partition_bytes(parts: Sequence[np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    partition.save(buffer, parts)
    return buffer.getvalue()
