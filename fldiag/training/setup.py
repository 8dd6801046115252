"""What a run trains with, built from its config: the same in the main process and in every worker."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fldiag import data, models, user_code
from fldiag import method as methods
from fldiag.config import Config
from fldiag.config_files import file_digest, kept_initial
from fldiag.data import partition
from fldiag.data.arrays import ready
from fldiag.data.public import deal, load_public
from fldiag.data.text import Reading
from fldiag.device import device_of, keep_memory
from fldiag.errors import FldiagError, first_line
from fldiag.local import Local
from fldiag.method import Method
from fldiag.models import state_dict
from fldiag.models.network import Network, forward_macs
from fldiag.results import provenance as origin
from fldiag.runs import base, schema
from fldiag.runs.in_memory import with_packed_inputs
from fldiag.runs.run import Run
from fldiag.sections import Normalise, TrainSection
from fldiag.seeding import numpy_rng, seed_for
from fldiag.training import client
from fldiag.training.client import Batches, CohortResult, Feed
from fldiag.training.record import StepRecorder
from fldiag.training.record import check as check_metrics

#: Clients in one stack, at the most: bounds memory and leaves work for several processes.
STACK = 16
#: On a CPU, stack when a step of one client has fewer multiply-adds than this (calibrated by analyses/speed/training.py).
STACK_BELOW = 100_000_000


class Schedule(Protocol):
    """Who trains in a round (from 0), on which minibatches. Another one than ``Seeded`` replays somebody's run."""

    def sampled(self, t: int) -> list[int]: ...

    def batches(self, t: int, client: int, n: int) -> Batches: ...


@dataclass(frozen=True)
class Seeded:
    """Clients without replacement; each epoch a new permutation cut into minibatches (the last may be short)."""

    seed: int
    total: int
    per_round: int
    epochs: int
    batch_size: int
    drop_last: bool = False
    sampling: Literal["fixed", "by_round", "independent"] = "fixed"  # as config.clients.sampling

    def sampled(self, t: int) -> list[int]:
        """Ids of round t's clients. The same for every method: only the seed and the round enter, or the round alone."""
        if self.sampling == "by_round":
            return sorted(
                np.random.RandomState(t).choice(self.total, self.per_round, replace=False).tolist()
            )
        rng = numpy_rng(self.seed, "clients", t)
        while self.sampling == "independent":  # drawn again when nobody joins
            joined = np.flatnonzero(rng.random(self.total) < self.per_round / self.total)
            if len(joined):
                return joined.tolist()
        return sorted(rng.choice(self.total, self.per_round, replace=False).tolist())

    def batches(self, t: int, client: int, n: int) -> Batches:
        rng = numpy_rng(self.seed, "batches", t, client)
        orders = (rng.permutation(n) for _ in range(self.epochs))
        end = n - n % self.batch_size if self.drop_last else n
        return [
            order[i : i + self.batch_size]
            for order in orders
            for i in range(0, end, self.batch_size)
        ]


@dataclass(kw_only=True)
class Cohort:
    """Clients that train together in one round, and all that a worker needs to do it."""

    t: int
    lr: float
    ids: list[int]
    batches: list[Batches]
    w_g: Tensor
    buffers: dict[str, Tensor]
    sent: dict[str, Tensor]
    state: dict[str, Tensor]  # name -> [K, ...]
    record: bool = False  # the local steps

    def __str__(self) -> str:
        clients = ", ".join(map(str, self.ids[:5])) + (", …" if len(self.ids) > 5 else "")
        return f"round {self.t + 1}, clients {clients}"


