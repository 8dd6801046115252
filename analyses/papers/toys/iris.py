"""Decision regions on Iris in the plane: the example of FedProj (Chunduru et al., figure 1).

Iris, reduced to two principal components, is dealt to three clients by class; an MLP (2-64-64-3) is trained by
FedAvg, FedDF and FedProj. Before and after local training one sees what the clients forget. The paper gives 20 rounds
of 5 local epochs, SGD with lr 1e-3 and momentum 0.9; scaling, exact split, minibatches, public data and seeds are not
given, and are chosen here (``Protocol``). Trained by the training core, measured here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from fldiag import registry
from fldiag.config import Config, build
from fldiag.data import Dataset
from fldiag.errors import FldiagError, unknown
from fldiag.execution.pools import open_pool
from fldiag.execution.worker import threads
from fldiag.registry import Progress
from fldiag.results.cache import Cache, Tell
from fldiag.results.provenance import digest, provenance
from fldiag.results.table import COLUMNS, Row, table
from fldiag.seeding import numpy_rng, seed_for
from fldiag.training.server import Federation
from fldiag.training.setup import Setup

from .iris_measures import (
    CLASSES,
    accuracies,
    differences,
    lines,
    points,
    predict,
)

METHODS = ("fedavg", "feddf", "fedproj")
CLIENTS, EPOCHS = 3, 5
PUBLIC, DISTILLED = 300, 5  # public points; epochs of distillation on the server
#: Points a side of the grid; how far the plane reaches beyond the data, as a share of its width.
GRID, MARGIN = 200, 0.05
#: Share of each class (column) that a client (row) gets.
SPLITS: dict[str, list[list[float]]] = {
    "one": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "two": [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]],
    "mixed": [[0.45, 0.45, 0.1], [0.1, 0.45, 0.45], [0.45, 0.1, 0.45]],
    "dominant": [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]],
}


@dataclass(frozen=True)
class Protocol:
    """What the paper leaves open. Raises FldiagError for values that make no protocol.

    ``split``: one class a client, two, two dominant ones with a tenth of the third (mixed), or one dominant class.
    ``batch_size`` None: the whole client is one minibatch. ``raw``: features are not standardised before the PCA.
    ``train_test``: 80/20, stratified, a new split for each seed; else all 150 flowers are trained and tested on.
    """

    split: str = "one"
    lr: float = 1e-2
    batch_size: int | None = 5
    raw: bool = False
    train_test: bool = False
    rounds: int = 20

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise unknown("split", self.split, SPLITS)
        if not 0 < self.lr < math.inf:
            raise FldiagError(
                f"lr = {self.lr!r} is not a learning rate", "give a number above 0", usage=True
            )
        for name, value in (("batch_size", self.batch_size), ("rounds", self.rounds)):
            if value is not None and value < 1:
                raise FldiagError(
                    f"{name} = {value!r} is not valid",
                    "give a whole number of at least 1",
                    usage=True,
                )

    @property
    def name(self) -> str:
        """A label that differs whenever the protocol does, apart from the number of rounds."""
        batch = "full-batch" if self.batch_size is None else f"batch{self.batch_size}"
        scale = "raw" if self.raw else "standardised"
        return f"{self.split}-{scale}-lr{self.lr:g}-{batch}{'-80-20' if self.train_test else ''}"


def variants(**common: Any) -> tuple[Protocol, ...]:
    """The protocol chosen, one change at a time, and the paper's learning rate, also with whole clients as minibatches.
    ``common``: other fields of all of them, such as rounds."""
    return (
        Protocol(**common),
        Protocol(raw=True, **common),
        Protocol(lr=1e-3, **common),
        *(Protocol(split, **common) for split in ("two", "mixed", "dominant")),
        *(Protocol(split, 1e-3, None, **common) for split in ("one", "two", "dominant")),
    )


@dataclass(frozen=True)
class World:
    """The data set [n, 2], the clients' examples, the public points [300, 2]; x and y of the grid's columns and rows."""

    dataset: Dataset
    parts: list[np.ndarray]
    public: Tensor
    axes: tuple[np.ndarray, np.ndarray]

    @property
    def grid(self) -> Tensor:
        """[200 * 200, 2], row after row."""
        x, y = np.meshgrid(*self.axes)
        return torch.from_numpy(np.stack([x.ravel(), y.ravel()], 1)).float()


def world(protocol: Protocol, seed: int) -> World:
    """The data of a seed. Scaling and PCA are fitted to the training examples; the public points are uniform in their
    bounding box, and have no labels."""
    bunch = load_iris()
    train = test = np.arange(len(bunch.target))
    if protocol.train_test:
        state = seed_for(seed, "iris test") % 2**32
        train, test = train_test_split(
            train, test_size=0.2, stratify=bunch.target, random_state=state
        )
    steps = [] if protocol.raw else [StandardScaler()]
    plane = make_pipeline(*steps, PCA(2, svd_solver="full")).fit(bunch.data[train])
    z = plane.transform(bunch.data).astype(np.float32)
    x, y = torch.from_numpy(z), torch.from_numpy(bunch.target).long()
    public = numpy_rng(seed, "iris public").uniform(z[train].min(0), z[train].max(0), (PUBLIC, 2))
    room = MARGIN * (z.max(0) - z.min(0))
    columns, rows = (
        np.linspace(low, high, GRID)
        for low, high in zip(z.min(0) - room, z.max(0) + room, strict=True)
    )
    return World(
        Dataset("iris in the plane", x[train], y[train], x[test], y[test], CLASSES),
        deal(y[train].numpy(), protocol.split, seed),
        torch.from_numpy(public).float(),
        (columns, rows),
    )


def deal(labels: np.ndarray, split: str, seed: int) -> list[np.ndarray]:
    """Indices of each client: every class, shuffled by seed, cut by the clients' shares."""
    pieces: list[list[np.ndarray]] = [[] for _ in range(CLIENTS)]
    for c in range(CLASSES):
        members = np.flatnonzero(labels == c)
        members = members[numpy_rng(seed, "iris split", c).permutation(len(members))]
        shares = np.cumsum([row[c] for row in SPLITS[split]])
        cuts = np.rint(shares * len(members)).astype(int)
        for k, piece in enumerate(np.split(members, cuts[:-1])):
            pieces[k].append(piece)
    return [np.sort(np.concatenate(p)) for p in pieces]


