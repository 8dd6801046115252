"""What a diagnostic of a whole run sees: the weights of every stored round, the model and the federation's data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.func import functional_call

from fldiag import losses
from fldiag.data.dataset import Dataset, Slice, spread, take
from fldiag.device import device_of, threads
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.models import State, fit_weights
from fldiag.models.network import Network
from fldiag.params import Layout
from fldiag.problem.data import arguments, convert, cut
from fldiag.problem.problem import Problem
from fldiag.results.files import digest
from fldiag.results.table import Row, table
from fldiag.runs.checkpoint import Checkpoint
from fldiag.runs.open_problem import build_module, check_merging, load_dataset, load_parts
from fldiag.runs.run import Run

#: Examples in a batch of one model; as in training's own evaluation, so that the numbers are the run's.
BATCH = 500

Weights = tuple[Tensor, dict[str, Tensor]]  # a vector [P] and the buffers that go with it


@dataclass(frozen=True)
class ExampleScores:
    """What models do on the pool: ``loss`` [R, n] of each example, ``right`` [R, n] (None: no classes).

    A model with weights or outputs that are not a number has NaN losses and is not ``valid`` [R].
    """

    loss: np.ndarray
    right: np.ndarray | None
    valid: np.ndarray


class ExamplePool:
    """``x_raw`` and ``y`` of the test split and of every client's training examples, one after the other. Without test examples
    the training split stands first, under its own name.

    ``split``: the name of what stands first, "test" or "train"; ``test``: where that lies; ``clients``: where the training
    examples of all clients lie. ``segments``: "test" and "client:7/train" -> where they lie. ``samples``: at most so many test
    examples, and so many training examples of all clients together (each keeps its share, and its classes theirs).
    """

    def __init__(
        self,
        dataset: Dataset,
        parts: Sequence[np.ndarray],
        samples: int | None,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.dataset, self.device, self.dtype = dataset, device, dtype
        self.split = dataset.evaluation[0]
        total, slices = sum(map(len, parts)), [take(dataset, self.split, None, samples)]
        for k, n in enumerate(map(len, parts)):
            if n:
                count = max(1, round(min(samples or total, total) * n / total))
                slices.append(take(dataset, f"client:{k}", parts, count))
        ends = np.cumsum([s.n for s in slices]).tolist()
        self.segments = {s.name: slice(end - s.n, end) for s, end in zip(slices, ends, strict=True)}
        self.n, self.test = ends[-1], slice(0, ends[0])
        self.clients = slice(ends[0], self.n)
        self.x_raw, self.y = torch.cat([s.x_raw for s in slices]), torch.cat([s.y for s in slices])

    def train_slice(self, client: int) -> slice:
        """Where the client's training examples lie (an empty slice for a client without any)."""
        return self.segments.get(f"client:{client}/train", slice(self.n, self.n))

    def places(self, examples: np.ndarray) -> np.ndarray:
        """Where those of the test split's examples lie in the pool that it holds."""
        positions = spread(self.dataset.evaluation[2], self.test.stop).cpu().numpy()
        return np.flatnonzero(np.isin(positions, examples))

    def take(self, examples: slice | Tensor, name: str) -> Slice:
        """A segment of the pool, or some of its examples (indices), as a slice for a Problem."""
        y = self.y[examples]
        return Slice(name, len(y), self.x_raw[examples], y, self.dataset)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of examples start..stop-1, ready for a model."""
        x, y = self.dataset.normalise(self.x_raw[start:stop]), self.y[start:stop]
        return convert((x, y), self.dtype, self.device)  # type: ignore[no-any-return]

    def batches(self, where: slice, size: int, mixed: bool = True) -> Iterator[slice]:
        """The examples ``where`` in batches; without ``mixed``, no batch holds examples of two segments."""
        for part in [where] if mixed else self.segments.values():
            stop = min(part.stop, where.stop)
            for i in range(max(part.start, where.start), stop, size):
                yield slice(i, min(i + size, stop))


NOTHING = torch.empty(0)


@dataclass(frozen=True)
class Stored:
    """The weights of one round, and the buffers that go with them.

    Args:
        round: Its number.
        aggregated: The global weights after it, [P]; ``buffers`` go with them.
        ids: The clients whose weights are known and finite; none where it is not known what they received.
        clients: Their weights after training, [K, P], with ``client_buffers``, by name, each [K, ...].
        received: The global weights before training, [P], with ``received_buffers``.
        starts: What each client received, [K, P], where that differs; ``start_buffers`` go with it.
    """

    round: int
    aggregated: Tensor
    ids: tuple[int, ...] = ()
    clients: Tensor = NOTHING
    received: Tensor = NOTHING
    buffers: State = field(default_factory=dict)
    client_buffers: State = field(default_factory=dict)
    received_buffers: State = field(default_factory=dict)
    starts: Tensor | None = None
    start_buffers: State = field(default_factory=dict)

    def client(self, j: int) -> Weights:
        """Row j of the clients with its buffers."""
        return self.clients[j], {n: b[j] for n, b in self.client_buffers.items()} or self.buffers

    @property
    def start(self) -> Weights:
        """The global model that the clients received, with its buffers."""
        return self.received, self.received_buffers

    @property
    def end(self) -> Weights:
        """The aggregated model, with its buffers."""
        return self.aggregated, self.buffers

    def start_of(self, j: int) -> Weights:
        """What row j of the clients received, with its buffers."""
        own = {n: b[j] for n, b in self.start_buffers.items()}
        w = self.received if self.starts is None else self.starts[j]
        return w, {**self.received_buffers, **own}

    @property
    def moved(self) -> Tensor:
        """How far each client moved from what it received, [K, P]."""
        return self.clients - (self.received if self.starts is None else self.starts)


class History:
    """Stored rounds of a federation, read one at a time: memory holds the weights of one round.

    ``notes`` says, after a diagnostic, what was missing, as rows of a table.

    Args:
        run: The run.
        rounds: Only these; by default all but round 0, which is before training.
        root: Folder of the data.
        download: Whether the data may be fetched.
        normalise: How data that are given are seen (``fldiag.data.load``).
        samples: At most so many test examples, and about so many training examples of all clients together.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: In which everything is evaluated.
        memory: As for ``Problem``.

    Raises:
        FldiagError: A round cannot be read or was never stored, model or data are not known, or they do not fit each other.
    """

    def __init__(
        self,
        run: Run,
        *,
        rounds: Sequence[int] | None = None,
        root: str | None = None,
        download: bool = False,
        normalise: Any = None,
        samples: int | None = None,
        device: str | torch.device = "auto",
        dtype: torch.dtype = torch.float32,
        memory: int = 2 * 2**30,
    ):
        self.rounds = sorted(set(rounds or ())) or [r for r in run.rounds if r] or run.rounds
        # a round that was never stored is refused here
        first = run.checkpoint(next((r for r in self.rounds if r not in run.rounds), None))
        config, dataset = run.about["config"], None
        if first.data is not None or "name" in config["data"]:  # else only weights are known
            dataset = load_dataset(first, root, download, normalise)
        self.module = copy.deepcopy(build_module(first, dataset))
        check_merging(self.module)
        parts = load_parts(first, "partition.npz")
        notes = [*run.origin.get("notes", ())]
        if parts is None:
            parts = [np.empty(0, dtype=np.int64)] * int(config["clients"]["total"])
            notes.append("the run does not say which examples belong to which client")
        #: What every table says is missing.
        self.gaps = notes
        #: The training examples of every client; its own test examples, where it has such.
        self.parts, self.test_parts = list(parts), load_parts(first, "test_partition.npz")
        #: The section ``train`` of the run's config, as far as it is known.
        self.training = dict(config.get("train", {}))
        self.run, self.name, self.samples, self.memory = run, run.name, samples, memory
        self.device, self.dtype = torch.device(device_of(device, dtype)), dtype
        self.module.to(self.device, dtype).eval().requires_grad_(False)
        self.buffers = {n: b.detach().clone() for n, b in self.module.named_buffers()}
        self.layout = Layout.of(self.module)
        self._pool = None
        if dataset is not None:
            self._pool = ExamplePool(dataset, self.parts, samples, self.device, dtype)
        self._current: Stored | None = None
        self.notes: list[Row] = []

    def __repr__(self) -> str:
        return f"History({self.name!r}, {len(self.rounds)} rounds, {len(self.parts)} clients, {self.layout.size:,} parameters)"

    # The rounds

    def stored(self, round: int) -> Stored:
        """One round; the last one read stays in memory. Raises FldiagError when its file is missing or was changed."""
        if self._current is None or self._current.round != round:
            self._current = self._read(round)
        return self._current

    def _read(self, r: int) -> Stored:
        c, is_known = self.run.checkpoint(r), r - 1 in self.run.rounds
        aggregated, buffers = self._weights(c)
        is_lost = bool(buffers) and r != 1 and not is_known
        if c.clients is None or c.received is None or is_lost:
            return Stored(r, aggregated, buffers=buffers)
        before = self.buffers
        if buffers and is_known:
            before = self._weights(self.run.checkpoint(r - 1))[1]
        finite = torch.isfinite(c.clients).all(1).nonzero().flatten()
        ids = tuple(c.client_ids[j] for j in finite)
        for k in sorted({*c.client_ids}.difference(ids)):
            self.note(r, f"the trained weights of client {k} are not finite: left out", k)
        rows = {"clients": c.clients, "client_buffers": c.buffers, "start_buffers": c.start_buffers}
        rows |= {} if c.starts is None else {"starts": c.starts}
        return Stored(
            r,
            aggregated,
            ids,
            received=c.received.to(self.device, self.dtype),
            buffers=buffers,
            received_buffers=before,
            **convert(cut(rows, finite), self.dtype, self.device),
        )

    def _weights(self, c: Checkpoint) -> Weights:
        state = fit_weights(c.state, self.module)
        buffers = {n: state.get(n, b) for n, b in self.buffers.items()}
        row = self.layout.row(state).to(self.device, self.dtype)
        return row, convert(buffers, self.dtype, self.device)

    def each(self, *, every_round: bool | None = True) -> Iterator[Stored]:
        """The rounds with client weights, one after the other.

        Args:
            every_round: All of them, or the last one.

        Raises:
            FldiagError: A round cannot be read, or none has client weights.
        """
        self._begin()
        is_empty = True
        for r in self.rounds if every_round else self.rounds[::-1]:
            if (stored := self.stored(r)).ids:
                is_empty = False
                yield stored
                if not every_round:
                    return
        if is_empty:
            raise FldiagError(
                f"{self.name} holds no round with client weights",
                "train with --set checkpoint.clients=sampled, or record what clients received and made",
            )

    def map_rounds(
        self,
        function: Callable[..., list[Row]],
        *,
        every_round: bool | None = True,
        clients: bool = True,
        **options: Any,
    ) -> list[Row]:
        """The rows ``function(history, stored, **options)`` of the stored rounds, wherever the workspace computes.

        Args:
            function: The rows of one round, which does not depend on others; found by its name in a module. It may note what is
                missing (``History.note``); ``notes`` are those of the last call.
            every_round: All rounds; else the last one.
            clients: Only rounds with client weights.
            options: Further arguments of the function.

        Returns:
            The rows, in the order of the rounds.

        Raises:
            FldiagError: A round cannot be read, or none has the client weights that are asked for.
        """
        rounds = self.rounds if every_round else self.rounds[-1:]
        if clients and not every_round:
            rounds = [next(self.each(every_round=False)).round]
        self._begin()
        rows: list[Row] = []
        results = workspace().map(
            _rows_of,
            self,
            rounds,
            name=lambda r: f"round {r}",
            function=function,
            clients=clients,
            options=options,
        )
        for part, notes in results:
            rows += part
            self.notes += notes
        if clients and not rows:
            notes = self.notes
            next(self.each())  # refuses a run without any
            self.notes = notes
        return rows

    def _begin(self) -> None:
        self.notes, self._current = [], None
        for text in self.gaps:
            self.note(None, text)

    def note(self, round: int | None, text: str, client: int | None = None) -> None:
        """Remember that something is missing."""
        row = {"metric": "missing", "round": round, "client": client, "note": text, "masked": True}
        if row not in self.notes:
            self.notes.append(row)

    # The examples

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

    @property
    def dataset(self) -> Dataset:
        """The federation's data. Raises FldiagError where only weights are known."""
        return self.pool.dataset

    def segment(self, name: str) -> slice:
        """Where the examples of ``test``, or of ``train`` (those of all clients), lie in the pool. Raises FldiagError where there
        are none of test."""
        if name == "test" and not self.dataset.tested:
            raise FldiagError(
                f"{self.name} has no test examples",
                "choose --slice train, or give data with a test split: --data",
                usage=True,
            )
        return self.pool.test if name == "test" else self.pool.clients

    # Computing

    @cached_property
    def network(self) -> Network:
        """The model, for many weights."""
        return Network(self.module)

    def evaluate(self, models: Sequence[Weights], *, test: bool = False) -> ExampleScores:
        """Loss and correctness of models, (weights [P], buffers) each, in eval mode, on all of the pool's examples, or on the
        ``test`` split alone, which comes first.

        A network whose outputs depend on the batch sees batches of one segment only, so that a client's number does
        not depend on the others. Models are shared out among threads with one of torch's each: on a busy machine torch's own
        threads spend most of the time waiting for each other.
        """
        network, pool = self.network, self.pool
        first = pool.test.stop if test else pool.n
        loss = np.empty((len(models), first))
        right = None if pool.dataset.regression else np.empty(loss.shape, dtype=bool)

        def score(i: int) -> None:
            w, buffers = models[i]
            rows = w[None].to(pool.device, pool.dtype)
            bound = network.bind(rows, {n: b[None].clone() for n, b in buffers.items()})
            for batch in pool.batches(slice(0, first), BATCH, mixed=not network.batch_dependent):
                x, y = pool.read(batch.start, batch.stop)
                with torch.no_grad():
                    outputs = bound(x[None])
                    loss[i, batch] = losses.per_example(outputs, y[None])[0].double().cpu().numpy()
                    if right is not None:
                        right[i, batch] = (losses.predicted(outputs)[0] == y).cpu().numpy()

        # another module than a chain of layers is called with its parameters put in place, one call at a time
        is_shared = pool.device.type == "cpu" and network.stackable and len(models) > 1
        workers = torch.get_num_threads() if is_shared else 1
        if workers > 1:
            own = partial(torch.set_num_threads, 1)
            with threads(workers), ThreadPoolExecutor(workers, initializer=own) as each:
                list(each.map(score, range(len(models))))
        else:
            list(map(score, range(len(models))))
        loss[[not torch.isfinite(w).all() for w, _ in models]] = np.nan
        valid = ~np.isnan(loss.sum(1))
        loss[~valid] = np.nan
        return ExampleScores(loss, right, valid)

    def problem(self, weights: Weights, where: slice | Tensor, name: str, **labels: Any) -> Problem:
        """The loss surface around weights on a segment of the pool, or on some of its examples (indices)."""
        return Problem(
            self.module,
            losses.criterion(self.dataset.regression),
            self.pool.take(where, name),
            *weights,
            name=self.name,
            dtype=self.dtype,
            device=self.device,
            memory=self.memory,
            labels={**self.common, **labels},
        )

    def final_rows(self) -> list[Row]:
        """Loss and accuracy of the last round's aggregated model on the split by which it is judged; none where there are no
        examples, or where the model gives no numbers."""
        last = self.stored(self.rounds[-1])
        about = {"round": last.round, "scope": "global", "moment": "aggregated"}
        try:
            problem = self.problem(last.end, self.pool.test, self.pool.split, **about)
            return [{**problem.common, **row} for row in problem.centre.rows(problem)]
        except FldiagError:  # without examples, or diverged, there are weights to compare
            return []

    def weights(self, ids: Sequence[int]) -> np.ndarray:
        """The aggregation weights [K] of these clients (they sum to 1), by the rule that the run's config names."""
        n = np.array([len(self.parts[k]) for k in ids], dtype=float)
        rule = self.training.get("aggregate")
        if rule == "batches":
            n //= self.training["batch_size"]
        p = np.ones_like(n) if rule == "uniform" or not n.any() else n
        return p / p.sum()

    @property
    def common(self) -> dict[str, Any]:
        """What stands in every row of this history's tables."""
        return {**self.run.common, "run": self.name}

    def table(self, rows: Sequence[Row], **common: Any) -> pd.DataFrame:
        """The rows and the notes as a table; a row without a value is ``masked``."""
        rows = [{"masked": bool(pd.isna(row["value"])), **row} for row in rows]
        return table([*rows, *self.notes], **self.common, **common)

    @property
    def files(self) -> dict[str, str]:
        """Name -> sha256 of what a run's rounds are read from. Raises FldiagError for a file that was changed."""
        names = [self.run.round_file(r) for r in self.rounds]
        names += [name for name in self.run.files if name.startswith("steps/")]
        return {name: self.run.files[name] for name in names if self.run.verified(name)}

    def digest(self) -> str:
        """Changes when weights, model, data, partition or precision change; the name does not count."""
        about = [repr(self.module), str(self.dtype), self.run.about, self.gaps]
        if self._pool is not None:  # what the model does also counts, not only how it is spelled
            w = torch.linspace(-0.1, 0.1, self.layout.size, dtype=self.dtype, device=self.device)
            tensors, (x, _) = {**self.buffers, **self.layout.views(w)}, self._pool.read(0, 4)
            with torch.no_grad():
                outputs = functional_call(self.module, tensors, *arguments(self.module, x))
            about += [self.dataset.fingerprint(), outputs]
        return digest(self.files, self.parts, self.test_parts, self.samples, about)


def _rows_of(
    history: History,
    round: int,
    function: Callable[..., list[Row]],
    clients: bool,
    options: dict[str, Any],
) -> tuple[list[Row], list[Row]]:
    """Rows and notes of a round; none of one without client weights, where these are needed."""
    history = copy.copy(history)  # an executor's threads use it beside this one
    history.notes = []
    stored = history.stored(round)
    rows = function(history, stored, **options) if stored.ids or not clients else []
    return [{"round": round, **row} for row in rows], history.notes
