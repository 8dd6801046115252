"""For tests: data, configs, quadratics with a known Hessian, a trace of every local step, and how far rounding may go."""

from __future__ import annotations

import importlib.util
import math
import sys
import typing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fldiag import config as configs
from fldiag import registry
from fldiag.data import Dataset
from fldiag.errors import FldiagError
from fldiag.local import Local
from fldiag.method import Method, Part
from fldiag.sections import ClientsSection, TrainSection
from fldiag.training.server import Federation
from fldiag.training.setup import Schedule, Setup

PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "lr_decay": 1.0}
FULL_BATCH = 10_000
#: Models that need nothing but fldiag. MiniLM needs its package, and is the architecture of bert_tiny.
HERE = sorted(set(registry.model.names()) - {"minilm"})


def analysis(name):
    """A script of analyses/ as a module."""
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[1] / "analyses" / f"{name}.py"
    )
    module = sys.modules[name] = importlib.util.module_from_spec(
        spec
    )  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def config(
    method="fedavg",
    options=None,
    *,
    total=3,
    per_round=None,
    rounds=2,
    seed=0,
    model="mlp",
    model_options=None,
    data="iris",
    public=None,
    checkpoint=None,
    **train,
):
    """A config for small runs: Iris-sized MLP, fp64, looped, momentum and weight decay on unless overridden."""
    tree = {
        "rounds": rounds,
        "seed": seed,
        "data": {"name": data, "public": public},
        "partition": {"kind": "iid"},
        "clients": {"total": total, "per_round": per_round or total},
        "model": {
            "name": model,
            **(model_options if model_options is not None else {"hidden": (7, 5)}),
        },
        "method": {"name": method, **(options or {})},
        "train": {
            "epochs": 2,
            "batch_size": 8,
            "lr": 0.1,
            "weight_decay": 1e-3,
            "precision": "fp64",
            "stack": "off",
            **train,
        },
        "checkpoint": checkpoint or {},
    }
    registry.allow(tree)
    return configs.build(tree)


