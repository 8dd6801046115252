"""What the checks look at, and how they say what they find. All that is read of a run is read here: its rounds, in one pass over
the files; what it says of itself; and its models at work, each evaluated once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fldiag import registry
from fldiag.data import partition
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.results.files import digest
from fldiag.results.table import thin
from fldiag.runs.checkpoint import Checkpoint
from fldiag.runs.history import History
from fldiag.runs.run import Run

#: Coordinates of a tensor that are remembered of every model.
SAMPLED = 200
#: Rounds whose global model is evaluated, and whose clients' models are.
MANY, FEW = 12, 6
#: Methods of other programs whose server takes the clients' mean.
MEANS = ("fedavg", "fedprox", "fedbn", "moon", "fedsam", "local_sgd")
#: Parts of names of methods whose clients keep weights of their own, or start from other models, on purpose.
PERSONAL = ("per", "rep", "bn", "lg", "babu", "ditto", "local", "apfl", "async", "buff", "stale")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

Severity = Literal["fault", "hint", "healthy", "not checked"]
#: From the worst to the best. A fault is arithmetic that anybody can repeat, a hint is statistics.
SEVERITIES: tuple[Severity, ...] = ("fault", "hint", "healthy", "not checked")


@dataclass(frozen=True)
class Finding:
    """``what`` is wrong, by which numbers (``evidence``), what to do or what else explains it (``remedy``); and where."""

    severity: Severity
    what: str
    evidence: str
    remedy: str
    rounds: Sequence[int] = ()
    client: int | None = None
    layer: str | None = None


def joined(items: Sequence[object], most: int = 6) -> str:
    """``1, 2, 5``, or the first of many."""
    text = ", ".join(map(str, items[:most]))
    return text + (f" and {len(items) - most} more" if len(items) > most else "")


@dataclass
class About:
    """What is known of a run beside its weights.

    ``rule``: mean (the run states that its server takes the clients' mean), none (it states nothing) or other (a method whose
    server does something else). ``by``: the mean by examples (n), by minibatches or uniform. ``is_personal``: clients keep
    weights of their own, or start elsewhere, on purpose. ``is_cohort``: the stored clients are those that were aggregated.
    """

    method: str = ""
    seed: int | None = None
    rule: str = "mean"
    by: str = "n"
    batch: int = 1
    is_personal: bool = False
    is_cohort: bool = True
    is_diverged: bool = False
    is_batch_normed: bool = False
    total: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    unreadable: dict[int, str] = field(default_factory=dict)

    def means(self, ids: list[int]) -> dict[str, np.ndarray]:
        """The weights [K] of the clients in each kind of mean that can be computed."""
        n = np.array([self.sizes.get(i, 0) for i in ids], dtype=float)
        weights = {"uniform": np.ones(len(ids)), "n": n, "batches": n // self.batch}
        return {by: p / p.sum() for by, p in weights.items() if p.sum() > 0}


def about_run(run: Run) -> About:
    """What the run's config and recorder say."""
    config, origin = run.about["config"], run.origin
    clients, train = config.get("clients", {}), config.get("train", {})
    stored = config.get("checkpoint", {}).get("clients", "sampled")
    about = About(
        method=str(config.get("method", {}).get("name", "")),
        seed=config.get("seed"),
        by=str(train.get("aggregate", "n")),
        batch=int(train.get("batch_size", 1)),
        is_diverged=run.status == "diverged",
        total=int(clients.get("total", 0)),
    )
    name = about.method.lower().replace("-", "_")
    about.is_personal = any(word in name for word in PERSONAL)
    about.rule = "mean" if name in MEANS else "none" if name in ("own", "") else "other"
    if not origin:
        is_full = stored == "all" and clients.get("per_round") == about.total
        about.is_cohort = stored in ("auto", "sampled") or is_full
        about.rule = "other"
        is_code = registry.is_code(about.method)
        if not is_code and about.method in registry.method:
            options = {k: v for k, v in config["method"].items() if k != "name"}
            method = registry.method.get(about.method).build(**options)
            types = [c for part in method for c in type(part).__mro__ if c.__name__ != "Part"]
            about.is_personal = bool(method.isolated)
            if not any(slot in vars(c) for c in types for slot in ("server", "refine")):
                about.rule = "mean"
    try:
        parts = partition.load_parts(run.verified("partition.npz"))
        about.sizes = dict(enumerate(map(int, partition.sizes(parts))))
    except FldiagError:
        pass  # a run without a partition
    return about