def config(protocol: Protocol, method: str, seed: int, largest: int) -> Config:
    """The run's config; ``largest`` client. Methods that distil do so for 5 epochs of SGD at temperature 3 with the
    clients' learning rate; FedProj without its penalty on weights, so that it is FedDF plus projection."""
    options: dict[str, Any] = {"name": method}
    fields = registry.method.get(method).options.model_fields
    if {"epochs", "tau", "lr", "optimizer"} <= fields.keys():
        options |= {"epochs": DISTILLED, "tau": 3.0, "lr": protocol.lr, "optimizer": "sgd"}
    if "gamma_wd" in fields:
        options["gamma_wd"] = 0.0
    return build(
        {
            "name": "iris",
            "seed": seed,
            "rounds": protocol.rounds,
            "method": options,
            "model": {"name": "mlp_iris"},
            "data": {"name": "iris"},
            "partition": {"kind": "iid"},
            "clients": {"total": CLIENTS, "per_round": CLIENTS},
            "train": {
                "epochs": EPOCHS,
                "batch_size": protocol.batch_size or largest,
                "lr": protocol.lr,
                "lr_decay": 1.0,
                "momentum": 0.9,
                "weight_decay": 0.0,
            },
        }
    )


@dataclass(frozen=True)
class Job:
    """One training; ``is_drawn``: its points and regions join the rows."""

    protocol: Protocol
    method: str
    seed: int
    is_drawn: bool = False

    @property
    def text(self) -> str:
        return f"{self.protocol.name}, {self.method}, seed {self.seed}"

    @property
    def key(self) -> tuple[str, str]:
        """Its name in the cache, and a digest of whatever decides the numbers."""
        origin = {k: v for k, v in provenance().items() if k not in ("seed", "threads")}
        name = f"{self.protocol.name}-{self.method}-s{self.seed}"
        return name, digest(origin, asdict(self))


