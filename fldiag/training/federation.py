"""A federation between rounds, and how a round makes the next one of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fldiag.checkpoint.client_states import ClientStates, State
from fldiag.checkpoint.run import Run
from fldiag.method import Round
from fldiag.training.client import MOMENTUM, Trained
from fldiag.training.server import aggregate, mean_buffers
from fldiag.training.setup import Setup, Unit
from fldiag.training.setup_of_run import weights


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
        #: Only clients that have trained: the others hold _client0. In memory, unless a run keeps them on disk.
        self.clients: dict[int, State] | ClientStates = {}

    def sent(self) -> Tensor:
        """The vector the clients receive, [P]: w_g, unless a part sends another point."""
        w = self.w
        for part in self.setup.method:
            w = part.send(w, self.state)
        return w

    def units(self, ids: list[int], record: bool = False) -> list[Unit]:
        """The local training of these clients from the current state, cohort by cohort. ``record``: their steps."""
        states = {i: self._of(i) for i in ids} if self._client0 else {}
        sent = {name: self.state[name] for name in self.setup.method.sent if name in self.state}
        found = self.setup.units(self.t, ids, self.sent(), self.buffers, sent, states)
        return [replace(unit, record=record) for unit in found]

    def train(
        self, ids: list[int], execute: Callable[[list[Any]], Any], record: bool = False
    ) -> Trained:
        """Local training of these clients from the current state; nothing of it is kept here."""
        return merge(list(execute(self.units(ids, record))), ids)

    def round(self, execute: Callable[[list[Any]], Any]) -> tuple[Round, Trained]:
        """Train one round. Returns what the server saw and the merged clients' results."""
        setup, method = self.setup, self.setup.method
        config, ids = setup.config, sorted(setup.schedule.sampled(self.t))
        trained = self.train(ids, execute, config.metrics.of_round(self.t + 1, config.rounds))
        seen = Round(
            t=self.t,
            lr=config.train.lr * config.train.lr_decay**self.t,
            w_g=self.w,
            ids=ids,
            rows=trained.rows,
            n=trained.n,
            steps=trained.steps,
            effective=trained.effective,
            uploads=trained.uploads,
            buffers=trained.buffers,
            clients=config.clients.total,
            examples=setup.examples,
            state=dict(self.state),
            sent={name: self.state[name] for name in method.sent if name in self.state},
            network=setup.network,
            seed=config.seed,
            public=setup.public,
        )
        w = aggregate(seen, method, config.train)
        seen.mean_buffers = mean_buffers(trained.buffers, seen.p)
        with setup.seeded("server", self.t):
            for part in method:
                w = part.refine(seen, w)
        self.w, self.buffers, self.state = w, seen.mean_buffers, seen.state
        if trained.state and self.finite:
            self.clients.update(
                {
                    i: {name: rows[j].clone() for name, rows in trained.state.items()}
                    for j, i in enumerate(ids)
                }
            )
        self.t += 1
        return seen, trained

    def _of(self, client: int) -> State:
        held = self.clients.get(client)
        return (
            self._client0
            if held is None
            else {name: value.to(self.w.device) for name, value in held.items()}
        )

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.w).all())

    @property
    def stateless(self) -> bool:
        """Whether the next round needs nothing but the weights."""
        return not self.state and not self._client0

    def restore(self, run: Run, must: bool = True) -> bool:
        """Go on from the last stored round: from the stored state or, where the method has none, from the checkpoint.

        Returns whether that was possible; if not, nothing changed. Raises FldiagError for a file that is not the one that the
        run wrote and, with ``must``, where it was not possible.
        """
        if must or all((run.path / name).is_file() for name in run.index["state"].values()):
            server = run.server_state
            self.w = server["w"].to(self.w.device)
            self.buffers = {k: v.to(self.w.device) for k, v in server["buffers"].items()}
            self.state = {k: v.to(self.w.device) for k, v in server["state"].items()}
        elif self.stateless and (run.path / f"rounds/{run.done:04d}.pt").is_file():
            self.w, self.buffers = weights(run, self.setup, run.done)
        else:
            return False
        self.t, self.clients = run.done, run.states
        return True


def merge(cohorts: list[Trained], ids: list[int]) -> Trained:
    """Cohorts' results as one, rows in the order of ``ids``."""
    where = {i: j for j, i in enumerate(i for c in cohorts for i in c.ids)}
    order = [where[i] for i in ids]

    def join(rows: list[Tensor]) -> Tensor:
        single = [
            row for some in rows for row in some.split(1)
        ]  # put in order before the copy, not after it
        return torch.cat([single[j] for j in order])

    def joins(name: str) -> dict[str, Tensor]:
        return {k: join([getattr(c, name)[k] for c in cohorts]) for k in getattr(cohorts[0], name)}

    return Trained(
        ids=ids,
        rows=join([c.rows for c in cohorts]),
        n=join([c.n for c in cohorts]),
        steps=join([c.steps for c in cohorts]),
        effective=join([c.effective for c in cohorts]),
        loss=join([c.loss for c in cohorts]),
        buffers=joins("buffers"),
        state=joins("state"),
        uploads=joins("uploads"),
        notes=join_notes([c.notes for c in cohorts]),
    )


def join_notes(notes: list[pd.DataFrame | None]) -> pd.DataFrame | None:
    there = [n for n in notes if n is not None]
    return (
        pd.concat(there).sort_values("client", kind="stable", ignore_index=True) if there else None
    )