# -- rounds


@dataclass(frozen=True)
class RoundFacts:
    """One round of K clients.

    ``infinite``: client (None: the server) -> its first tensor that is not finite. ``grams``: tensor -> inner products
    [K + 2, K + 2] of the clients' updates, the server's step and what was received. ``received``, ``aggregated`` [m] and
    ``clients`` [K, m]: some coordinates of the weights, those of a tensor at ``parts``. ``digests``: of the clients' weights.
    ``buffers``: name -> what is wrong with the aggregate's.
    """

    round: int
    ids: list[int]
    infinite: dict[int | None, str]
    parts: dict[str, slice]
    aggregated: np.ndarray
    received: np.ndarray
    clients: np.ndarray
    digests: list[str]
    grams: Mapping[str, np.ndarray]
    buffers: Mapping[str, str]
    rounding: float
    is_one_start: bool

    @property
    def is_usable(self) -> bool:
        """Whether sums over the round mean something."""
        return bool(self.grams) and np.isfinite(self.gram).all()

    @cached_property
    def layers(self) -> dict[str, slice]:
        """Layers of enough coordinates: their tensors lie side by side."""
        ends: dict[str, slice] = {}
        for name, part in self.parts.items():
            layer = name.rpartition(".")[0] or name
            ends[layer] = slice(ends.get(layer, part).start, part.stop)
        return {n: part for n, part in ends.items() if part.stop - part.start >= SAMPLED // 4}

    @cached_property
    def gram(self) -> np.ndarray:
        return np.sum(list(self.grams.values()), axis=0)

    @cached_property
    def norms(self) -> np.ndarray:
        """Lengths of the clients' updates, [K]."""
        return np.sqrt(np.diag(self.gram)[: len(self.ids)])


def read_facts(run: Run, about: About) -> Iterator[RoundFacts]:
    """The facts of every round that can be read; ``about.unreadable`` gets the others, with the reason."""
    before: dict[str, Tensor] = {}
    for done, r in enumerate(run.rounds):
        workspace().show(done, len(run.rounds), f"round {r}")
        try:
            checkpoint = run.checkpoint(r)
        except FldiagError as error:
            about.unreadable[r] = error.what
            continue
        about.is_batch_normed |= any(n.endswith("running_var") for n in checkpoint.state)
        yield _facts(r, checkpoint, before)
        before = {n: checkpoint.state[n] for n in checkpoint.buffers}


def _facts(r: int, c: Checkpoint, before: Mapping[str, Tensor]) -> RoundFacts:
    names = [n for n in c.state if n not in c.buffers and not n.endswith(STATISTICS)]
    w = torch.cat([c.state[n].reshape(-1) for n in names])
    places = _slices(names, [c.state[n].numel() for n in names])
    index = [
        np.arange(p.start, p.stop)[:: max(1, (p.stop - p.start) // SAMPLED)]
        for p in places.values()
    ]
    parts, at = _slices(names, [*map(len, index)]), torch.from_numpy(np.concatenate(index))
    infinite: dict[int | None, str] = {}
    if odd := _first_infinite(c.state):
        infinite[None] = odd
    received, clients = c.received, c.clients
    if received is None or clients is None or clients.shape[1:] != w.shape != received.shape:
        ids, received, clients = [], w, w[None][:0]
    else:
        ids = list(c.client_ids)
    for j, i in enumerate(ids):
        tensors = {n: clients[j, p] for n, p in places.items()}
        if odd := _first_infinite(tensors | {n: b[j] for n, b in c.buffers.items()}):
            infinite[i] = odd
    starts = received.expand_as(clients) if c.starts is None else c.starts
    grams = {}
    for name, p in places.items() if ids else ():
        w0 = received[p].double()[None]
        moved = clients[:, p].double() - starts[:, p].double()
        rows = torch.cat([moved, w[p].double() - w0, w0])
        grams[name] = (rows @ rows.T).numpy()
    eps = max(torch.finfo(t.dtype).eps for t in (w, clients, received))
    wrong = {n: _buffer_fault(n, c, rows, before.get(n)) for n, rows in c.buffers.items() if ids}
    return RoundFacts(
        round=r,
        ids=ids,
        infinite=infinite,
        parts=parts,
        aggregated=w[at].double().numpy(),
        received=received[at].double().numpy(),
        clients=clients[:, at].double().numpy(),
        digests=[digest(row) for row in clients],
        grams=grams,
        buffers={n: text for n, text in wrong.items() if text},
        rounding=30 * eps * float(received.double().norm()),
        is_one_start=c.starts is None,
    )


def _slices(names: list[str], sizes: list[int]) -> dict[str, slice]:
    ends = np.cumsum([0, *sizes]).tolist()
    return dict(zip(names, map(slice, ends, ends[1:]), strict=False))


def _first_infinite(tensors: Mapping[str, Tensor]) -> str:
    return next((name for name, t in tensors.items() if not t.isfinite().all()), "")


def _buffer_fault(name: str, c: Checkpoint, rows: Tensor, before: Tensor | None) -> str:
    """What is wrong with an aggregated buffer: statistics of batch-norm shall be a mean of the clients'."""
    new = c.state[name]
    if not new.is_floating_point():
        return ""
    if name.endswith("running_var") and (new < 0).any():
        return "variances below 0"
    if len(rows) < 2 or (rows == rows[0]).all():
        return ""
    if before is not None and torch.equal(before, new):
        return "not aggregated: they did not change, and the clients' did"
    if any(torch.equal(row, new) for row in rows):
        return "those of one client alone"
    slack = 1e-5 * rows.abs().amax(0)
    is_outside = (new < rows.amin(0) - slack) | (new > rows.amax(0) + slack)
    return "outside the range of the clients'" if is_outside.double().mean() > 0.01 else ""


# -- models at work


@dataclass(frozen=True)
class Models:
    """``right`` and ``loss`` [n] of the global model by round, on the test and then the clients' examples; and for some rounds
    the ids, and the losses [K, n] before and after the clients' training."""

    history: History
    metrics: pd.DataFrame | None
    right: dict[int, np.ndarray]
    loss: dict[int, np.ndarray]
    clients: dict[int, tuple[tuple[int, ...], np.ndarray, np.ndarray]]

    def of_client(self, client: int) -> slice:
        """Where its examples lie."""
        return self.history.pool.train_slice(client)

    @cached_property
    def labels(self) -> np.ndarray:
        return self.history.pool.y.cpu().numpy()

    @cached_property
    def gains(self) -> dict[int, tuple[tuple[int, ...], np.ndarray]]:
        """Round -> ids and [K, N], by how much each client's training lowers the loss on the data of every client (NaN: none)."""
        parts = [self.of_client(i) for i in range(len(self.history.parts))]
        tables = {}
        for r, (ids, before, after) in self.clients.items():
            nothing = np.full(len(ids), np.nan)
            gain = before - after
            columns = [gain[:, p].mean(1) if p.stop > p.start else nothing for p in parts]
            tables[r] = ids, np.stack(columns, 1)
        return tables


def evaluate(run: Run, options: Mapping[str, Any], model: Any, data: Any) -> Models:
    """The run's models on its examples. Raises FldiagError where model or data are not known."""
    run = copy(run)
    run.model = run.model if model is None else model
    run.data = run.data if data is None else data
    history = History(run, **options)
    _ = history.dataset
    right, loss, clients = {}, {}, {}
    few = thin(history.rounds, FEW)
    for r in sorted({*thin(history.rounds, MANY), *few}):
        try:
            stored = history.stored(r)
        except FldiagError:
            continue  # ``finite`` says that it cannot be read
        weights = [(stored.aggregated, stored.buffers)]
        is_dealt = all(k < len(history.parts) for k in stored.ids)
        if r in few and stored.ids and is_dealt:
            rows = range(len(stored.ids))
            weights += [*map(stored.start_of, rows), *map(stored.client, rows)]
        scores = history.evaluate(weights)
        loss[r] = scores.loss[0]
        if scores.right is not None:
            right[r] = scores.right[0]
        if len(weights) > 1 and np.isfinite(scores.loss).all():
            before, after = np.split(scores.loss[1:], 2)
            clients[r] = stored.ids, before, after
    metrics = None if run.metrics.empty else run.metrics
    return Models(history, metrics, right, loss, clients)
