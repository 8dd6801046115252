"""The server: the state of a federation between rounds, and how a round makes the next one of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fldiag.method import Method, Round
from fldiag.models import State
from fldiag.runs.run import ClientStates, Run
from fldiag.sections import TrainSection
from fldiag.training.client import MOMENTUM, CohortResult
from fldiag.training.record import evaluate
from fldiag.training.setup import Cohort, Setup

#: Clients in one stack, at the most: bounds memory and leaves work for several processes.
STACK = 16


class Federation:
    """The state of a run between rounds: global weights, buffers, server state, client states."""

    def __init__(self, setup: Setup):
        self.setup, self.t = setup, 0
        self.w = setup.initial()
        self.buffers = {n: b.clone() for n, b in setup.network.buffers.items()}
        self.state = setup.method.server_init(self.w)
        self.initial_state = setup.method.client_init(self.w)
        if setup.config.train.keep_momentum:
            self.initial_state[MOMENTUM] = torch.zeros_like(self.w)
        #: Only of clients that have trained. In memory, unless a run keeps them on disk.
        self.clients: dict[int, State] | ClientStates = {}

    def sent(self) -> Tensor:
        """The vector the clients receive, [P]: w_g, unless a part sends another point."""
        w = self.w
        for part in self.setup.method:
            w = part.send(w, self.state)
        return w

    def _sent_state(self) -> dict[str, Tensor]:
        """What they receive besides."""
        return {name: self.state[name] for name in self.setup.method.sent if name in self.state}

    def cohorts(self, ids: list[int], record: bool = False) -> list[Cohort]:
        """What these clients are to train, those of similar length together; depends on the config only, not on the executor.
        ``record``: their steps."""
        setup, state = self.setup, self.initial_state
        batches = {i: setup.schedule.batches(self.t, i, int(setup.sizes[i])) for i in ids}
        states = {i: self.clients.get(i, state) for i in ids if state}
        order = sorted(ids, key=lambda i: (-len(batches[i]), i))
        size = STACK if setup.stack else 1
        w, sent = self.sent(), self._sent_state()
        return [
            Cohort(
                t=self.t,
                ids=cohort,
                batches=[batches[i] for i in cohort],
                w_g=w,
                buffers=self.buffers,
                sent=sent,
                state={n: torch.stack([states[i][n].to(w.device) for i in cohort]) for n in state},
                record=record,
            )
            for cohort in (order[j : j + size] for j in range(0, len(order), size))
        ]

    def train(
        self, ids: list[int], execute: Callable[[list[Any]], Any], record: bool = False
    ) -> CohortResult:
        """Local training of these clients from the current state, which stays as it is."""
        return merge(list(execute(self.cohorts(ids, record))))

    def round(self, execute: Callable[[list[Any]], Any]) -> tuple[Round, CohortResult]:
        """Train one round. Returns what the server saw and the merged clients' results."""
        setup, method = self.setup, self.setup.method
        config, ids = setup.config, sorted(setup.schedule.sampled(self.t))
        result = self.train(ids, execute, config.metrics.of_round(self.t + 1, config.rounds))
        round = Round(
            t=self.t,
            lr=config.train.lr * config.train.lr_decay**self.t,
            w_g=self.w,
            ids=ids,
            rows=result.rows,
            n=result.n,
            steps=result.steps,
            effective=result.effective,
            uploads=result.uploads,
            buffers=result.buffers,
            clients=config.clients.total,
            examples=setup.examples,
            state=dict(self.state),
            sent=self._sent_state(),
            network=setup.network,
            seed=config.seed,
            public=setup.public,
        )
        w = aggregate(round, method, config.train)
        round.mean_buffers = mean_buffers(result.buffers, round.p)
        with setup.seeded("server", self.t):
            for part in method:
                w = part.refine(round, w)
        self.w, self.buffers, self.state = w, round.mean_buffers, round.state
        if result.state and self.finite:
            self.clients.update(
                {
                    i: {name: rows[j].clone() for name, rows in result.state.items()}
                    for j, i in enumerate(ids)
                }
            )
        self.t += 1
        return round, result

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy of the global model, see ``fldiag.training.record``."""
        buffers = {name: b.unsqueeze(0) for name, b in self.buffers.items()}
        bound = self.setup.network.bind(self.w.unsqueeze(0), buffers)
        return evaluate(bound, self.setup.dataset, self.w)

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.w).all())

    def load(self, run: Run) -> None:
        """Take the global model of the last stored round. Raises FldiagError for a file that the run did not write."""
        state, layout = run.checkpoint().state, self.setup.network.layout
        self.t, self.w = run.done, layout.row(state).to(self.w)
        self.buffers = {name: state[name].to(b.device) for name, b in self.buffers.items()}

    def restore(self, run: Run) -> None:
        """Go on from the last stored round, if there is one."""
        self.clients = run.states
        if run.rounds:
            self.load(run)
            self.state = {n: v.to(self.w.device) for n, v in run.server_state.items()}


def merge(results: list[CohortResult]) -> CohortResult:
    """The results of several cohorts as one, rows in the order of the clients' ids."""
    ids = [i for result in results for i in result.ids]
    order = sorted(range(len(ids)), key=ids.__getitem__)

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: join([table[key] for table in values]) for key in values[0]}
        rows = [row for tensor in values for row in tensor.split(1)]
        return torch.cat([rows[j] for j in order])  # put in order before the copy, not after it

    names = ("rows", "n", "steps", "effective", "loss", "buffers", "state", "uploads")
    merged = {name: join([getattr(result, name) for result in results]) for name in names}
    notes = [result.notes for result in results if result.notes is not None]
    if notes:
        merged["notes"] = pd.concat(notes).sort_values("client", kind="stable", ignore_index=True)
    return CohortResult(ids=sorted(ids), **merged)


def aggregate(round: Round, method: Method, train: TrainSection) -> Tensor:
    """New global weights [P]: w = sum_k p_k w_k, then the server slots in order. p_k is proportional to n_k, 1 or
    the number of full minibatches, by ``train.aggregate``.

    ``round.state`` is replaced where a part updates it. Rows are summed in the order of the clients' ids and in
    float64, so the order of sampling does not show in the bits.
    """
    p = torch.full((round.m,), 1 / round.m, dtype=torch.float64)
    counts = {"n": round.n, "batches": round.n // train.batch_size}.get(train.aggregate)
    if counts is not None and int(counts.sum()):  # no client fills a minibatch: all equal
        # On the CPU whatever the device, as when it is uniform.
        p = (counts.double() / counts.double().sum()).cpu()
    round.p = p
    w = round.mean(round.rows, p)
    for part in method:
        w = part.server(round, w)
    return w


def mean_buffers(buffers: dict[str, Tensor], p: Tensor) -> dict[str, Tensor]:
    """Batch-norm statistics averaged with the weights p; integer counters take the largest."""
    merged = {}
    for name, rows in buffers.items():
        if rows.is_floating_point():
            merged[name] = torch.tensordot(p.to(rows.device), rows.double(), 1).to(rows.dtype)
        else:
            merged[name] = rows.amax(0)
    return merged