def classification(sizes=(20, 13, 7), features=6, classes=3, seed=0):
    """Random labelled clients of different size, each with its own bias towards some class: (dataset, parts)."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(sum(sizes), features))).float()
    y = torch.from_numpy(
        np.concatenate(
            [
                rng.choice(
                    classes,
                    size=n,
                    p=np.where(np.arange(classes) == k % classes, 0.6, 0.4 / (classes - 1)),
                )
                for k, n in enumerate(sizes)
            ]
        )
    )
    return Dataset("random", x, y, x[:9], y[:9], classes), split(sizes)


def images(sizes=(11, 9, 6), shape=(1, 8, 8), classes=4, seed=0):
    data, parts = classification(sizes, int(np.prod(shape)), classes, seed)
    x = data.train_x.view(-1, *shape)
    return Dataset("random images", x, data.train_y, x[:9], data.train_y[:9], classes), parts


def tiny_images():
    """A data set by factory (helpers:tiny_images) for runs on disk."""
    return images((40,))[0]


#: What a method may need beyond an MLP on vectors: public inputs, or a residual net on images.
WORLDS = (
    {},
    {"public": "holdout:12"},
    {"model": "small_resnet", "model_options": {}, "data": "helpers:tiny_images"},
)


@cache
def _world(name):
    refusals = []
    for world in WORLDS:
        try:
            Setup(config(name, **world))
        except FldiagError as refusal:
            refusals.append(str(refusal))
        else:
            return world
    raise AssertionError(f"{name} takes none of {WORLDS}: {refusals}")


def needs(name):
    """Keywords of ``config`` with which a method can train."""
    return dict(_world(name))


def world(name, sizes=(20, 13, 7)):
    """(dataset, parts) to go with ``needs(name)``."""
    return images(sizes) if "model" in needs(name) else classification(sizes)


def stacks(name):
    return "model" not in needs(name)


def split(sizes):
    ends = np.cumsum(sizes)
    return [np.arange(e - n, e) for n, e in zip(sizes, ends, strict=True)]


def setup(config, data, *, module=None, schedule=None):
    dataset, parts = data
    return Setup(config, dataset=dataset, parts=parts, module=module, schedule=schedule)


def seeded(seed, total, per_round, epochs, batch_size, sampling="fixed"):
    clients = ClientsSection(total=total, per_round=per_round, sampling=sampling)
    return Schedule(seed, clients, TrainSection(epochs=epochs, batch_size=batch_size))


def federation(config, data, *, module=None, schedule=None, start=None):
    made = Federation(setup(config, data, module=module, schedule=schedule))
    if start is not None:
        made.w = start.to(made.w)
    return made


def play(federation, rounds=1):
    """Train some rounds; returns (what the server saw, the clients' results) of each."""
    return [federation.round(partial(map, federation.setup.train)) for _ in range(rounds)]


def final(config, data, rounds=None, **more):
    """Global weights after a run in memory."""
    made = federation(config, data, **more)
    play(made, rounds or config.rounds)
    return made.w


@dataclass
class Quadratics:
    """Clients with L_k = 1/2 w'A_k w - b_k'w (+ const): least squares over a linear model without bias."""

    data: tuple[Dataset, list[np.ndarray]]
    A: Tensor  # [K, d, d]
    b: Tensor  # [K, d]

    def gradient(self, k: int, w: Tensor) -> Tensor:
        return self.A[k] @ w - self.b[k]

    def loss(self, k: int, w: Tensor) -> Tensor:
        dataset, parts = self.data
        x, y = dataset.train_x[parts[k]].double(), dataset.train_y[parts[k], 0].double()
        return 0.5 * (x @ w - y).square().mean()

    def optimum(self, p=None) -> Tensor:
        """argmin of the p-weighted sum of the clients' losses."""
        p = torch.full((len(self.A),), 1 / len(self.A), dtype=torch.float64) if p is None else p
        return torch.linalg.solve(torch.einsum("k,kij->ij", p, self.A), p @ self.b)

    def config(self, method="fedavg", options=None, **more):
        """Plain full-batch gradient descent in fp64 unless overridden."""
        defaults = {
            **PLAIN,
            "batch_size": FULL_BATCH,
            "model_options": {"hidden": (), "bias": False},
            "total": len(self.A),
        }
        return config(method, options, **{**defaults, **more})


def quadratics(sizes=(12, 12, 12), d=4, seed=0, spread=2.0):
    """Each client has its own Hessian and its own optimum."""
    rng = np.random.default_rng(seed)
    xs, ys = [], []
    for n in sizes:
        x = rng.normal(size=(n, d)) * rng.uniform(0.6, 1.4, size=d)
        xs.append(x)
        ys.append(x @ rng.normal(scale=spread, size=d) + 0.1 * rng.normal(size=n))
    x, y = (
        torch.from_numpy(np.concatenate(xs)).float(),
        torch.from_numpy(np.concatenate(ys)).float()[:, None],
    )
    parts = split(sizes)
    A = torch.stack([x[p].double().T @ x[p].double() / len(p) for p in parts])
    b = torch.stack([x[p].double().T @ y[p, 0].double() / len(p) for p in parts])
    return Quadratics((Dataset("quadratics", x, y, x[:5], y[:5], 1), parts), A, b)


def diagonal(curvatures, optima):
    """Clients with L_k = 1/2 sum_i a_ki (w_i - c_ki)^2, a and c [K, d]: d examples along the axes."""
    a, c = (np.asarray(v, dtype=np.float64) for v in (curvatures, optima))
    d = a.shape[1]
    x = torch.from_numpy(np.concatenate([np.diag(np.sqrt(row * d)) for row in a])).float()
    parts = split([d] * len(a))
    y = torch.cat(
        [(x[p].double() @ torch.from_numpy(row)).float() for p, row in zip(parts, c, strict=True)]
    )[:, None]
    A = torch.stack([x[p].double().T @ x[p].double() / d for p in parts])
    b = torch.stack([x[p].double().T @ y[p, 0].double() / d for p in parts])
    return Quadratics((Dataset("diagonal", x, y, x[:1], y[:1], 1), parts), A, b)


class Trace(Part):
    """Records every local step: weights, gradient (as it is at this place in the order), perturbation."""

    def __init__(self):
        self.w, self.g, self.e, self.ids = [], [], [], []

    def correct(self, step, g):
        self.w.append(step.w.clone())
        self.g.append(g.clone())
        self.ids.append(step.local.ids[: step.k])
        return g


def trace(made: Federation | Setup, *, raw: bool = False) -> Trace:
    """Attach a trace to the method, last in the order (its ``g`` is what the base optimiser gets) or, with ``raw``,
    first (``g`` before every correction); ``e`` holds the perturbations as full rows [k, P]."""
    owner = made.setup if isinstance(made, Federation) else made
    spy = Trace()
    for part in owner.method:
        if type(part).perturb is not Part.perturb:
            part.perturb = partial(_record, part.perturb, spy)
    owner.method = Method(spy, *owner.method.parts) if raw else Method(*owner.method.parts, spy)
    return spy


def _record(perturb, spy, step):
    e = perturb(step)
    full = torch.zeros_like(step.w)
    if e is not None:
        full[:, e.start : e.stop] = e.value
    spy.e.append(full)
    return e


class Normed(torch.nn.Module):
    """Batch-norm with running statistics, dropout, features and a head."""

    def __init__(self, dropout):
        super().__init__()
        self.body, self.norm = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8)
        self.drop, self.fc = torch.nn.Dropout(dropout), torch.nn.Linear(8, 3)

    def features(self, x):
        return self.drop(torch.relu(self.norm(self.body(x.flatten(1)))))

    def forward(self, x):
        return self.fc(self.features(x))