class Setup:
    """Data and partition, model and weights, method and clients of a run."""

    def __init__(
        self,
        config: Config,
        *,
        device: str = "auto",
        download: bool = False,
        dataset: data.Dataset | None = None,
        parts: Sequence[np.ndarray] | None = None,
        module: nn.Module | None = None,
        schedule: Schedule | None = None,
        public: Tensor | None = None,
    ):
        """``remarks``: what a user should know before training."""
        user_code.check(config.model_dump(), config.allowed_code, f"the config {config.name!r}")
        self.config, self.remarks = config, list[str]()
        self.precision = config.train.precision
        self.dtype = torch.float64 if self.precision == "fp64" else torch.float32
        self._load_data(dataset, parts, public, device, download)
        self._build_model(module)
        self._build_method(schedule)

    def _load_data(
        self,
        dataset: data.Dataset | None,
        parts: Sequence[np.ndarray] | None,
        public: Tensor | None,
        device: str,
        download: bool,
    ) -> None:
        """``dataset``, ``public`` (inputs [M, ...] without labels, or None) and ``parts`` of the clients."""
        config, section = self.config, self.config.data
        if dataset is None:
            dataset = self._load_dataset(
                section.name, section.root, download, section.variant, section.normalise
            )
        if not dataset.tested:
            raise FldiagError(
                f"data set {dataset.name!r} has no test examples, by which training judges the global model",
                "give data with a test split",
                usage=True,
            )
        self.dataset = dataset
        self.device = torch.device(device_of(device, self.dtype))
        keep_memory()
        if public is None and section.public is not None:
            public, _ = load_public(
                section.public,
                dataset,
                section.root,
                download,
                section.public_size,
                config.partition.seed,
                section.normalise,
                self._load_dataset,
            )
        self.public = None if public is None else ready(public, self.device, self.dtype)
        self.remarks += data.remarks(dataset)
        if parts is None:
            parts = deal(dataset, config.partition, config.clients.total, section.public)
            if config.partition.kind == "file":
                self.remarks += partition.file_remarks(parts, len(dataset.train_y))
        self.parts, self.sizes = parts, partition.sizes(parts)
        self.examples = int(self.sizes.sum())

    def _load_dataset(
        self,
        name: str,
        root: str | None,
        download: bool,
        variant: str | None = None,
        normalise: Normalise | None = None,
    ) -> data.Dataset:
        return data.load(
            name,
            root,
            download,
            variant,
            normalise=normalise,
            reading=Reading.of(self.config.data.model_dump()),
            allow_code=self.config.allowed_code,
        )

    def _build_model(self, module: nn.Module | None) -> None:
        """``module`` (a copy) and the ``network`` of its rows."""
        config = self.config
        if module is None:
            module = models.build(
                config.model.name,
                self.dataset.shape,
                self.dataset.classes,
                config.model.options,
                seed=config.seed,
                allow_code=config.allowed_code,
            )
        module = copy.deepcopy(module)
        if config.train.initial is not None:
            module = _load_initial(module, config.train)
        module = with_packed_inputs(module, self.dataset)
        self.module = module.to(self.device, self.dtype)
        self.network = Network(self.module, precision=self.precision)
        self._try_forward()  # before the method looks: a split that is none is given up there

    def _try_forward(self) -> None:
        """A model that does not fit the data is refused here, with the shapes."""
        # Two for batch-norm; more because a ReLU that no example switches off would hide what a split leaves out.
        index = torch.arange(16) % len(self.dataset.train_y)
        x = ready(self.dataset.batch(index, None), self.device, self.dtype)
        try:
            with torch.no_grad():
                w, buffers = self._first_rows()
                self.network.confirm(w, buffers, x.unsqueeze(0))
                out = self.network.bind(w, buffers)(x.unsqueeze(0))
        except (RuntimeError, ValueError, TypeError) as error:
            raise FldiagError(
                f"model {self.config.model.name!r} does not take inputs of shape {self.dataset.shape}: "
                f"{first_line(error)}",
                "choose a model that fits the data",
            ) from None
        if out.shape[1:] != (len(x), self.dataset.classes):
            raise FldiagError(
                f"model {self.config.model.name!r} returns {tuple(out.shape[2:])} numbers an example, the data has "
                f"{self.dataset.classes} classes",
                "give the model as many outputs as there are classes",
            )

    def _build_method(self, schedule: Schedule | None) -> None:
        """``method``, ``schedule`` of its clients, and whether they ``stack``."""
        config, clients, train = self.config, self.config.clients, self.config.train
        self.method: Method = methods.build(
            config.method.name, config.method.options, config.allowed_code
        )
        self.method.check(self.network, self.dataset, config)
        check_metrics(config.metrics, self.dataset)
        if any(part.public for part in self.method):
            self._check_public()
        self.schedule = schedule or Seeded(
            config.seed,
            clients.total,
            clients.per_round,
            train.epochs,
            train.batch_size,
            train.drop_last,
            clients.sampling,
        )
        self.stack = self._is_stacked()
        self._check_batches()

    def _check_public(self) -> None:
        if self.public is None:
            raise FldiagError(
                f"method {self.config.method.name!r} distils on unlabelled public inputs, and there are none",
                "give another data set with --set data.public=cifar100, or training examples that no client "
                "gets with --set data.public=holdout:200",
                usage=True,
            )
        if len(self.public) == 1 and (self.network.buffers or self.network.batch_dependent):
            raise FldiagError(
                "there is one public input, which batch-norm cannot train on",
                "give at least two: data.public=holdout:200, or a larger data.public_size",
                usage=True,
            )

    def _is_stacked(self) -> bool:
        train = self.config.train
        if train.stack == "on" and not self.network.stackable:
            raise FldiagError(
                "train.stack = 'on', but this model cannot be stacked (it is not a plain sequence of affine, "
                "convolution, activation and pooling layers)",
                "use train.stack = 'auto' or 'off'",
                usage=True,
            )
        if train.stack == "auto" and self.network.stackable:
            # an accelerator is done with a step of one client before the next one is asked of it
            macs = forward_macs(self.module, self.dataset.shape) * train.batch_size
            return self.device.type != "cpu" or macs < STACK_BELOW
        return train.stack == "on"

    def _check_batches(self) -> None:
        """Some client has a minibatch; and batch-norm on a map of one position cannot train on one example: that is tried with
        the smallest minibatch there is."""
        train, largest = self.config.train, int(self.sizes.max())
        if train.drop_last and largest < train.batch_size:
            raise FldiagError(
                f"train.drop_last leaves out every minibatch: train.batch_size = {train.batch_size}, "
                f"and the largest client has {largest} examples",
                "lower train.batch_size, or set train.drop_last = false",
                usage=True,
            )
        cuts = max((part.cuts for part in self.method), default=1)
        short = self.sizes % train.batch_size
        last = np.where(short > 0, short, np.minimum(self.sizes, train.batch_size))
        client = int(last.argmin())
        smallest = int(last[client])
        has_statistics = self.network.buffers or self.network.batch_dependent
        if train.drop_last or not has_statistics or smallest // cuts > 1:
            return
        x = self.dataset.batch(torch.zeros(1, dtype=torch.long), None)
        x = ready(x, self.device, self.dtype)
        try:
            with torch.no_grad(), self.seeded("trial"):
                self.network.bind(*self._first_rows(), train=True)(x.unsqueeze(0))
        except ValueError as error:
            raise FldiagError(
                f"client {client} has a minibatch of {smallest} example{'s' * (smallest > 1)}"
                f"{', of which this method makes parts' if cuts > 1 else ''}, and batch-norm cannot train on one "
                f"example ({first_line(error)})",
                "choose train.batch_size so that no client's last "
                "minibatch is that small, or train.drop_last = true",
                usage=True,
            ) from None

    def initial(self) -> Tensor:
        """w_g of round 0, [P]."""
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters()])

    def _first_rows(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights [1, P] and buffers [1, ...] of round 0."""
        buffers = {n: b.clone().unsqueeze(0) for n, b in self.network.buffers.items()}
        return self.initial().unsqueeze(0), buffers

    @property
    def model_bytes(self) -> int:
        """What one model's weights take, without buffers."""
        return self.network.size * self.dtype.itemsize

    @contextlib.contextmanager
    def seeded(self, purpose: str, *indices: int) -> Iterator[None]:
        """torch's own generator, seeded for layers that draw from it, and put back afterwards."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            seed = seed_for(self.config.seed, purpose, *indices)
            # torch.manual_seed also writes down the call stack, for CUDA: 2 ms.
            torch.default_generator.manual_seed(seed)
            if self.device.type != "cpu":
                torch.manual_seed(seed)
            yield

    def cohorts(
        self,
        t: int,
        ids: list[int],
        w_g: Tensor,
        buffers: dict[str, Tensor],
        sent: dict[str, Tensor],
        state: dict[int, dict[str, Tensor]],
    ) -> list[Cohort]:
        """The round's clients, those of similar length together; depends on the config only, not on the executor."""
        train = self.config.train
        batches = {i: self.schedule.batches(t, i, int(self.sizes[i])) for i in ids}
        order = sorted(ids, key=lambda i: (-len(batches[i]), i))
        size = STACK if self.stack else 1
        return [
            Cohort(
                t=t,
                lr=train.lr * train.lr_decay**t,
                ids=cohort,
                batches=[batches[i] for i in cohort],
                w_g=w_g,
                buffers=buffers,
                sent=sent,
                state={
                    name: torch.stack([state[i][name] for i in cohort])
                    for name in (state[cohort[0]] if state else ())
                },
            )
            for cohort in (order[j : j + size] for j in range(0, len(order), size))
        ]

    def train(self, cohort: Cohort) -> CohortResult:
        """Local training of one cohort."""
        config, k, device = self.config, len(cohort.ids), self.device
        parts = [self.parts[i] for i in cohort.ids]
        augment = (
            client.augmenters(config.seed, cohort.t, cohort.ids)
            if config.data.augment and self.dataset.augment
            else None
        )
        feed = Feed(self.dataset, parts, cohort.batches, device, self.dtype, augment)
        w = cohort.w_g.to(device)
        local = Local(
            network=self.network,
            train=config.train,
            seed=config.seed,
            t=cohort.t,
            lr=cohort.lr,
            ids=cohort.ids,
            w_g=w,
            w=w.expand(k, -1).clone(),
            n=torch.tensor([len(part) for part in parts], device=device),
            steps=torch.tensor([len(batches) for batches in cohort.batches], device=device),
            state={name: s.to(device) for name, s in cohort.state.items()},
            sent={name: s.to(device) for name, s in cohort.sent.items()},
            buffers={
                name: b.to(device).expand(k, *b.shape).clone() for name, b in cohort.buffers.items()
            },
            x=feed.x,
            offset=feed.offset,
            public=self.public,
            mean_size=self.examples / len(self.parts),
        )
        recorder = StepRecorder(config.metrics) if cohort.record else None
        with self.seeded("model", cohort.t, cohort.ids[0]):  # dropout; such models are not stacked
            return client.train(local, self.method, feed, recorder)


def _load_initial(module: nn.Module, train: TrainSection) -> nn.Module:
    """The module with the weights of the file that the config names. Raises FldiagError for another file, or another model's."""
    path = Path(str(train.initial))
    if not path.is_file() or file_digest(path) != train.initial_digest:
        raise FldiagError(
            f"the initial weights {path} are not there, or have changed since the config was made",
            "restore the file, or make the config again (and train into another folder)",
        )
    checkpoint = schema.read(path)
    module = base.restore(module, checkpoint)
    try:
        state, _ = state_dict.fit(checkpoint.state, module)
    except FldiagError as error:
        raise FldiagError(
            f"the initial weights {path} do not fit the model: {error.what}",
            "name the model that they belong to with model.name, or start from weights drawn by the seed: "
            "train.initial = none",
            usage=True,
        ) from None
    module.load_state_dict(state, strict=False)
    return module


def provenance(setup: Setup) -> dict[str, Any]:
    """What decides the bits besides the config: versions, threads, device, data."""
    return origin.provenance(
        dtype=setup.dtype,
        device=setup.device,
        seed=setup.config.seed,
        precision=setup.precision,
        data=setup.dataset.fingerprint(),
        stacked=setup.stack,
        method_version=setup.config.method_version,
        **base.provenance(setup.module),
    )


def setup_of(
    run: Run,
    *,
    device: str = "auto",
    root: str | None = None,
    download: bool = False,
    model: str | None = None,
    data: str | None = None,
) -> Setup:
    """The data, partition, network and method of a finished run, for diagnostics that train on from it. ``model``, ``data``:
    the names that the run has, as a consent to import them; ``Run.allow_code`` is the other.

    Raises FldiagError for a run that is not finished or of another program, user code without consent, and data other than
    the run's.
    """
    if run.origin:
        raise FldiagError(
            f"{run.path} was trained by another program, and training again needs its config",
            "give a run that fldiag trained",
        )
    if run.status != "finished":
        remedy = (
            "choose another run"
            if run.status == "diverged"
            else "finish it: fldiag train with the same config, --out and --resume"
        )
        raise FldiagError(
            f"run {run.path} is {run.status} after {run.done} of {run.config.rounds} rounds, and clients start "
            "from the final model",
            remedy,
        )
    config = run.config
    for section, name, consent in (
        ("model", config.model.name, model),
        ("data", config.data.name, data),
    ):
        if consent is not None and consent != name:
            raise FldiagError(
                f"{run.path} was trained with {section} {name!r}, not {consent!r}",
                f"leave out --{section}",
                usage=True,
            )
    config = config.allow(
        [name for name in (model, data) if name is not None and user_code.is_code(name)]
    )
    user_code.check(config.model_dump(), config.allowed_code, run.path)
    if root is None and config.data.root is not None and Path(config.data.root).is_dir():
        root = config.data.root
    config = config.replace(data__root=root)
    if config.train.initial is not None:
        digest = config.train.initial_digest
        initial = str(run.verified(kept_initial(config.train.initial)))
        config = config.replace(train__initial=initial, train__initial_digest=digest)
    setup = Setup(
        config,
        device=device,
        download=download,
        parts=partition.load_parts(run.verified("partition.npz")),
    )
    if run.index["provenance"].get("data") != setup.dataset.fingerprint():
        raise FldiagError(
            f"the data set {setup.dataset.name!r} found here is not the one {run.path} was trained on",
            "point to the same data with --root",
        )
    return setup


def load_weights(
    run: Run, setup: Setup, round: int | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The global weights [P] and buffers that a run stored after a round, by default the last."""
    state, network = run.checkpoint(round).state, setup.network
    buffers = {name: state[name].to(setup.device) for name in network.buffers}
    return network.layout.row(state).to(setup.device, setup.dtype), buffers