def train(_: None, job: Job) -> pd.DataFrame:
    """The rows of one training. Raises FldiagError when it diverges."""
    with threads(1):  # steps this small only wait for each other on several
        rows = _measure_rounds(job)
    frame = table(
        rows,
        run=job.protocol.name,
        method=job.method,
        seed=job.seed,
        estimator="exact",
        slice="test" if job.protocol.train_test else "all",
    )
    return frame.astype({c: "string" for c in ("reference", "line") if c in frame})


def _measure_rounds(job: Job) -> list[Row]:
    problem = world(job.protocol, job.seed)
    settings = config(job.protocol, job.method, job.seed, max(map(len, problem.parts)))
    setup = Setup(settings, dataset=problem.dataset, parts=problem.parts, public=problem.public)
    federation = Federation(setup)
    rows: list[Row] = []
    for t in range(1, job.protocol.rounds + 1):
        received = federation.sent()
        _, trained = federation.round(partial(map, setup.train))
        models = torch.stack([received, *trained.rows, federation.w])
        if not bool(torch.isfinite(models).all()):
            raise FldiagError(
                f"{job.method} diverged in round {t} with lr = {job.protocol.lr:g} (seed {job.seed})",
                "lower --lr",
                usage=True,
            )
        predicted = predict(setup.network, models, problem.dataset.test_x)
        rows += [{"round": t, **row} for row in accuracies(predicted, problem.dataset.test_y)]
    regions = predict(setup.network, models, problem.grid)
    rows += [{"round": t, **row} for row in differences(regions)]
    if job.is_drawn:
        rows += points(problem.dataset, problem.parts)
        rows += [{"round": t, **row} for row in lines(regions, *problem.axes)]
    return rows


def run(
    protocols: Sequence[Protocol] = (Protocol(),),
    methods: Sequence[str] = METHODS,
    seeds: Iterable[int] = range(5),
    *,
    keep: Path | None = None,
    executor: str | Executor = "serial",
    on_damage: Tell | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """The toy as a table: every protocol (``run``), seed and method. Slice: all 150 flowers, or the 30 of the test.

    Rows of every round, in shares of [0, 1] (``n_examples`` flowers): ``accuracy`` and ``class_accuracy`` (index =
    class) of the model received, of each client's after training, of the aggregated one; and of each client ``drop`` =
    accuracy of the received minus the trained model, ``forgetting`` = the same of the class that loses most; with moment
    trained and scope global, their means over the clients. Of the last round ``disagreement`` with the global model on a
    200 x 200 grid, and, of a single protocol, for the first seed these grids, ``region``, and the flowers, ``point``.

    ``keep``: a folder in which finished trainings are kept and read again; ``on_damage`` is told of those that were
    damaged and are trained again. ``executor`` as in training; the result is the same.

    Raises FldiagError for unknown methods, a method or seed given twice, and trainings that diverge.
    """
    seeds = list(seeds)
    if not methods or not seeds:
        raise FldiagError("nothing to train", "give at least one method and seed", usage=True)
    for name, values in (("seeds", seeds), ("methods", methods)):
        if len(set(values)) != len(values):
            raise FldiagError(
                f"{name} = {list(values)} has one twice", "give each once", usage=True
            )
    for method in methods:
        config(protocols[0], method, seeds[0], 1)  # refuses an unknown method, before any training
    drawn_seed = seeds[0] if len(protocols) == 1 else None
    jobs = [Job(p, m, int(s), s == drawn_seed) for p in protocols for s in seeds for m in methods]
    cache = None if keep is None else Cache(keep)
    frames = [None if cache is None else cache.get(*job.key, on_damage) for job in jobs]
    missing = [i for i, frame in enumerate(frames) if frame is None]
    with open_pool(
        executor, train, None, threads=1, name=lambda job: job.text, most=len(missing)
    ) as pool:
        results = pool.map([jobs[i] for i in missing])
        for i, job in enumerate(jobs):
            if progress:
                progress(i, len(jobs), job.text)
            if frames[i] is None:
                frames[i] = frame = next(results)
                if cache is not None:
                    cache.put(*job.key, frame, {**provenance(), "training": asdict(job)})
    if progress:
        progress(len(jobs), len(jobs), "done")
    rows = pd.concat(frames, ignore_index=True)
    return rows[[*COLUMNS, *sorted(set(rows.columns) - set(COLUMNS))]]