def local_of(network, train, w, steps, **more):
    """The clients of one cohort in the first round, at weights w [k, P]."""
    k = len(w)
    about = {"seed": 0, "t": 0, "lr": 0.1, "ids": list(range(k)), "n": torch.ones(k), "w_g": w[0]}
    about |= {"state": {}, "sent": {}, "steps": torch.tensor(steps)} | more
    return Local(network=network, train=train, w=w, **about)


def normed(dropout=0.0, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Normed(dropout)


class StartAt(Part):
    """Local training starts at a given vector instead of the received one."""

    def __init__(self, w):
        self.w = w

    def begin(self, local):
        local.w.copy_(self.w.to(local.w))


@dataclass(frozen=True)
class Recorded:
    """Somebody's schedule: ``clients[t]`` ids, ``positions[t][client]`` one list of positions a step."""

    clients: list
    positions: list

    def sampled(self, t):
        return list(self.clients[t])

    def batches(self, t, client, n):
        return [np.asarray(batch, dtype=np.int64) for batch in self.positions[t][client]]


def whole(parts, rounds, steps, clients=None):
    """A schedule of full-batch steps: ``steps[k]`` of client k in every round."""
    ids = list(range(len(parts))) if clients is None else clients
    positions = {k: [list(range(len(parts[k])))] * steps[k] for k in range(len(parts))}
    return Recorded([ids] * rounds, [positions] * rounds)


def variants():
    """(method, options) of every registered method at its defaults, and with each literal or boolean option at each
    of its other values."""
    cases = []
    for name in registry.method.names():
        entry = registry.method.get(name)
        cases.append((name, {}))
        for key, field in entry.options.model_fields.items():
            hint, choices = field.annotation, ()
            if typing.get_origin(hint) is typing.Literal:
                choices = typing.get_args(hint)
            elif hint is bool:
                choices = (False, True)
            cases += [(name, {key: value}) for value in choices if value != field.default]
    return cases


def label(case) -> str:
    name, options = case
    return "-".join([name, *(f"{k}={v}" for k, v in options.items())])


def close(a, b, *, terms, dtype=None, size=None, factor=4.0):
    """Asserts that two computations of the same numbers differ by no more than rounding.

    Every number is taken for a sum of ``terms`` products in ``dtype`` (by default the coarser of the two given), added in
    an order that is the processor's own: the errors of such a sum grow like a random walk, to about eps * sqrt(terms)
    times the size of what is summed. That size is the largest number of ``b`` (so an entry that cancels to nearly nothing
    may be off by the rounding of its neighbours), or ``size``, where all of ``b`` is a small difference of larger numbers.
    """
    a, b = (
        v.detach() if isinstance(v, Tensor) else torch.from_numpy(np.asarray(v)) for v in (a, b)
    )
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    dtype = dtype or max((a.dtype, b.dtype), key=lambda d: torch.finfo(d).eps)
    size = float(b.abs().max()) if size is None else float(size)
    allowed = factor * torch.finfo(dtype).eps * math.sqrt(terms) * size
    difference = float((a.double() - b.double()).abs().max())
    assert difference <= allowed, (
        f"differ by {difference:.3g}; rounding of {terms} terms in {dtype} explains {allowed:.3g} "
        f"of numbers up to {size:.3g}"
    )


def terms(module, examples=1):
    """Of how many products an output of a module is the sum, layer upon layer, at most; a gradient sums over examples, too."""
    return examples * sum(p[0].numel() for p in module.parameters() if p.ndim > 1)


def inputs(module, *shape, generator=None, dtype=torch.float32):
    """Random inputs of a shape: numbers, or tokens for a model that embeds them."""
    if any(isinstance(m, torch.nn.Embedding) for m in module.modules()):
        return torch.randint(1, 50, shape, generator=generator)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def multiply_adds(call, *inputs):
    """Multiply-adds of the convolutions and matrix products in ``call(*inputs)``, over the whole batch.

    Counts what is computed, so it holds for slices, sub-networks and dropped blocks alike.
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(*inputs)
    return counter.get_total_flops() // 2


def precision():
    """Whether a GPU's convolutions round to TF32, and come out the same each time."""
    cudnn = torch.backends.cudnn
    tf32 = cudnn.conv.fp32_precision == "tf32" if hasattr(cudnn, "conv") else cudnn.allow_tf32
    return tf32, cudnn.deterministic
