"""A run as the doctor sees it: its rounds one after the other, and what else is known of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fldiag import registry, user_code
from fldiag.errors import FldiagError, first_line
from fldiag.results.provenance import digest

if TYPE_CHECKING:
    from torch import Tensor

    from fldiag.data import Dataset
    from fldiag.diagnostics.doctor.models import Models
    from fldiag.runs.checkpoint import Checkpoint
    from fldiag.runs.history import History
    from fldiag.runs.run import Run

UNDEALT = "the run does not say which examples belong to which client"
DEAL = "give them when the run is made: Recorder(clients=...), fldiag convert … --partition FILE"
UNSAMPLED = "the checkpoints do not say which of their clients were sampled"
NO_CLIENTS = "no client weights are stored"
#: How the statistics of batch-norm end, for runs whose model is not known.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
#: Methods of other programs whose server takes the clients' mean, by what their runs are called.
MEANS = ("fedavg", "fedprox", "fedbn", "moon", "fedsam", "local_sgd")
#: What the clients' weights are called where a run states by what they are.
WEIGHTS = ("weights", "weighting", "weightedby", "aggregationweights")
#: What a server's learning rate is called where a run states it.
SERVER_RATES = (
    "serverlr",
    "serverlearningrate",
    "globallr",
    "globallearningrate",
    "etag",
    "lrserver",
)


@dataclass
class CohortWeights:
    """The weights of one stored round, as they lie in the file; ``before``: those of the round before, if it was stored.

    ``weights`` and ``states``: parameters and buffers of the aggregated model by name. ``sampled``: whether the clients
    that it holds are those that were aggregated.
    """

    round: int
    ids: list[int]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    received: Tensor | None
    clients: Tensor | None
    client_states: dict[str, Tensor]
    sampled: bool = True
    starts: Tensor | None = None
    before: CohortWeights | None = field(default=None, repr=False)

    @cached_property
    def aggregated(self) -> Tensor:
        import torch

        return torch.cat([t.reshape(-1) for t in self.weights.values()])

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Tensor -> where its numbers lie in a vector [P]."""
        ends = np.cumsum([0, *(t.numel() for t in self.weights.values())]).tolist()
        return dict(zip(self.weights, map(slice, ends, ends[1:]), strict=False))

    @cached_property
    def digest(self) -> str:
        """Of the aggregate."""
        return digest(self.aggregated)

    @property
    def complete(self) -> bool:
        """Whether what the clients received, and what they and the server made of it, are there and fit."""
        size = (self.aggregated.numel(),)
        return (
            self.clients is not None
            and self.received is not None
            and tuple(self.clients.shape[1:]) == size
            and tuple(self.received.shape) == size
        )

    @cached_property
    def obstacle(self) -> str:
        """Why sums over the round's weights mean nothing; "" where they do."""
        if self.clients is None:
            return NO_CLIENTS
        if self.received is None:
            return "what the clients received is not known"
        if not self.complete:
            return "the clients' weights have another size than the global model"
        vectors = (self.clients, self.aggregated, self.received)
        is_finite = all(bool(w.isfinite().all()) for w in vectors)
        return "" if is_finite else "weights are not finite"

    @property
    def usable(self) -> bool:
        """Whether sums over the round's weights mean something."""
        return not self.obstacle

    def part(self, coordinates: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        """What was received [n], the clients' weights [K, n] and the aggregate's [n] there, in double precision."""
        assert self.clients is not None and self.received is not None
        return (
            self.received[coordinates].double(),
            self.clients[:, coordinates].double(),
            self.aggregated[coordinates].double(),
        )

    @property
    def origins(self) -> Tensor:
        """What every client received, [K, P]."""
        assert self.clients is not None and self.received is not None
        return self.received.expand_as(self.clients) if self.starts is None else self.starts

    def updates(self, part: slice = slice(None)) -> Tensor:
        """How far every client moved from what it received, [K, n] in double precision."""
        assert self.clients is not None
        return self.clients[:, part].double() - self.origins[:, part].double()

    @property
    def from_one_start(self) -> CohortWeights:
        """The same updates, all applied to the global model: what a server sums that adds updates."""
        if self.starts is None or self.received is None:
            return self
        return replace(self, clients=self.updates() + self.received.double(), starts=None)

    @cached_property
    def eps(self) -> float:
        """Rounding of the coarsest weights."""
        import torch

        assert self.clients is not None and self.received is not None
        return max(torch.finfo(t.dtype).eps for t in (self.aggregated, self.clients, self.received))

    @cached_property
    def grams(self) -> dict[str, np.ndarray]:
        """Tensor -> inner products [K + 2, K + 2] of the clients' updates, the server's w' - w, and w (received)."""
        return self.products([])

    def products(self, vectors: Sequence[Tensor]) -> dict[str, np.ndarray]:
        """As ``grams``, with these vectors [P] after the rows of the round."""
        import torch

        assert self.received is not None
        grams = {}
        for name, part in self.slices.items():
            w = self.received[part].double()
            rows = torch.cat(
                [
                    self.updates(part),
                    (self.aggregated[part].double() - w)[None],
                    w[None],
                    *(v[part].double()[None] for v in vectors),
                ]
            )
            grams[name] = (rows @ rows.T).numpy()
        return grams

    def least_squares(self, vectors: Sequence[Tensor]) -> tuple[np.ndarray, float]:
        """Coefficients of the clients' updates and these vectors [P] that make the server's, and the share that is left over."""
        k, gram = len(self.ids), np.sum(list(self.products(vectors).values()), axis=0)
        keep = [*range(k), *range(k + 2, len(gram))]
        c = np.linalg.lstsq(gram[np.ix_(keep, keep)], gram[keep, k], rcond=1e-10)[0]
        x = np.zeros(len(gram))
        x[keep], x[k] = c, -1.0
        return c, float(np.sqrt(max(x @ gram @ x, 0.0) / max(gram[k, k], 1e-300)))

    @cached_property
    def gram(self) -> np.ndarray:
        """``grams`` of all tensors together."""
        return np.sum(list(self.grams.values()), axis=0)

    @property
    def norms(self) -> np.ndarray:
        """Length of every client's update, [K]."""
        return np.sqrt(np.diag(self.gram)[: len(self.ids)])


class Case:
    """A run and what is known of it. ``opened`` opens model and data, or says why it cannot."""

    def __init__(self, run: Run, options: Mapping[str, Any]):
        self.run, self.options = run, options
        self.config: dict[str, Any] = run.about["config"]
        self.is_native = not run.origin
        self.method = str(self.section("method").get("name"))
        self.total = int(self.section("clients").get("total", 0))
        self.rounds = [r for r in run.rounds if r] or run.rounds
        self.closed, self.lost = FldiagError(""), dict[int, str]()
        self.names: dict[int, str] = run.origin.get("names", {})
        self.has_usable_rounds, self.obstacle = False, NO_CLIENTS
        #: What checks tell each other: whether a client goes another way, and which clients start elsewhere.
        self.goes_another_way: Callable[[int], bool] = lambda client: False
        self.misplaced = set[int]()
        self.common = {"run": run.name, "method": self.method, "seed": self.config.get("seed")}

    def section(self, name: str) -> dict[str, Any]:
        values = self.config.get(name)
        return values if isinstance(values, dict) else {}

    def client(self, *ids: int, most: int = 6) -> str:
        """``client 3 (its name)`` or ``clients 1, 2, 5``, not more than help."""
        texts = [f"{i} ({self.names[i]})" if i in self.names else str(i) for i in ids[:most]]
        rest = f" and {len(ids) - most} more" if len(ids) > most else ""
        listing = (" and " if len(ids) == 2 else ", ").join(texts)
        return f"client{'s' * (len(ids) > 1)} {listing}{rest}"

    def lacks(self, otherwise: str) -> str:
        """Why no round is usable; where some are, what they lack."""
        return otherwise if self.has_usable_rounds else self.obstacle

    @cached_property
    def history(self) -> History | None:
        """Model, data and partition, as every diagnostic of runs opens them; None where they cannot be had."""
        from fldiag.runs.history import History

        try:
            history = History.of(self.run, model=self.run.model, data=self.run.data, **self.options)
            _ = history.dataset
            return history
        except (FldiagError, RuntimeError) as error:  # a model that does not fit its data
            self.closed = (
                error if isinstance(error, FldiagError) else FldiagError(first_line(error))
            )
            return None

    def opened(self, *, classes: bool = False, parts: bool = False) -> History:
        """The history; with ``classes``, of data that have some; with ``parts``, where the clients' examples are known.

        Raises FldiagError that says what is missing."""
        if self.history is None:
            raise self.closed
        if classes and (self.history.dataset.regression or self.history.dataset.classes < 2):
            raise FldiagError("the data have no classes")
        if parts and not any(map(len, self.history.parts)):
            raise FldiagError(UNDEALT, DEAL)
        return self.history

    @cached_property
    def dataset(self) -> Dataset:
        """The federation's data, which need no model. Raises FldiagError where they cannot be had."""
        from fldiag.runs import open_problem, round_weights

        if self.history is not None:
            return self.history.dataset
        data = open_problem.load_examples(self.run.data)
        first = round_weights.first_readable(self.run, self.rounds, self.run.model, data)
        open_problem.check_code(replace(first, model="not built"))
        return open_problem.load_dataset(
            first, self.options.get("root"), self.options.get("download", False)
        )

    @cached_property
    def parts(self) -> list[np.ndarray]:
        """The training examples of every client. Raises FldiagError where they are not known."""
        from fldiag.runs import open_problem

        if self.history is not None:
            parts = self.history.parts
        else:
            checkpoint = self.run.checkpoint(self.rounds[0])
            parts = list(open_problem.load_partition(checkpoint, self.dataset) or ())
        if not any(map(len, parts)):
            raise FldiagError(UNDEALT, DEAL)
        return [np.asarray(part) for part in parts]

    @cached_property
    def models(self) -> Models:
        """Its models at work."""
        from fldiag.diagnostics.doctor.models import Models

        return Models(self.opened())

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Client -> how many examples it trains on, as far as that is known: what it said, else its part of the data."""
        reported = dict(self.run.origin.get("examples", {}))
        return {**self.dealt, **reported}

    @cached_property
    def dealt(self) -> dict[int, int]:
        """Client -> how many examples the partition gives it."""
        from fldiag.data import partition

        try:
            parts = partition.load_parts(self.run.verified("partition.npz"))
        except FldiagError:
            return {}
        return {k: int(n) for k, n in enumerate(partition.sizes(parts))}

    @cached_property
    def shares(self) -> str:
        """Of what the aggregation weights are said to be shares: n, batches or uniform."""
        return str(self.section("train").get("aggregate", "n"))

    @property
    def recipe(self) -> dict[str, Any]:
        """What the recorder or importer of a foreign run says of where it comes from."""
        return dict(self.run.origin.get("recipe", {}))

    @property
    def aggregates_are_made(self) -> bool:
        """Whether the run was converted without global models, so that the mean of the clients stands for them."""
        return self.recipe.get("kind") == "folder" and not self.recipe.get("globals")

    @cached_property
    def stated_shares(self) -> str:
        """n or uniform, where the origin of a foreign run states it ("weights": "by examples"), or its method's name."""
        words = [str(v) for k, v in self.recipe.items() if "weight" in str(k).lower()]
        return _shares(" ".join([*words, self.method]))

    @cached_property
    def stated_rate(self) -> float | None:
        """The server's learning rate, where the origin of a foreign run states one."""
        rates = (v for k, v in self.recipe.items() if _letters(k) in SERVER_RATES)
        return next((float(v) for v in rates if _is_rate(v)), None)

    @property
    def unread(self) -> dict[str, Any]:
        """What the origin of a foreign run states of its server in words that are not understood."""
        return {
            str(k): v
            for k, v in self.recipe.items()
            if (_letters(k) in WEIGHTS and not _shares(str(v)))
            or (_letters(k) in SERVER_RATES and not _is_rate(v))
        }

    @cached_property
    def slots(self) -> set[str]:
        """The slots by which a method of fldiag departs from plain averaging: server, refine, send, correct, isolated."""
        if not self.is_native:
            return set()
        if user_code.is_code(self.method) and self.method in self.run.allow_code:
            build = user_code.load_user(self.method, self.run.allow_code, "method")
        elif self.method in registry.method:
            build = registry.method.get(self.method).build
        else:  # nobody but the method knows
            return {"server", "refine", "send", "correct"}
        try:
            method = build(**{k: v for k, v in self.section("method").items() if k != "name"})
        except (FldiagError, TypeError, ValueError):
            return {"server"}
        slots = {
            slot
            for slot in ("server", "refine", "send", "correct")
            for part in method
            if any(slot in vars(c) for c in type(part).__mro__ if c.__name__ != "Part")
        }
        return slots | ({"isolated"} if method.isolated else set())

    @property
    def plain(self) -> bool:
        """Whether the server is known to take nothing but the mean of the clients."""
        return (
            not self.slots & {"server", "refine"}
            if self.is_native
            else self.method.lower().replace("-", "_") in MEANS
        )

    @cached_property
    def metrics(self) -> pd.DataFrame | None:
        return self.run.metrics if self.run.has_metrics else None

    @cached_property
    def buffers(self) -> set[str]:
        """Names of what is no parameter, as the first round with clients has them."""
        try:
            return set(self.run.checkpoint(self.rounds[0]).buffers)
        except (FldiagError, IndexError):
            return set()

    def each(self) -> Iterator[CohortWeights]:
        """The stored rounds that can be read, in order; ``lost`` says which cannot."""
        before: CohortWeights | None = None
        for r in self.run.rounds:
            try:
                cohort = self._read_round(self.run.checkpoint(r))
            except FldiagError as error:
                self.lost[r] = error.what
                continue
            self.has_usable_rounds |= cohort.usable
            if self.obstacle == NO_CLIENTS:
                self.obstacle = cohort.obstacle
            cohort.before = before if before is not None and before.round == r - 1 else None
            yield cohort
            cohort.before, before = None, cohort

    def _read_round(self, c: Checkpoint) -> CohortWeights:
        assert c.round is not None
        buffers = set(c.buffers) or self.buffers or {n for n in c.state if n.endswith(STATISTICS)}
        clients = self.section("checkpoint").get("clients", "sampled")
        is_partial = self.is_native and clients not in ("auto", "sampled")
        full = self.section("clients").get("per_round") == self.total and clients == "all"
        return CohortWeights(
            c.round,
            c.client_ids,
            {n: t for n, t in c.state.items() if n not in buffers},
            {n: t for n, t in c.state.items() if n in buffers},
            c.received,
            c.clients,
            c.buffers,
            not is_partial or full,
            c.starts,
        )


def _letters(key: Any) -> str:
    return "".join(c for c in str(key).lower() if c.isalpha())


def _shares(text: str) -> str:
    """n or uniform, "" where the text says neither."""
    text = text.lower()
    if any(word in text for word in ("uniform", "unweighted", "equal", "plain mean")):
        return "uniform"
    return "n" if any(word in text for word in ("example", "n_k", "by size")) else ""


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
