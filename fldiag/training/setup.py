"""Everything a run derives from its config, built the same way in the main process and in every worker."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fldiag import data, models, registry, sections, user_code
from fldiag.checkpoint import base
from fldiag.config import Config
from fldiag.data import partition
from fldiag.data.arrays import ready
from fldiag.data.public import deal, load_public
from fldiag.data.text import Reading
from fldiag.device import device_of, keep_memory
from fldiag.errors import FldiagError, first_line
from fldiag.local import Local
from fldiag.method import Method
from fldiag.models.network import Network, forward_macs
from fldiag.results import provenance as origin
from fldiag.seeding import seed_for
from fldiag.training import client
from fldiag.training.client import Feed, Trained
from fldiag.training.record import Recorder
from fldiag.training.record import check as check_metrics
from fldiag.training.schedule import Batches, Schedule, Seeded

#: Clients in one stack, at the most: bounds memory and leaves work for several processes.
STACK = 16
#: Stack when a step of one client has fewer multiply-adds than this (calibrated by analyses/speed/training.py).
STACK_BELOW = 100_000_000


@dataclass(kw_only=True)
class Unit:
    """The work of one cohort in one round: all an executor has to send to a worker."""

    t: int
    lr: float
    ids: list[int]
    batches: list[Batches]
    w_g: Tensor
    buffers: dict[str, Tensor]
    sent: dict[str, Tensor]
    state: dict[str, Tensor]  # name -> [K, ...]
    record: bool = False  # the local steps


class Setup:
    """Data, partition, network and method of a run."""

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
        rehearsal: bool = False,
    ):
        """``rehearsal``: nothing will be learnt, only counted and timed, so blank pictures may stand for data that are not
        there; ``remarks`` says so."""
        user_code.check(config.model_dump(), config.allowed_code, f"the config {config.name!r}")
        self.config, self.rehearsal = config, rehearsal
        self._told: list[str] = []
        named = config.data
        self.dataset = (
            dataset
            if dataset is not None
            else self._found(
                named.name, named.root, download, named.variant, normalise=named.normalise
            )
        )
        if not self.dataset.tested:
            raise FldiagError(
                f"data set {self.dataset.name!r} has no test examples, by which training judges the global model",
                "give data with a test split",
                usage=True,
            )
        self.precision = config.train.precision
        self.dtype = torch.float64 if self.precision == "fp64" else torch.float32
        self.device = torch.device(device_of(device, self.dtype))
        keep_memory()
        self.public = self._public(public, download)
        self.parts = (
            parts
            if parts is not None
            else deal(self.dataset, config.partition, config.clients.total, config.data.public)
        )
        self.sizes = partition.sizes(self.parts)
        self.examples = int(self.sizes.sum())
        self.module = (
            module
            if module is not None
            else models.build(
                config.model.name,
                self.dataset.shape,
                self.dataset.classes,
                config.model.options,
                seed=config.seed,
                allow_code=config.allowed_code,
            )
        )
        self.module = copy.deepcopy(self.module).to(self.device, self.dtype)
        self.network = Network(self.module, precision=self.precision)
        self._warm()  # before the method looks: a split that is none is given up there
        self.method: Method = registry.method.get(config.method.name).build(**config.method.options)
        self.method.check(self.network, self.dataset, config)
        check_metrics(config.metrics, self.dataset)
        if any(part.public for part in self.method):
            self._check_public()
        self.schedule = schedule or Seeded(
            config.seed,
            config.clients.total,
            config.clients.per_round,
            config.train.epochs,
            config.train.batch_size,
            config.train.drop_last,
            config.clients.sampling,
        )
        self.stack = self._stack()
        self._check_batches()

    def _found(
        self,
        name: str,
        root: str | None,
        download: bool,
        variant: str | None = None,
        normalise: sections.Normalise | None = None,
    ) -> data.Dataset:
        try:
            return data.load(
                name,
                root,
                download,
                variant,
                normalise=normalise,
                reading=Reading.of(self.config.data.model_dump()),
                allow_code=self.config.allowed_code,
            )
        except FldiagError as error:
            made = data.blank(name, variant) if self.rehearsal else None
            if made is None:
                raise
            self._told.append(
                f"{error.what}: this is the forecast for {len(made.train_y):,} blank pictures of its shape, "
                f"their {made.classes} classes evenly spread"
            )
            return made

    def _public(self, x: Tensor | None, download: bool) -> Tensor | None:
        """Unlabelled inputs [M, ...] for distillation, if the config names any."""
        config = self.config.data
        if x is None and config.public is not None:
            x, _ = load_public(
                config.public,
                self.dataset,
                config.root,
                download,
                config.public_size,
                self.config.partition.seed,
                config.normalise,
                self._found,
            )
        return None if x is None else ready(x, self.device, self.dtype)

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

    def _check_batches(self) -> None:
        """Batch-norm on a map of one position cannot train on one example: tried with the smallest minibatch there is.
        Without its last minibatch some client must have one."""
        largest = int(self.sizes.max())
        if self.config.train.drop_last and largest < self.config.train.batch_size:
            raise FldiagError(
                f"train.drop_last leaves out every minibatch: train.batch_size = {self.config.train.batch_size}, "
                f"and the largest client has {largest} examples",
                "lower train.batch_size, or set train.drop_last = false",
                usage=True,
            )
        train, cuts = self.config.train, max((part.cuts for part in self.method), default=1)
        short = self.sizes % train.batch_size
        last = np.where(short > 0, short, np.minimum(self.sizes, train.batch_size))
        client = int(last.argmin())
        smallest = int(last[client])
        if (
            train.drop_last
            or (not self.network.buffers and not self.network.batch_dependent)
            or smallest // cuts > 1
        ):
            return
        x = ready(
            self.dataset.batch(torch.zeros(1, dtype=torch.long), None), self.device, self.dtype
        )
        buffers = {n: b.clone().unsqueeze(0) for n, b in self.network.buffers.items()}
        try:
            with torch.no_grad(), self.seeded("trial"):
                self.network.bind(self.initial().unsqueeze(0), buffers, train=True)(x.unsqueeze(0))
        except ValueError as error:
            raise FldiagError(
                f"client {client} has a minibatch of {smallest} example{'s' * (smallest > 1)}"
                f"{', of which this method makes parts' if cuts > 1 else ''}, and batch-norm cannot train on one "
                f"example ({first_line(error)})",
                "choose train.batch_size so that no client's last "
                "minibatch is that small, or train.drop_last = true",
                usage=True,
            ) from None

    def _stack(self) -> bool:
        wish, able = self.config.train.stack, self.network.stackable
        if wish == "on" and not able:
            raise FldiagError(
                "train.stack = 'on', but this model cannot be stacked (it is not a plain sequence of affine, "
                "convolution, activation and pooling layers)",
                "use train.stack = 'auto' or 'off'",
                usage=True,
            )
        if wish == "auto" and able:
            return (
                forward_macs(self.module, self.dataset.shape) * self.config.train.batch_size
                < STACK_BELOW
            )
        return wish == "on"

    def _warm(self) -> None:
        """One forward: a model that does not fit the data is refused here, with the shapes."""
        # Two for batch-norm; more because a ReLU that no example switches off would hide what a split leaves out.
        few = torch.arange(16) % len(self.dataset.train_y)
        x = ready(self.dataset.batch(few, None), self.device, self.dtype)
        try:
            with torch.no_grad():
                buffers = {n: b.clone().unsqueeze(0) for n, b in self.network.buffers.items()}
                self.network.confirm_split(self.initial().unsqueeze(0), buffers, x.unsqueeze(0))
                out = self.network.bind(self.initial().unsqueeze(0), buffers)(x.unsqueeze(0))
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

    @contextlib.contextmanager
    def seeded(self, purpose: str, *indices: int) -> Iterator[None]:
        """torch's own generator, seeded for layers that draw from it, and put back afterwards."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            seed = seed_for(self.config.seed, purpose, *indices)
            torch.default_generator.manual_seed(
                seed
            )  # torch.manual_seed also writes down the call stack, for CUDA: 2 ms
            if self.device.type != "cpu":
                torch.manual_seed(seed)
            yield

    @property
    def model_bytes(self) -> int:
        """What one model's weights take, without buffers."""
        return self.network.size * torch.empty((), dtype=self.dtype).element_size()

    @property
    def remarks(self) -> list[str]:
        """What a user should know before training."""
        return [*self._told, *data.remarks(self.dataset)]

    def initial(self) -> Tensor:
        """w_g of round 0, [P]."""
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters()])

    def units(
        self,
        t: int,
        ids: list[int],
        w_g: Tensor,
        buffers: dict[str, Tensor],
        sent: dict[str, Tensor],
        state: dict[int, dict[str, Tensor]],
    ) -> list[Unit]:
        """The round's cohorts: clients of similar length together; depends on the config only, not on the executor."""
        train = self.config.train
        plan = {i: self.schedule.batches(t, i, int(self.sizes[i])) for i in ids}
        order = sorted(ids, key=lambda i: (-len(plan[i]), i))
        size = STACK if self.stack else 1
        return [
            Unit(
                t=t,
                lr=train.lr * train.lr_decay**t,
                ids=cohort,
                batches=[plan[i] for i in cohort],
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

    def train(self, unit: Unit) -> Trained:
        """Local training of one cohort."""
        config, k = self.config, len(unit.ids)
        parts = [self.parts[i] for i in unit.ids]
        augment = (
            client.augmenters(config.seed, unit.t, unit.ids)
            if config.data.augment and self.dataset.augment
            else None
        )
        feed = Feed(self.dataset, parts, unit.batches, self.device, self.dtype, augment)
        w = unit.w_g.to(self.device)
        local = Local(
            network=self.network,
            train=config.train,
            seed=config.seed,
            t=unit.t,
            lr=unit.lr,
            ids=unit.ids,
            w_g=w,
            w=w.expand(k, -1).clone(),
            n=torch.tensor([len(p) for p in parts], device=self.device),
            steps=torch.tensor([len(b) for b in unit.batches], device=self.device),
            state={name: s.to(self.device) for name, s in unit.state.items()},
            sent={name: s.to(self.device) for name, s in unit.sent.items()},
            buffers={
                name: b.to(self.device).expand(k, *b.shape).clone()
                for name, b in unit.buffers.items()
            },
            x=feed.x,
            offset=feed.offset,
            public=self.public,
            mean_size=self.examples / len(self.parts),
        )
        with self.seeded("model", unit.t, unit.ids[0]):  # dropout; such models are not stacked
            return client.train(
                local, self.method, feed, Recorder(config.metrics) if unit.record else None
            )


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
