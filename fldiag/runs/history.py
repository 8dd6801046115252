"""What a diagnostic of a whole run sees: the weights of every stored round, the model and the federation's data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
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
from fldiag.problem.problem import Problem
from fldiag.results.provenance import digest
from fldiag.results.table import Row
from fldiag.runs.given import UNTESTED
from fldiag.runs.open_problem import (
    build_module,
    check_code,
    load_dataset,
    load_examples,
    load_partition,
    merges,
)
from fldiag.runs.pool import CohortScores, ExamplePool, Weights, evaluate, stacked
from fldiag.runs.round_weights import RoundReader, Stored, first_readable, ranges, sha256
from fldiag.runs.run import Run
from fldiag.sections import Normalise

UNDEALT = "the run does not say which examples belong to which client"
ALONE = "holds weights alone: it was recorded without data, or its targets are not one label (or one row of numbers) an example"
BARE = "drift and lora compare the weights; for the rest give such data with the question: --data, or fldiag.load(RUN, data=...)"
RECEIVED = "give what the clients received: fldiag convert … --global-pattern PATTERN"
GLOBALS_ALONE = "it is of global models alone: ask spectrum, landscape or paths, and its metrics (fldiag report)"
#: Which rounds a diagnostic takes: those with client weights (True), all (False), or all if at least one has them.
Clients = bool | Literal["some"]
#: How a note ends that says which clients the partition lacks.
OUTSIDE = ": left out, as nothing says which examples are theirs"
REMEDY = (
    "train with client weights in the checkpoints: fldiag train … --set checkpoint.clients=sampled"
)
DEAL = "give them when the run is made: fldiag convert … --partition FILE (account: or take --slice test)"


class History:
    """Stored rounds of a federation, read one at a time: memory holds the weights of one round.

    Weights of any origin will do; ``History.of`` reads a run. ``notes`` says, after the rounds were read, what was missing or
    unreadable, as rows of a table, and ``read`` which were read.

    Args:
        module: the model; it is copied.
        dataset: the federation's data; None where only weights are known: what needs examples is then refused.
        parts: the training examples of every client (indices).
        rounds: number -> what reads it.
        name: what tables and pictures call it.
        labels: columns of every table, such as method and seed.
        shares: how the server weighs clients: by examples, equally, or by full minibatches of ``batch_size``.
        batch_size: of local training.
        samples: at most so many examples a client and a class mixture (see ``ExamplePool``).
        stack: evaluate models side by side: auto, on or off.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: in which everything is evaluated.
        memory: as for ``Problem``.
        files: name -> sha256 of what the weights are read from, which then tells histories apart.
        notes: what is known to be missing.
        steps: round -> what training recorded of its local steps.

    Raises:
        FldiagError: model, data and options do not fit each other.
    """

    #: How to make it again: the run's folder, the options of ``of``, and the code that may be imported for it; None where it was
    #: made otherwise.
    recipe: tuple[Path, dict[str, Any], frozenset[str]] | None = None
    #: The run that ``of`` read.
    run: Run | None = None

    def __init__(
        self,
        module: nn.Module,
        dataset: Dataset | None,
        parts: Sequence[np.ndarray],
        rounds: Mapping[int, Callable[[], Stored]],
        *,
        name: str = "",
        labels: Mapping[str, Any] | None = None,
        shares: Literal["n", "uniform", "batches"] = "n",
        batch_size: int = 1,
        samples: int | None = None,
        stack: Literal["auto", "on", "off"] = "auto",
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        memory: int = 2 * 2**30,
        files: Mapping[str, str | None] | None = None,
        notes: Sequence[str] = (),
        steps: Callable[[int], pd.DataFrame | None] | None = None,
    ):
        if stack not in ("auto", "on", "off"):
            raise FldiagError(
                f"stack = {stack!r} is not one of auto, on, off", "choose one of them", usage=True
            )
        self.device, self.dtype, self.parts = (
            torch.device(device_of(device, dtype)),
            dtype,
            list(parts),
        )
        self.network = Network(module)
        self.network.module.to(self.device, dtype).eval()
        self.network.buffers = {n: self._place(b) for n, b in self.network.buffers.items()}
        self.layout, self.labels = self.network.layout, dict(labels or {})
        self.shares, self.batch_size, self.samples, self.memory = (
            shares,
            batch_size,
            samples,
            int(memory),
        )
        self._dataset = dataset
        self._shared: dict[str, Any] = {}  # of the problems, which have model and loss in common
        self._pool = (
            None
            if dataset is None
            else ExamplePool(dataset, self.parts, samples, self.device, dtype)
        )
        self.stack: str = stack
        self.name, self.files = name, dict(files or {})
        self._rounds, self._remarks, self._steps = dict(sorted(rounds.items())), tuple(notes), steps
        self.remedy = REMEDY
        # whether rounds may hold what clients received and made
        self.keeps_clients = True
        # clients between others that the partition lacks
        self.outside: frozenset[int] = frozenset()
        # test examples of every client, where it has such of its own
        self.test_parts: Sequence[np.ndarray] | None = None
        # why only weights are known, and what to do
        # the section ``train`` of the run's config, as far as it is known
        self.training: dict[str, Any] = {}
        # numbers of training examples, where the partition is not known
        self.examples: dict[int, int] = {}
        self.notes: list[dict[str, Any]] = []
        self.read: list[int] = []
        self._current: tuple[int, Stored] | None = None

    def __reduce__(self) -> Any:
        """A worker reads the run itself: its weights are on the disk."""
        return super().__reduce__() if self.recipe is None else (_reopen, self.recipe)

    def __repr__(self) -> str:
        n = len(self._rounds)
        return f"History({self.name!r}, {n} round{'s' * (n != 1)}, {len(self.parts)} clients, {self.layout.size:,} parameters)"

    @staticmethod
    def of(
        run: Run,
        *,
        rounds: Sequence[int] | None = None,
        samples: int | None = None,
        stack: Literal["auto", "on", "off"] = "auto",
        device: str = "auto",
        dtype: torch.dtype = torch.float32,
        memory: int = 2 * 2**30,
        root: str | None = None,
        download: bool = False,
        normalise: Normalise | None = None,
        model: Any = None,
        data: Any = None,
        name: str | None = None,
    ) -> History:
        """The stored rounds of a run (``rounds``: only these). ``model``, ``data`` (seen as ``normalise``
        says): instead of those the run names.

        Raises FldiagError when no round can be read, or a round asked for was never stored.
        """
        absent = sorted(set(rounds or ()) - set(run.some_rounds()))
        if absent:
            raise FldiagError(
                f"run {run.path} has no checkpoint of round {absent[0]}",
                f"it has {ranges(run.rounds)}",
                usage=True,
            )
        numbers = sorted(set(rounds)) if rounds is not None else run.rounds
        if rounds is None and any(numbers):
            numbers = [r for r in numbers if r]  # round 0 is before training
        first = first_readable(run, numbers, model, load_examples(data))
        check_code(first)
        model_name = model if model is not None else first.config.get("model", {}).get("name")
        # a model that fldiag knows by its name is built for the data
        built_for_data = isinstance(model_name, str) and ":" not in model_name
        weights_alone = (
            bool(run.origin)
            and data is None
            and "name" not in first.config.get("data", {})
            and not built_for_data
        )
        dataset = None if weights_alone else load_dataset(first, root, download, normalise)
        module = build_module(first, dataset)
        if merges(module):
            raise FldiagError(
                "eval() of the model rewrites its weights (adapters that merge), so that it is not what the stored weights say",
                "give the model with adapters that do not merge",
            )
        parts = load_partition(first, dataset)
        config = first.config
        train = config.get("train", {})
        reader = RoundReader(run, module, device_of(device, dtype), dtype)
        notes = []
        if parts is None:
            parts = [np.empty(0, dtype=np.int64)] * int(run.about["config"]["clients"]["total"])
            notes.append(f"{UNDEALT}: what needs them is left out")
        origin = run.origin.get("notes", [])
        if dataset is not None and not dataset.tested and UNTESTED not in origin:
            notes.append(UNTESTED)
        history = History(
            module,
            dataset,
            parts,
            {r: lambda r=r: reader(r) for r in numbers},  # type: ignore[misc]
            name=name or run.path.name,
            labels={
                "method": str(first.config["method"].get("name")),
                "seed": first.manifest["seed"],
            },
            samples=samples,
            stack=stack,
            device=device,
            dtype=dtype,
            memory=memory,
            shares=train.get("aggregate", "n"),
            batch_size=int(train.get("batch_size", 1)),
            files={
                **{f"{r}": sha256(run.path / run.round_file(r)) for r in numbers},
                "metrics": run.metrics_digest,
                **{f: sha256(run.path / f) for f in run.files if f.startswith("steps/")},
            },
            steps=lambda r: run.steps(r) if r in run.recorded else None,
            notes=[*notes, *origin],
        )
        options = {
            "rounds": rounds,
            "samples": samples,
            "stack": stack,
            "device": device,
            "dtype": dtype,
            "memory": memory,
            "root": root,
            "normalise": normalise,
            "model": model,
            "data": data,
            "name": name,
        }
        history.recipe = run.path.absolute(), options, run.allow_code
        history.run = run
        history.training = dict(train)
        history.keeps_clients = (
            run.about["config"].get("checkpoint", {}).get("clients", "") != "none"
        )
        if "test_partition.npz" in run.files:
            history.test_parts = partition.load_parts(run.verified("test_partition.npz"))
        if run.origin:
            history.examples, history.remedy, history.outside = (
                run.origin["examples"],
                RECEIVED if history.parts else GLOBALS_ALONE,
                frozenset(run.origin["outside"]),
            )
        return history

    # -- the rounds

    @property
    def rounds(self) -> list[int]:
        """The numbers of the rounds that there are."""
        return list(self._rounds)

    def each(
        self, progress: Callable[[int, int, str], None] | None = None, *, clients: bool = True
    ) -> Iterator[Stored]:
        """The rounds that can be read, in order; ``notes`` grows by those that cannot.

        Raises FldiagError when none can be read, or, with ``clients``, none has what the clients received and made.
        """
        self.notes, self.read, usable = [], [], 0
        complaint: FldiagError | None = None
        for text in self._remarks:
            self.note(None, text)
        for i, (r, read) in enumerate(self._rounds.items(), start=1):
            try:
                record = self._in_partition(read())
            except FldiagError as error:
                complaint = complaint or error
                self.note(r, error.what)
                continue
            finally:
                if progress:
                    progress(i, len(self._rounds), f"round {r}")
            for text in record.notes if clients else ():
                self.note(r, text)
            self.read.append(r)
            usable += record.complete
            yield record
        if not self.read:
            raise complaint or FldiagError(
                f"{self.name}: no stored round can be used", "see its run.json"
            )
        if clients and not usable:
            raise self._unusable("with client weights")

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
            FldiagError: no round can be read, or none has the client weights that are asked for.
        """

        def results(rounds: list[int]) -> Iterator[Any]:
            return workspace().map(
                _map_round,
                self,
                rounds,
                name=lambda r: f"round {r}",
                function=function,
                clients=clients,
                options=options,
            )

        return self._rows(results, every_round, clients)

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
            FldiagError: no round can be read, or none has what the clients received and made.
        """

        def of_round(record: Stored) -> list[Row]:
            results = workspace().map(
                _map_client,
                self,
                [(record.round, client) for client in record.ids],
                name=lambda item: f"round {item[0]}, client {item[1]}",
                function=function,
                options=options,
            )
            rows: list[Row] = []
            for client, result in zip(record.ids, results, strict=True):
                if isinstance(result, FldiagError):
                    self.note(record.round, f"client {client} is left out: {result.what}", client)
                    continue
                self.notes += result["notes"]
                rows += [{"client": client, "scope": "client", **row} for row in result["rows"]]
            return rows

        return self.each_round(of_round, every_round=every_round)

    def each_round(
        self,
        function: Callable[[Stored], list[Row]],
        *,
        every_round: bool | None = False,
        clients: Clients = True,
    ) -> list[Row]:
        """The rows ``function(stored)`` of the stored rounds, one after the other in this process.

        Args:
            function: the rows of one round. It may itself map what the round consists of (``workspace().map``).
            every_round: all rounds; else the last one.
            clients: as of ``map_rounds``.

        Returns:
            The rows, in the order of the rounds.

        Raises:
            FldiagError: no round can be read, or none has what it takes.
        """

        def of_round(round: int) -> dict[str, Any] | FldiagError:
            try:
                record = self.stored(round)
            except FldiagError as error:
                return error
            notes, self.notes = self.notes, []
            try:
                return _of_round(self, record, clients, lambda: function(record))
            finally:
                self.notes = notes

        def results(rounds: list[int]) -> Iterator[Any]:
            for i, r in enumerate(rounds):
                with workspace().part(i, len(rounds), f"round {r}" if len(rounds) > 1 else ""):
                    yield of_round(r)

        return self._rows(results, every_round, clients)

    def _rows(
        self,
        results: Callable[[list[int]], Iterator[Any]],
        every_round: bool | None,
        clients: Clients,
    ) -> list[Row]:
        """The rows of what ``_map_round`` says of every round, and its notes as this history's."""
        if clients and not self.keeps_clients:
            raise self._unusable("with client weights")
        if every_round:
            rounds, self.notes, self.read = self.rounds, [], []
            for text in self._remarks:
                self.note(None, text)
        else:
            rounds = [self.last(clients=bool(clients)).round]
        rows: list[Row] = []
        complaint: FldiagError | None = None
        is_usable = False
        for r, result in zip(rounds, results(rounds), strict=True):
            if isinstance(result, FldiagError):
                complaint = complaint or result
                self.note(r, result.what)
                continue
            if every_round:
                self.read.append(r)
                for text in result["remarks"]:
                    self.note(r, text)
            self.notes += result["notes"]
            is_usable = is_usable or result["is_usable"]
            rows += [{"round": r, **row} for row in result["rows"]]
        if not self.read:
            raise complaint or FldiagError(
                f"{self.name}: no stored round can be used", "see its run.json"
            )
        if not is_usable:
            raise self._unusable("with client weights")
        return rows

    def stored(self, round: int) -> Stored:
        """One round; the last one read stays in memory."""
        current = self._current
        if current is None or current[0] != round:
            current = self._current = round, self._in_partition(self._rounds[round]())
        return current[1]

    def apart(self) -> History:
        """The same history with notes of its own: an executor's threads use it beside this one."""
        other = object.__new__(type(self))
        vars(other).update({**vars(self), "notes": []})
        return other

    def _in_partition(self, record: Stored) -> Stored:
        """The round without the clients of which the partition says nothing: there are no examples of theirs to look at."""
        rows = [
            j for j, k in enumerate(record.ids) if k < len(self.parts) and k not in self.outside
        ]
        if len(rows) == len(record.ids):
            return record
        lacking = [str(k) for j, k in enumerate(record.ids) if j not in rows]
        text = f"client {', '.join(lacking)} is not in the partition of {len(self.parts)} clients{OUTSIDE}"
        record = replace(record.of(rows), notes=(*record.notes, text))
        return record if rows else replace(record, clients=None)

    def last(self, *, clients: bool = True) -> Stored:
        """The last round that has received and trained weights (without ``clients``: any); ``notes``: what was passed over."""
        self.notes, self.read = [], []
        for r in reversed(self._rounds):
            try:
                record = self._in_partition(self._rounds[r]())
            except FldiagError as error:
                self.note(r, error.what)
                continue
            for text in record.notes if clients else ():
                self.note(r, text)
            if record.complete or not clients:
                self.read, self._current = [r], (r, record)
                return record
        raise self._unusable("with client weights" if clients else "that can be used")

    def _unusable(self, kind: str) -> FldiagError:
        lacking = next((n["note"] for n in self.notes if str(n["note"]).endswith(OUTSIDE)), None)
        if lacking is None:
            return FldiagError(f"{self.name} holds no round {kind}", self.remedy)
        return FldiagError(
            f"{self.name} holds no round {kind} of clients in the partition: {lacking}",
            "make the run again with the partition of these clients: fldiag convert … --partition FILE, or "
            "fldiag.Recorder(..., clients=...)",
        )

    def steps(self, round: int) -> pd.DataFrame | None:
        """What training recorded of the local steps of a round (see ``Run.steps``); None when it recorded nothing."""
        if self._steps is None:
            return None
        try:
            return self._steps(round)
        except FldiagError as error:
            self.note(round, error.what)
            return None

    def note(self, round: int | None, text: str, client: int | None = None) -> None:
        """Remember that something is missing."""
        self.notes.append(
            {"metric": "missing", "round": round, "client": client, "note": text, "masked": True}
        )

    def finite(self, record: Stored) -> Stored:
        """The round without the clients whose weights are not numbers, which are noted."""
        finite = record.finite()
        for k in record.ids:
            if k not in finite.ids:
                self.note(
                    record.round, f"the trained weights of client {k} are not finite: left out", k
                )
        return finite

    # -- the examples

    @property
    def alone(self) -> bool:
        """Whether only weights are known."""
        return self._dataset is None

    @property
    def dataset(self) -> Dataset:
        """The federation's data. Raises FldiagError where only weights are known."""
        if self._dataset is None:
            raise FldiagError(f"{self.name} {ALONE}", BARE, usage=True)
        return self._dataset

    @property
    def pool(self) -> ExamplePool:
        """All its examples. Raises FldiagError where only weights are known."""
        if self._pool is None:
            raise FldiagError(f"{self.name} {ALONE}", BARE, usage=True)
        return self._pool

    # -- computing

    @cached_property
    def is_stacked(self) -> bool:
        """Whether models are evaluated side by side."""
        return self._dataset is not None and stacked(self.network, self._dataset, self.stack)

    def evaluate(self, models: Sequence[Weights], *, test: bool = False) -> CohortScores:
        """The loss and the predictions of models, (weights [P], buffers) each, on all of the pool's examples, or on the ``test``
        split alone, which comes first."""
        return evaluate(
            self.network,
            self.pool,
            models,
            stack=self.is_stacked,
            first=self.pool.test.stop if test else None,
        )

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

    def problem(self, weights: Weights, where: slice | Tensor, name: str, **labels: Any) -> Problem:
        """The loss surface around weights on a stretch of the pool, or on some of its examples (indices)."""
        if not len(self.pool.y[where]) and not any(map(len, self.parts)):
            raise FldiagError(UNDEALT, DEAL)
        criterion = losses.criterion(self.dataset.regression, self.dataset.dense)
        problem = Problem(
            self.network.module,
            criterion,
            self.pool.take(where, name),
            *weights,
            name=self.name,
            dtype=self.dtype,
            device=self.device,
            memory=self.memory,
            labels={**self.labels, **labels},
        )
        problem.shared = self._shared
        return problem

    def final_rows(self) -> list[Row]:
        """Loss and accuracy of the last round's aggregated model on the split by which it is judged; none where there are no
        examples, or where the model gives no numbers."""
        if self.alone or not self.read:
            return []
        try:
            last = self.stored(self.read[-1])
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
        n = np.array([len(self.parts[k]) or self.examples.get(k, 0) for k in ids], dtype=float)
        p = {"n": n, "batches": n // self.batch_size, "uniform": np.ones_like(n)}[self.shares]
        return p / p.sum() if p.sum() else np.full(len(n), 1 / max(len(n), 1))

    @property
    def common(self) -> dict[str, Any]:
        """What stands in every row of this history's tables."""
        return {"run": self.name, **self.labels}

    def digest(self) -> str:
        """Changes when weights, model, data, partition or precision change; the name does not count."""
        weights: Any = sorted(self.files.items()) or [
            self._content(read) for read in self._rounds.values()
        ]
        return digest(
            weights,
            list(self._rounds),
            *self._data_fingerprint(),
            list(self.parts),
            self.samples,
            *self._sample_outputs(),
            repr(self.network.module),
            str(self.dtype),
            self.stack,
            self.labels,
            list(self._remarks),
            *([[[k, n] for k, n in sorted(self.examples.items())]] if self.examples else []),
            *([self.shares, self.batch_size] if self.shares != "n" else []),
            *([list(self.test_parts)] if self.test_parts is not None else []),
        )

    def _data_fingerprint(self) -> list[str]:
        return [] if self._dataset is None else [self._dataset.fingerprint()]

    def _sample_outputs(self) -> list[Tensor]:
        """What the model does also counts, not only how it is spelled."""
        if self._pool is None:
            return []
        w = torch.linspace(-0.1, 0.1, self.layout.size, device=self.device, dtype=self.dtype)
        x, _ = self._pool.read(0, min(4, self._pool.n))
        with torch.no_grad():
            return [
                self.network.bind(
                    w[None], {n: b[None].clone() for n, b in self.network.buffers.items()}
                )(x[None])
            ]

    @staticmethod
    def _content(read: Callable[[], Stored]) -> Any:
        try:
            return {k: v for k, v in vars(read()).items() if v is not None}
        except FldiagError as error:
            return error.what

    def _place(self, b: Tensor) -> Tensor:
        return b.to(self.device, self.dtype if b.is_floating_point() else b.dtype)


def _map_round(
    history: History,
    round: int,
    function: Callable[..., list[Row]],
    clients: Clients,
    options: dict[str, Any],
) -> dict[str, Any] | FldiagError:
    try:
        record = history.stored(round)
    except FldiagError as error:
        return error
    history = history.apart()
    return _of_round(history, record, clients, lambda: function(history, record, **options))


def _of_round(
    history: History, record: Stored, clients: Clients, compute: Callable[[], list[Row]]
) -> dict[str, Any]:
    """The rows of a round, what was missing, and whether it has the client weights that are asked for."""
    is_usable = record.complete or not clients
    is_measured = is_usable or clients == "some"
    return {
        "remarks": list(record.notes) if clients else [],
        "is_usable": is_usable,
        "rows": compute() if is_measured else [],
        "notes": history.notes,
    }


def _map_client(
    history: History,
    item: tuple[int, int],
    function: Callable[..., list[Row]],
    options: dict[str, Any],
) -> dict[str, Any] | FldiagError:
    """The rows of a client, and what was missing."""
    round, client = item
    record = history.stored(round)
    history = history.apart()
    try:
        return {"rows": function(history, record, client, **options), "notes": history.notes}
    except FldiagError as error:
        return error


def _reopen(path: Path, options: dict[str, Any], allow_code: frozenset[str]) -> History:
    return History.of(Run.open(path).allow(allow_code), **options)
