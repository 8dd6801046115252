"""What a diagnostic of a whole run sees: the weights of every stored round, the model and the federation's data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fldiag import losses
from fldiag.data import Dataset, partition
from fldiag.device import device_of
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.models.network import Network
from fldiag.models.state_dict import fit
from fldiag.problem.problem import Problem
from fldiag.results.provenance import digest
from fldiag.results.table import Row
from fldiag.runs.checkpoint import Checkpoint
from fldiag.runs.given import UNTESTED
from fldiag.runs.open_problem import (
    build_module,
    check_code,
    check_merging,
    load_dataset,
    load_examples,
    load_partition,
)
from fldiag.runs.pool import CohortScores, ExamplePool, Weights, evaluate, stacked
from fldiag.runs.run import Run
from fldiag.sections import Normalise

Buffers = dict[str, Tensor]
#: Which rounds a diagnostic takes: those with client weights (True), all (False), or all if at least one has them.
Clients = bool | Literal["some"]
UNDEALT = "the run does not say which examples belong to which client"


@dataclass(frozen=True)
class Stored:
    """The weights of one round: ``received`` [P] by the clients, ``clients`` [K, P] after training in the order of
    ``ids``, ``aggregated`` [P]. ``buffers`` go with ``aggregated``, ``client_buffers`` [K, ...] with ``clients``,
    ``received_buffers`` with ``received`` (None: not known, so the received model cannot be evaluated).

    ``starts`` [K, P] and ``start_buffers``: what each client received, where that differs; ``received`` is then the last global
    model."""

    round: int
    aggregated: Tensor
    ids: tuple[int, ...] = ()
    clients: Tensor | None = None
    received: Tensor | None = None
    buffers: Buffers = field(default_factory=dict)
    client_buffers: Buffers = field(default_factory=dict)
    received_buffers: Buffers | None = None
    starts: Tensor | None = None
    start_buffers: Buffers = field(default_factory=dict)

    @property
    def lacks(self) -> str:
        """What is missing of received and trained weights that can be evaluated."""
        if self.clients is None:
            return "no client weights in this round"
        if self.received is None:
            return "what the clients received is not there"
        before = f"the buffers that clients received are those of round {self.round - 1}, which is not there"
        return before if self.received_buffers is None else ""

    @property
    def complete(self) -> bool:
        """Whether received and trained weights are there and can be evaluated."""
        return not self.lacks

    def client(self, j: int) -> Weights:
        """Row j of the clients with its buffers."""
        assert self.clients is not None
        return self.clients[j], {n: b[j] for n, b in self.client_buffers.items()} or self.buffers

    @property
    def start(self) -> Weights:
        """What the clients received, with its buffers."""
        assert self.received is not None and self.received_buffers is not None
        return self.received, self.received_buffers

    def start_of(self, j: int) -> Weights:
        """What row j of the clients received, with its buffers."""
        if self.starts is None:
            return self.start
        return self.starts[j], {**self.start[1], **{n: b[j] for n, b in self.start_buffers.items()}}

    @property
    def moved(self) -> Tensor:
        """How far each client moved from what it received, [K, P]."""
        assert self.clients is not None and self.received is not None
        return self.clients - (self.received if self.starts is None else self.starts)

    def finite(self) -> Stored:
        """The round without the clients whose weights are not numbers; the same object where there are none of them."""
        assert self.clients is not None
        rows = torch.isfinite(self.clients).all(1).nonzero().flatten().tolist()
        if len(rows) == len(self.ids):
            return self
        return replace(
            self,
            ids=tuple(self.ids[j] for j in rows),
            clients=self.clients[rows],
            client_buffers={n: b[rows] for n, b in self.client_buffers.items()},
            starts=None if self.starts is None else self.starts[rows],
            start_buffers={n: b[rows] for n, b in self.start_buffers.items()},
        )


class History:
    """Stored rounds of a federation, read one at a time: memory holds the weights of one round.

    ``History.of`` reads a run. ``notes`` says, after a diagnostic, what was missing, as rows of a table.

    Args:
        run: where the rounds are read.
        module: the model; it is copied.
        dataset: the federation's data; None where only weights are known: what needs examples is then refused.
        parts: the training examples of every client (indices).
        rounds: the numbers of the rounds, by default of all.
        name: what tables and pictures call it, by default as the run.
        samples: at most so many examples a client and a class mixture (see ``ExamplePool``).
        stack: evaluate models side by side: auto, on or off.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: in which everything is evaluated.
        memory: as for ``Problem``.
        notes: what is known to be missing.

    Raises:
        FldiagError: model, data and options do not fit each other.
    """

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        dataset: Dataset | None,
        parts: Sequence[np.ndarray],
        *,
        rounds: Sequence[int] | None = None,
        name: str | None = None,
        samples: int | None = None,
        stack: str = "auto",
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        memory: int = 2 * 2**30,
        notes: Sequence[str] = (),
    ):
        self.device, self.dtype, self.memory = (
            torch.device(device_of(device, dtype)),
            dtype,
            int(memory),
        )
        self.network = Network(module)
        self.network.module.to(self.device, dtype).eval()
        self.network.buffers = self._place(self.network.buffers)
        self.layout = self.network.layout
        self.parts, self.samples = list(parts), samples
        self.rounds = run.rounds if rounds is None else sorted(rounds)
        self.run, self.name = run, name or run.name
        self.labels = {k: v for k, v in run.common.items() if k != "run"}
        #: The section ``train`` of the run's config, as far as it is known.
        self.training = dict(run.about["config"].get("train", {}))
        #: Test examples of every client, where it has such of its own.
        self.test_parts: Sequence[np.ndarray] | None = None
        if "test_partition.npz" in run.files:
            self.test_parts = partition.load_parts(run.verified("test_partition.npz"))
        self._pool = None
        if dataset is not None:
            self._pool = ExamplePool(dataset, self.parts, samples, self.device, dtype)
        self.stack: str = stack
        self._remarks = tuple(notes)
        self._current: Stored | None = None
        self.notes: list[Row] = []

    def __repr__(self) -> str:
        n = len(self.rounds)
        return f"History({self.name!r}, {n} round{'s' * (n != 1)}, {len(self.parts)} clients, {self.layout.size:,} parameters)"

    @staticmethod
    def of(
        run: Run,
        *,
        rounds: Sequence[int] | None = None,
        root: str | None = None,
        download: bool = False,
        normalise: Normalise | None = None,
        model: Any = None,
        data: Any = None,
        name: str | None = None,
        device: str = "auto",
        **options: Any,
    ) -> History:
        """The stored rounds of a run (``rounds``: only these). ``model``, ``data`` (seen as ``normalise`` says): instead of those
        the run names. ``options``: samples, stack, dtype and memory, as above.

        Raises FldiagError when a round cannot be read or was never stored, and when model or data are not known.
        """
        numbers = sorted(set(run.some_rounds() if rounds is None else rounds))
        if rounds is None and numbers[-1]:
            numbers = [r for r in numbers if r]  # round 0 is before training
        absent = [r for r in numbers if r not in run.rounds]
        first = run.checkpoint((absent or numbers)[0])  # says so of one that was never stored
        source = load_examples(first.data if data is None else data)
        first = replace(first, model=first.model if model is None else model, data=source)
        check_code(first)
        is_bare = bool(run.origin) and source is None and "name" not in first.config["data"]
        dataset = None if is_bare else load_dataset(first, root, download, normalise)
        module = build_module(first, dataset)
        check_merging(module)
        parts, notes = load_partition(first, dataset), list(run.origin.get("notes", []))
        if parts is None:
            parts = [np.empty(0, dtype=np.int64)] * int(run.about["config"]["clients"]["total"])
            notes.insert(0, f"{UNDEALT}: what needs them is left out")
        if dataset is not None and not dataset.tested and UNTESTED not in notes:
            notes.append(UNTESTED)
        return History(
            run,
            module,
            dataset,
            parts,
            rounds=numbers,
            name=name,
            device=device,
            notes=notes,
            **options,
        )

    # -- the rounds

    def stored(self, round: int) -> Stored:
        """One round; the last one read stays in memory. Raises FldiagError when its file is missing or was changed."""
        if self._current is None or self._current.round != round:
            self._current = self._read(round)
        return self._current

    def _read(self, r: int) -> Stored:
        run = self.run
        c = run.checkpoint(r)
        aggregated, buffers = self._state(c)
        if c.clients is not None and c.clients.shape[1:] != (self.layout.size,):
            raise FldiagError(
                f"round {r}: client weights of shape {list(c.clients.shape)} do not fit the model",
                "give the model of this very architecture",
            )
        before = self._current
        received_buffers: Buffers | None = None
        if not buffers or (r == 1 and 0 not in run.rounds):
            received_buffers = dict(self.network.buffers)
        elif before is not None and before.round == r - 1:
            received_buffers = before.buffers
        elif r - 1 in run.rounds:
            received_buffers = self._state(run.checkpoint(r - 1))[1]
        return Stored(
            r,
            aggregated,
            tuple(c.client_ids),
            self._place(c.clients),
            self._place(c.received),
            buffers,
            self._place(c.buffers),
            received_buffers,
            self._place(c.starts),
            self._place(c.start_buffers),
        )

    def _state(self, c: Checkpoint) -> tuple[Tensor, Buffers]:
        state, _ = fit(c.state, self.network.module)
        buffers = {n: state.get(n, b) for n, b in self.network.buffers.items()}
        return self.layout.row(state).to(self.device, self.dtype), self._place(buffers)

    def _place(self, value: Any) -> Any:
        if value is None or isinstance(value, Mapping):
            return value and {name: self._place(t) for name, t in value.items()}
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)

    def each(self) -> Iterator[Stored]:
        """The rounds in order; ``notes`` says of which received or trained weights are missing.

        Raises FldiagError when all lack them.
        """
        self._begin()
        is_usable = False
        for r in self.rounds:
            stored = self.stored(r)
            self.notes += _lack(stored)
            is_usable |= stored.complete
            yield stored
        if not is_usable:
            raise self._unusable()

    def map_rounds(
        self,
        function: Callable[..., list[Row]],
        *,
        every_round: bool | None = True,
        clients: Clients = True,
        **options: Any,
    ) -> list[Row]:
        """The rows ``function(history, stored, **options)`` of the stored rounds, wherever the workspace computes.

        Args:
            function: the rows of one round, which does not depend on others; found by its name in a module. It may note what is
                missing (``History.note``); ``notes`` are those of the last call.
            every_round: all rounds; else the last one.
            clients: only rounds with what the clients received and made; False: all rounds; "some": all, of which one at
                least has it.
            options: further arguments of the function.

        Returns:
            The rows, in the order of the rounds.

        Raises:
            FldiagError: a round cannot be read, or none has the client weights that are asked for.
        """
        rounds = self._begin() if every_round else [self.last(clients=bool(clients)).round]
        return self._map([(r, None) for r in rounds], function, clients, options)

    def map_clients(
        self,
        function: Callable[..., list[Row]],
        *,
        every_round: bool | None = False,
        **options: Any,
    ) -> list[Row]:
        """The rows ``function(history, stored, client, **options)`` of every client of the stored rounds, wherever the workspace
        computes.

        Args:
            function: the rows of one client, which does not depend on others; found by its name in a module. A FldiagError that
                it raises leaves the client out, with a note.
            every_round: all rounds; else the last one with client weights.
            options: further arguments of the function.

        Returns:
            The rows, in the order of rounds and clients.

        Raises:
            FldiagError: a round cannot be read, or none has what the clients received and made.
        """

        records = self.each() if every_round else [self.last()]
        units = [(s.round, k) for s in records if s.complete for k in s.ids]
        return self._map(units, function, True, options)

    def _map(
        self,
        units: Sequence[tuple[int, int | None]],
        function: Callable[..., list[Row]],
        clients: Clients,
        options: dict[str, Any],
    ) -> list[Row]:
        """The rows of rounds, or of clients in rounds."""
        results = workspace().map(
            _rows_of,
            self,
            units,
            name=lambda u: f"round {u[0]}" + ("" if u[1] is None else f", client {u[1]}"),
            function=function,
            clients=clients,
            options=options,
        )
        rows: list[Row] = []
        is_usable = not clients
        for part, notes, is_complete in results:
            rows += part
            self.notes += notes
            is_usable |= is_complete
        if not is_usable:
            raise self._unusable()
        return rows

    def each_round(
        self, function: Callable[[Stored], list[Row]], *, every_round: bool | None = False
    ) -> list[Row]:
        """The rows ``function(stored)`` of the stored rounds with client weights, one after the other in this process.

        Args:
            function: the rows of one round. It may itself map what the round consists of (``workspace().map``).
            every_round: all rounds; else the last one.

        Returns:
            The rows, in the order of the rounds.

        Raises:
            FldiagError: a round cannot be read, or none has what it takes.
        """
        rows: list[Row] = []
        for stored in self.each() if every_round else [self.last()]:
            part = function(stored) if stored.complete else []
            rows += [{"round": stored.round, **row} for row in part]
        return rows

    def last(self, *, clients: bool = True) -> Stored:
        """The last round that has received and trained weights (without ``clients``: any); ``notes``: what was passed over."""
        self.notes = []
        for r in reversed(self.rounds):
            stored = self.stored(r)
            if stored.complete or not clients:
                return stored
            self.notes += _lack(stored)
        raise self._unusable()

    def _begin(self) -> list[int]:
        self.notes = []
        for text in self._remarks:
            self.note(None, text)
        return self.rounds

    def _unusable(self) -> FldiagError:
        return FldiagError(
            f"{self.name} holds no round with client weights",
            "train with --set checkpoint.clients=sampled, or record what clients received and made",
        )

    def steps(self, round: int) -> pd.DataFrame | None:
        """What training recorded of the local steps of a round (see ``Run.steps``); None when it recorded nothing."""
        return self.run.steps(round) if round in self.run.recorded else None

    def note(self, round: int | None, text: str, client: int | None = None) -> None:
        """Remember that something is missing."""
        self.notes.append(_note(round, text, client))

    def finite(self, stored: Stored) -> Stored:
        """The round without the clients whose weights are not numbers, which are noted."""
        finite = stored.finite()
        for k in sorted(set(stored.ids) - set(finite.ids)):
            text = f"the trained weights of client {k} are not finite: left out"
            self.note(stored.round, text, k)
        return finite

    # -- the examples

    @property
    def alone(self) -> bool:
        """Whether only weights are known."""
        return self._pool is None

    @property
    def pool(self) -> ExamplePool:
        """All its examples. Raises FldiagError where only weights are known."""
        if self._pool is None:
            raise FldiagError(
                f"{self.name} holds weights alone: it was recorded without data",
                "drift and lora compare the weights; for the rest give data: --data, or fldiag.load(RUN, data=...)",
                usage=True,
            )
        return self._pool

    @cached_property
    def is_stacked(self) -> bool:
        """Whether models are evaluated side by side."""
        return stacked(self.network, self.dataset, self.stack)

    @property
    def dataset(self) -> Dataset:
        """The federation's data. Raises FldiagError where only weights are known."""
        return self.pool.dataset

    def stretch(self, name: str) -> slice:
        """Where the examples of ``test``, or of ``train`` (those of all clients), lie in the pool. Raises FldiagError where there
        are none of test."""
        if name == "test" and not self.dataset.tested:
            raise FldiagError(
                f"{self.name} has no test examples",
                "choose --slice train, or give data with a test split: --data",
                usage=True,
            )
        return self.pool.test if name == "test" else self.pool.clients

    # -- computing

    def evaluate(self, models: Sequence[Weights], *, test: bool = False) -> CohortScores:
        """The loss and the predictions of models, (weights [P], buffers) each, on all of the pool's examples, or on the ``test``
        split alone, which comes first."""
        first = self.pool.test.stop if test else None
        return evaluate(self.network, self.pool, models, stack=self.is_stacked, first=first)

    def problem(self, weights: Weights, where: slice | Tensor, name: str, **labels: Any) -> Problem:
        """The loss surface around weights on a stretch of the pool, or on some of its examples (indices)."""
        if not any(map(len, self.parts)) and not len(self.pool.y[where]):
            raise FldiagError(UNDEALT, "give them when the run is made: clients=, --partition FILE")
        return Problem(
            self.network.module,
            losses.criterion(self.dataset.regression, self.dataset.dense),
            self.pool.take(where, name),
            *weights,
            name=self.name,
            dtype=self.dtype,
            device=self.device,
            memory=self.memory,
            labels={**self.labels, **labels},
        )

    def final_rows(self) -> list[Row]:
        """Loss and accuracy of the last round's aggregated model on the split by which it is judged; none where there are no
        examples, or where the model gives no numbers."""
        if self.alone:
            return []
        try:
            last = self.stored(self.rounds[-1])
            problem = self.problem(
                (last.aggregated, last.buffers),
                self.pool.test,
                self.pool.split,
                round=last.round,
                moment="aggregated",
                scope="global",
            )
            return [{**problem.common, **row} for row in problem.centre.rows(problem)]
        except FldiagError:  # a diverged run still has weights to compare
            return []

    def weights(self, ids: Sequence[int]) -> np.ndarray:
        """The aggregation weights [K] of these clients (they sum to 1), by the rule that the run's config names."""
        n = np.array([len(self.parts[k]) for k in ids], dtype=float)
        rule, size = self.training.get("aggregate", "n"), self.training.get("batch_size", 1)
        p = {"n": n, "batches": n // size, "uniform": np.ones_like(n)}[rule]
        return p / p.sum() if p.sum() else np.full(len(n), 1 / max(len(n), 1))

    @property
    def common(self) -> dict[str, Any]:
        """What stands in every row of this history's tables."""
        return {"run": self.name, **self.labels}

    @property
    def files(self) -> dict[str, str]:
        """Number or name -> sha256 of what a run's rounds are read from. Raises FldiagError for a file that was changed."""
        names = {str(r): self.run.round_file(r) for r in self.rounds}
        names |= {name: name for name in self.run.files if name.startswith("steps/")}
        for name in names.values():
            self.run.verified(name)
        return {key: self.run.files[name] for key, name in names.items()}

    def digest(self) -> str:
        """Changes when weights, model, data, partition or precision change; the name does not count."""
        outputs: list[Any] = []
        if self._pool is not None:  # what the model does also counts, not only how it is spelled
            w = torch.linspace(-0.1, 0.1, self.layout.size, device=self.device, dtype=self.dtype)
            buffers = {n: b[None].clone() for n, b in self.network.buffers.items()}
            x = self._pool.read(0, min(4, self._pool.n))[0]
            with torch.no_grad():
                z = self.network.bind(w[None], buffers)(x[None])
            outputs = [self._pool.dataset.fingerprint(), z]
        return digest(
            self.files,
            self.rounds,
            outputs,
            self.parts,
            self.test_parts,
            self.samples,
            repr(self.network.module),
            str(self.dtype),
            self.stack,
            self.labels,
            self.training,
            self._remarks,
        )


def _note(round: int | None, text: str, client: int | None = None) -> Row:
    return {"metric": "missing", "round": round, "client": client, "note": text, "masked": True}


def _lack(stored: Stored) -> list[Row]:
    """The note on a round that lacks weights; round 0 is before the first."""
    return [_note(stored.round, stored.lacks)] if stored.lacks and stored.round else []


def _rows_of(
    history: History,
    unit: tuple[int, int | None],
    function: Callable[..., list[Row]],
    clients: Clients,
    options: dict[str, Any],
) -> tuple[list[Row], list[Row], bool]:
    """Rows and notes of a round, or of a client in it, and whether the round has client weights."""
    round, client = unit
    stored = history.stored(round)
    history = copy.copy(history)  # an executor's threads use it beside this one
    history.notes = _lack(stored) if clients else []
    rows: list[Row] = []
    base: Row = {"round": round}
    if client is not None:
        base |= {"client": client, "scope": "client"}
        try:
            rows = function(history, stored, client, **options)
        except FldiagError as error:
            history.note(round, f"client {client} is left out: {error.what}", client)
    elif stored.complete or clients is not True:
        rows = function(history, stored, **options)
    return [{**base, **row} for row in rows], history.notes, stored.complete
