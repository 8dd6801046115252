"""How many broken federations does the doctor find, and how many sound ones does it accuse?

    python analyses/doctor.py [--seed 1] [--only REGEX] [--out analyses]

Small loops on the digits, each with one thing changed, handed to the recorder. A broken kind is *found* where a fault, or a hint
that names the cause (``words``), says so. Of a sound kind any fault or hint is written down. ``planted`` faults were chosen by
somebody who had not read the checks. Writes doctor.csv; the test of the doctor takes its kinds from here.
"""

from __future__ import annotations

import argparse
import copy
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import fldiag
from fldiag import data

State = dict[str, Tensor]
digits = data.load("digits")
X, Y = digits.normalise(digits.train_x), digits.train_y.long()
TEST_X, TEST_Y = digits.normalise(digits.test_x), digits.test_y.long()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))


def skewed(seed: int, clients: int = 10, alpha: float = 0.3, least: int = 8) -> list[np.ndarray]:
    """Dirichlet shares of every class."""
    rng = np.random.default_rng(seed)
    while True:
        parts: list[list[int]] = [[] for _ in range(clients)]
        for label in range(10):
            where = rng.permutation(np.flatnonzero(Y.numpy() == label))
            ends = (rng.dirichlet([alpha] * clients).cumsum() * len(where)).astype(int)[:-1]
            for part, piece in zip(parts, np.split(where, ends), strict=True):
                part += piece.tolist()
        if min(map(len, parts)) >= least:
            return [np.array(sorted(part), dtype=int) for part in parts]


def equal(seed: int, clients: int = 10, examples: int | None = None) -> list[np.ndarray]:
    """A random deal."""
    order = np.random.default_rng(seed).permutation(len(Y))[:examples]
    return [np.sort(part) for part in np.array_split(order, clients)]


def by_class(seed: int) -> list[np.ndarray]:
    """One class a client."""
    return np.array_split(np.argsort(Y.numpy(), kind="stable"), 10)


@dataclass
class Federation:
    """A plain loop of federated averaging with places for a change.

    ``examples`` (f, k, x, y) -> what client k trains on; ``start`` (f, k) -> the state that it trains; ``upload``
    (f, k, state) -> what it returns; ``server`` (f, {k: state}) -> the new model; ``report`` (f, model) -> a metric, called
    ``metric``. ``past``: the received models by round; ``last``: the clients' last states.
    """

    parts: list[np.ndarray]
    build: Callable[[], nn.Module] = mlp
    rounds: int = 8
    epochs: int = 2
    batch: int = 16
    rate: float | Callable[[int, int], float] = 0.1
    steps: int | None = None
    sampled: int | None = None
    method: str = "own"
    metric: str = "accuracy"
    reduction: str = "mean"
    examples: Callable[..., tuple[Tensor, Tensor]] | None = None
    start: Callable[..., State] | None = None
    upload: Callable[..., State] | None = None
    server: Callable[..., State] | None = None
    report: Callable[..., float] | None = None
    optimise: Callable[..., torch.optim.Optimizer] | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"data": "digits"})
    draw: Callable[[np.random.Generator, int], Any] | None = None
    x: Tensor = X
    y: Tensor = Y
    past: list[State] = field(default_factory=list)
    last: dict[int, State] = field(default_factory=dict)
    memory: dict[Any, Any] = field(default_factory=dict)

    @property
    def t(self) -> int:
        return len(self.past)

    def sizes(self, states: dict[int, State]) -> list[int]:
        return [len(self.parts[k]) for k in states]

    def run(self, out: Path, seed: int) -> Path:
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        model = self.build()
        new = copy.deepcopy(model.state_dict())
        options = {"clients": self.parts, "method": self.method, "seed": seed, **self.options}
        with fldiag.Recorder(out, self.build(), **options) as recorder:
            for t in range(self.rounds):
                self.past.append(new)
                ids = range(len(self.parts))
                if self.draw:
                    ids = self.draw(rng, t)
                elif self.sampled:
                    ids = sorted(rng.choice(len(ids), self.sampled, replace=False).tolist())
                states = {int(k): self.train(int(k), model) for k in ids}
                new = (self.server or by_examples)(self, states)
                metrics = {self.metric: self.report(self, new)} if self.report else None
                recorder.round(
                    received=self.past[-1], clients=states, aggregated=new, metrics=metrics
                )
        return out

    def train(self, k: int, model: nn.Module) -> State:
        rows = torch.as_tensor(self.parts[k], dtype=torch.long)
        x, y = self.x[rows], self.y[rows]
        if self.examples:
            x, y = self.examples(self, k, x, y)
        model.load_state_dict(self.start(self, k) if self.start else self.past[-1])
        rate = self.rate(self.t, k) if callable(self.rate) else self.rate
        make = self.optimise or torch.optim.SGD
        optimiser = make(model.train().parameters(), rate)
        batches = [b for _ in range(self.epochs) for b in torch.randperm(len(y)).split(self.batch)]
        for batch in batches[: self.steps]:
            if len(batch) > (self.build is normed):  # no batch-norm of one example
                loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        state = copy.deepcopy(model.state_dict())
        self.last[k] = state
        return self.upload(self, k, state) if self.upload else state


# -- servers


def mean(states: Any, weights: Any, total: float | None = None) -> State:
    """The weighted mean; ``total``: another divisor than the weights' sum."""
    p = np.asarray(weights, dtype=float) / (total or float(np.sum(weights)))
    return combine(
        lambda *v: sum(float(a) * b.double() for a, b in zip(p, v, strict=True)), *states
    )


def combine(function: Callable[..., Tensor], *states: State) -> State:
    """A function of the tensors of one name, for all names; whole numbers stay the first's."""
    return {
        n: function(*(s[n] for s in states)).to(v.dtype) if v.is_floating_point() else v
        for n, v in states[0].items()
    }


def by_examples(f: Federation, states: dict[int, State]) -> State:
    return mean(states.values(), f.sizes(states))


def plain(f: Federation, states: dict[int, State]) -> State:
    return mean(states.values(), np.ones(len(states)))


def stepped(factor: float) -> Callable[..., State]:
    """A step of another length."""
    return lambda f, states: combine(
        lambda w, v: w + factor * (v - w), f.past[-1], by_examples(f, states)
    )


def sent(change: Callable[[Tensor], Tensor]) -> Callable[..., State]:
    """A server that gets ``change`` of every update."""
    return lambda f, states: combine(
        lambda w, *v: (
            w
            + sum(n * change(a - w) for n, a in zip(f.sizes(states), v, strict=True))
            / sum(f.sizes(states))
        ),
        f.past[-1],
        *states.values(),
    )


def flat(state: State) -> Tensor:
    return torch.cat([v.reshape(-1).double() for v in state.values()])


def krum(keep: int, near: int = 6) -> Callable[..., State]:
    def server(f: Federation, states: dict[int, State]) -> State:
        rows = torch.stack([flat(s) for s in states.values()])
        score = torch.cdist(rows, rows).square().sort(1).values[:, 1 : near + 1].sum(1)
        everyone = list(states.values())
        return mean([everyone[i] for i in score.argsort()[:keep].tolist()], np.ones(keep))

    return server


def sorted_by_coordinate(function: Callable[[Tensor], Tensor]) -> Callable[..., State]:
    return lambda f, states: combine(
        lambda *v: function(torch.stack(v).sort(0).values), *states.values()
    )


def momentum(f: Federation, states: dict[int, State], also_buffers: bool = False) -> State:
    new = by_examples(f, states)
    for n, v in new.items():
        if v.is_floating_point() and (also_buffers or "running" not in n):
            f.memory[n] = 0.9 * f.memory.get(n, 0) + v - f.past[-1][n]
            new[n] = f.past[-1][n] + f.memory[n]
    return new


def adam(f: Federation, states: dict[int, State]) -> State:
    new = by_examples(f, states)
    for n, w in f.past[-1].items():
        m, v = f.memory.get(n, (0, 0))
        d = new[n] - w
        m, v = f.memory[n] = 0.9 * m + 0.1 * d, 0.99 * v + 0.01 * d**2
        new[n] = w + 0.03 * m / (v.sqrt() + 1e-3)
    return new


def nova(f: Federation, states: dict[int, State]) -> State:
    p = np.array(f.sizes(states)) / sum(f.sizes(states))
    tau = f.epochs * np.ceil(np.array(f.sizes(states)) / f.batch)
    c = (p @ tau) * p / tau
    return combine(
        lambda w, *v: w + sum(float(a) * (b - w) for a, b in zip(c, v, strict=True)),
        f.past[-1],
        *states.values(),
    )


def feddyn(f: Federation, states: dict[int, State], a: float = 0.1) -> State:
    """The server of FedDyn: h <- h - a / K sum (w_k - w), w <- mean - h / a."""
    new = plain(f, states)
    for n, w in f.past[-1].items():
        step = sum(s[n] - w for s in states.values()) * a / len(f.parts)
        f.memory[n] = f.memory.get(n, 0) - step
        new[n] = new[n] - f.memory[n] / a
    return new


def noisy(f: Federation, states: dict[int, State]) -> State:
    """Noise of 1 % of the step."""
    return combine(
        lambda w, v: v + 0.01 * (v - w).square().mean().sqrt() * torch.randn_like(v),
        f.past[-1],
        by_examples(f, states),
    )


# -- clients


def accuracy(f: Federation, state: State, x: Tensor = TEST_X, y: Tensor = TEST_Y) -> float:
    model = f.build()
    model.load_state_dict(state)
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).double().mean())


def of_client(whose: Callable[[int], int]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Client k trains on the data of client ``whose`` (k)."""
    return lambda f, k, x, y: (f.x[f.parts[whose(k)]], f.y[f.parts[whose(k)]])


def inputs(
    change: Callable[[Tensor], Tensor], who: int = 4
) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda f, k, x, y: (change(x), y) if k == who else (x, y)


def labels(
    change: Callable[..., Tensor], who: int | None = None
) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda f, k, x, y: (x, change(y, k)) if who in (k, None) else (x, y)


def shuffled(y: Tensor, k: int) -> Tensor:
    return y[torch.randperm(len(y), generator=torch.Generator().manual_seed(k))]


def at_one(change: Callable[..., State], who: int = 3) -> Callable[..., State]:
    """A start that is ``change`` (f, k) at one client."""
    return lambda f, k: change(f, k) if k == who else f.past[-1]


def late(rounds: int) -> Callable[..., State]:
    return lambda f, k: f.past[max(f.t - 1 - rounds, 0)]


def kept(prefix: str = "") -> Callable[..., State]:
    """Tensors whose names begin so stay the client's own."""
    return lambda f, k: {
        n: f.last[k][n] if k in f.last and n.startswith(prefix) else v
        for n, v in f.past[-1].items()
    }


def update(change: Callable[[Tensor], Tensor], who: int | None = None) -> Callable[..., State]:
    """An upload with another update."""
    return lambda f, k, s: (
        combine(lambda w, v: w + change(v - w), f.past[-1], s) if who in (k, None) else s
    )


def not_a_number(f: Federation, k: int, state: State) -> State:
    is_here = k == 5 and f.t >= 3
    return {n: v * float("nan") if is_here and n == "3.weight" else v for n, v in state.items()}


def redrawn(seed: int, deal: Callable[[int], list[np.ndarray]]) -> Federation:
    """Every round deals anew; the first deal is recorded."""
    deals = [deal(1000 * seed + t) for t in range(9)]
    examples = lambda f, k, x, y: (f.x[deals[f.t - 1][k]], f.y[deals[f.t - 1][k]])  # noqa: E731
    return Federation(deals[0], examples=examples, epochs=4)


def on_test(seed: int, who: int | None) -> Federation:
    """Client ``who`` trains on the test examples, or all clients share them."""

    def examples(f: Federation, k: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        some = slice(None) if who is not None else slice(k, None, 10)
        return (TEST_X[some], TEST_Y[some]) if who in (k, None) else (x, y)

    return Federation(equal(seed), examples=examples, epochs=10)


def with_rows(seed: int, client: int, x: Tensor, y: Tensor) -> Federation:
    """Client ``client`` holds these examples too."""
    parts = skewed(seed)
    parts[client] = np.concatenate([parts[client], np.arange(len(Y), len(Y) + len(y))])
    x, y = torch.cat([X, x]), torch.cat([Y, y])
    return Federation(parts, x=x, y=y, options={"data": (x, y), "test": (TEST_X, TEST_Y)})


def twice(seed: int) -> Federation:
    """Half of client 3's examples stand in its list twice."""
    parts = skewed(seed)
    parts[3] = np.concatenate([parts[3], parts[3][::2]])
    return Federation(parts)


def copied(seed: int) -> Federation:
    """Client 7 holds copies of client 2's examples."""
    rows = skewed(seed)[2]
    f = with_rows(seed, 7, X[rows], Y[rows])
    f.parts[7] = f.parts[7][-len(rows) :]
    return f


def few_rows(seed: int) -> Federation:
    """A table with so few distinct rows that all clients hold the same."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 3, (1800, 3), generator=g).float()
    y = (x.sum(1).long() + torch.randint(0, 2, (1800,), generator=g)).clamp(max=3)
    build = lambda: nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))  # noqa: E731
    given = {"data": (x[:1500], y[:1500]), "test": (x[1500:], y[1500:])}
    return Federation(equal(seed), build, x=x, y=y, options=given)


def dead() -> nn.Module:
    model = mlp()
    nn.init.uniform_(model[1].bias, -8, 0)
    return model


Make = Callable[[int], Federation]


def kind(deal: Callable[[int], list[np.ndarray]] = skewed, **changes: Any) -> Make:
    return lambda seed: Federation(deal(seed), **changes)


fedavg = partial(kind, method="fedavg")
half = sent(lambda v: v.half().float())

#: Name -> the federation of a seed, and what the text of a finding must match to name the cause.
BROKEN: dict[str, tuple[Make, str]] = {
    "neighbours_data": (kind(examples=of_client(lambda k: (k + 1) % 10)), "data of another"),
    "neighbours_class": (kind(by_class, examples=of_client(lambda k: (k + 1) % 10)), "another"),
    "counted_from_one": (kind(examples=of_client(lambda k: (k - 1) % 10)), "data of another"),
    "reversed_partition": (kind(examples=of_client(lambda k: 9 - k)), "data of another"),
    "two_swapped": (
        kind(examples=of_client(lambda k: {2: 6, 6: 2}.get(k, k))),
        "training of client 2|data of another",
    ),
    "own_label_maps": (kind(equal, examples=labels(lambda y, k: (y * 7 + k) % 10)), "other labels"),
    "labels_plus_one": (kind(examples=labels(lambda y, k: (y + 1) % 10)), "other labels"),
    "shuffled_at_one": (
        kind(equal, examples=labels(shuffled, 4)),
        "(training|updates) of client 4",
    ),
    "shuffled_skewed": (
        kind(partial(skewed, alpha=1.0), rounds=10, examples=labels(shuffled, 4)),
        "(training|updates) of client 4",
    ),
    "shuffled_at_all": (kind(examples=labels(shuffled)), "other labels"),
    "flipped_at_one": (
        kind(equal, examples=labels(lambda y, k: 9 - y, 4)),
        "(training|updates) of client 4",
    ),
    "transposed_at_one": (
        kind(equal, examples=inputs(lambda x: x.mT)),
        "(training|updates) of client 4",
    ),
    "raw_at_one": (
        kind(equal, examples=inputs(lambda x: 255 * x), rate=0.001),
        "(training|updates) of client 4",
    ),
    "unnormalised_at_one": (
        kind(
            equal, examples=inputs(lambda x: 16 * (x * digits.std[0] + digits.mean[0])), rate=0.02
        ),
        "(training|updates) of client 4",
    ),
    "small_at_one": (
        kind(equal, examples=inputs(lambda x: x / 16)),
        "(training|updates) of client 4",
    ),
    "negated_at_one": (
        kind(equal, examples=inputs(lambda x: -x)),
        "(training|updates) of client 4",
    ),
    "redrawn_equal": (lambda s: redrawn(s, equal), "partition"),
    "redrawn_skewed": (lambda s: redrawn(s, skewed), "partition"),
    "all_on_test": (lambda s: on_test(s, None), "test examples"),
    "one_on_test": (lambda s: on_test(s, 3), "client 3.*test examples"),
    "twice_in_list": (twice, "client 3.*twice"),
    "copied_examples": (copied, "clients 2 and 7 hold equal"),
    "one_less": (
        fedavg(server=lambda f, s: by_examples(f, {k: s[k] for k in list(s)[:-1]})),
        "left out",
    ),
    "divided_by_all": (
        fedavg(server=lambda f, s: combine(lambda v: 0.9 * v, by_examples(f, s))),
        "do not sum to 1",
    ),
    "rate_twice": (fedavg(server=stepped(0.25)), "multiple"),
    "said_by_examples": (fedavg(server=plain), "plain mean"),
    "squared_sizes": (
        fedavg(server=lambda f, s: mean(s.values(), np.square(f.sizes(s)))),
        "other weights",
    ),
    "reports_another_split": (
        kind(report=lambda f, w: accuracy(f, w, TEST_X[:230], TEST_Y[:230]) + 0.03),
        "reported accuracy",
    ),
    "reports_too_much": (
        kind(metric="test_acc", report=lambda f, w: min(accuracy(f, w) + 0.04, 1.0)),
        "reported test_acc",
    ),
    "reports_training": (
        kind(metric="test_accuracy", report=lambda f, w: accuracy(f, w, X, Y)),
        "training data",
    ),
    "nan_of_client": (kind(upload=not_a_number), "client 5 are not finite"),
    "nan_of_server": (
        kind(server=lambda f, s: combine(lambda v: v / (f.t != 3), by_examples(f, s))),
        "aggregate.*not finite",
    ),
}
PLANTED: dict[str, tuple[Make, str]] = {
    "uniform_mean": (fedavg(server=plain, sampled=5), "plain mean"),
    "counted_twice": (
        fedavg(
            server=lambda f, s: mean(list(s.values())[:1] * 2 + list(s.values())[2:], f.sizes(s)),
            sampled=5,
        ),
        "weights|left out",
    ),
    "divisor": (
        fedavg(server=lambda f, s: mean(s.values(), f.sizes(s), 1500), sampled=5),
        "do not sum to 1",
    ),
    "stale_broadcast": (
        kind(
            server=lambda f, s: (f.past.__setitem__(-1, f.past[0]), by_examples(f, s))[1],
            start=lambda f, k: f.past[0],
        ),
        "another model than the last aggregate",
    ),
    "last_buffers": (
        kind(
            build=normed,
            server=lambda f, s: (
                by_examples(f, s)
                | {n: v for n, v in list(s.values())[-1].items() if "running" in n}
            ),
        ),
        "buffers are those of one client",
    ),
    "momentum_buffers": (
        fedavg(build=normed, rounds=12, server=partial(momentum, also_buffers=True)),
        "buffers are",
    ),
    "returns_received": (
        fedavg(upload=update(lambda d: 0 * d, 2), sampled=5, rounds=12),
        "client 2 is exactly zero",
    ),
    "old_model": (
        fedavg(upload=lambda f, k, s: f.memory.setdefault(k, s) if k == 5 else s),
        "client 5 returned weights",
    ),
    "summed_loss": (fedavg(upload=update(lambda d: 20 * d, 6)), "client 6 are unusually long"),
    "shared_module": (fedavg(upload=lambda f, k, s: f.memory.setdefault(f.t, s)), "each other"),
    "never_drawn": (
        fedavg(draw=lambda rng, t: sorted(rng.choice(9, 5, replace=False)), rounds=25),
        "client 9 is never drawn",
    ),
    "shuffled_labels": (
        fedavg(examples=labels(shuffled, 4), sampled=5, rounds=12),
        "(training|updates) of client 4",
    ),
    "leaked_test": (lambda s: with_rows(s, 3, TEST_X[:40], TEST_Y[:40]), "overlaps"),
    "dead_units": (fedavg(build=dead, rounds=12), "units"),
    "collapsed_head": (
        fedavg(examples=labels(lambda y, k: (y >= 5).long()), rounds=12),
        "chance|other labels",
    ),
    "best_reported": (
        fedavg(
            rounds=20,
            sampled=3,
            rate=0.5,
            report=lambda f, w: f.memory.setdefault(0, max(f.memory.pop(0, 0.0), accuracy(f, w))),
        ),
        "the best so far",
    ),
    "rate_too_high": (fedavg(rate=20.0), "chance|finite|diverged"),
    "seed_unused": (fedavg(), "seed"),
    "order_unseeded": (fedavg(), "seed"),
    "mean_of_clients": (
        fedavg(
            report=lambda f, w: float(
                np.mean([accuracy(f, f.last[k], f.x[p], f.y[p]) for k, p in enumerate(f.parts)])
            )
        ),
        "reported accuracy",
    ),
}
STARTS: dict[str, tuple[Make, str]] = {
    f"{name}_{deal.__name__}": (kind(deal, rounds=rounds, start=start), words)
    for deal in (skewed, equal)
    for name, rounds, start, words in (
        ("head_kept_by_all", 10, kept("3."), "own last 3"),
        ("head_kept_by_one", 10, at_one(kept("3.")), "client 3 .*own last 3"),
        ("own_model_at_one", 10, at_one(kept()), "client 3 .*own last"),
        ("initial_at_one", 10, at_one(lambda f, k: f.past[0]), "client 3 starts from an old"),
        ("all_late", 10, late(1), "clients start from an old model"),
        ("one_late", 14, at_one(late(2)), "client 3 starts from an old"),
    )
}


def local(name: str, rate: float, **options: Any) -> Make:
    """Clients with another optimiser."""
    optimiser = getattr(torch.optim, name)
    return kind(optimise=lambda parameters, _: optimiser(parameters, lr=rate, **options))


def named(method: str, server: Callable[..., State], **changes: Any) -> Make:
    return kind(method=method, server=server, **changes)


SOUND: dict[str, Make] = {
    "plain": kind(),
    "equal": kind(equal),
    "equal_long": kind(equal, epochs=5, rounds=10),
    "very_skewed": kind(partial(skewed, alpha=0.1, least=4), rounds=12),
    "stated": fedavg(),
    "stated_sampled": fedavg(partial(skewed, clients=20, alpha=0.5, least=4), sampled=5, rounds=16),
    "uniform": kind(server=plain),
    "empty_client": lambda s: Federation([*skewed(s, 9), np.array([], dtype=int)], steps=9),
    "one_class_a_client": kind(by_class),
    "one_class_sampled": kind(by_class, sampled=4, rounds=16),
    "one_client": kind(partial(equal, clients=1)),
    "two_clients": kind(partial(skewed, clients=2)),
    "three_clients_nearly_parallel": kind(partial(equal, clients=3), rounds=12),
    "tiny_clients": kind(partial(equal, clients=20, examples=60)),
    "twenty_examples": kind(partial(equal, clients=10, examples=200), rounds=12),
    "tiny_skewed": kind(partial(skewed, clients=40, alpha=0.1, least=1), sampled=10),
    "few_rows": few_rows,
    "one_step": kind(equal, steps=1),
    "one_step_skewed": kind(steps=1),
    "long_training": kind(epochs=10, rounds=10),
    "converged": kind(epochs=3, rounds=40),
    "full_batch": kind(batch=2000),
    "batch_of_four": kind(batch=4, rate=0.05),
    "large_rate": kind(equal, rate=0.5),
    "larger_rate": kind(rate=0.7),
    "very_large_rate": kind(rate=1.0),
    "tiny_rate": kind(rate=1e-5),
    "decay": kind(rate=lambda t, k: 0.2 * 0.7**t, rounds=12),
    "unequal_rates": kind(equal, rate=lambda t, k: 0.02 * (1 + k)),
    "unequal_optimisers": kind(
        equal, optimise=lambda p, r: torch.optim.SGD(p, r, momentum=0.9, weight_decay=1e-3)
    ),
    "local_adam": local("Adam", 0.01),
    "local_momentum": local("SGD", 0.05, momentum=0.9),
    "local_nesterov": local("SGD", 0.03, momentum=0.9, nesterov=True),
    "weight_decay": local("SGD", 0.1, weight_decay=0.02),
    "batch_norm": kind(equal, build=normed),
    "batch_norm_sampled": kind(build=normed, sampled=4, rounds=10),
    "batch_norm_last_of_two": kind(
        lambda s: [p[: len(p) // 16 * 16 - 14] for p in skewed(s, least=32)],
        build=normed,
        sampled=4,
        rounds=10,
    ),
    "batch_norm_few_steps": kind(build=normed, steps=2),
    "batch_norm_stated": fedavg(build=normed, rounds=12),
    "convolutional": kind(equal, build=convolutional, rounds=6),
    "convolutional_skewed": kind(build=convolutional, rounds=6),
    "churn": kind(draw=lambda rng, t: range(t // 2, t // 2 + 6), rounds=10),
    "half_precision": kind(server=half),
    "half_precision_stated": fedavg(server=half),
    "noise_of_1_percent": kind(server=noisy),
    "noise_of_1_percent_stated": fedavg(server=noisy),
    "uploads_in_half_precision": kind(equal, upload=lambda f, k, s: combine(lambda v: v.half(), s)),
    "signs": kind(equal, upload=update(lambda d: 0.005 * d.sign())),
    "private": kind(
        equal,
        method="dp-fedavg",
        upload=update(lambda d: 0.5 * d + 0.01 * torch.randn_like(d)),
    ),
    "krum_unnamed": kind(server=krum(1)),
    "krum": named("krum", krum(1)),
    "multi_krum": named("multi-krum", krum(7, 5)),
    "trimmed_mean": named("fedtrimmedavg", sorted_by_coordinate(lambda v: v[2:-2].mean(0))),
    "median": named("fedmedian", sorted_by_coordinate(lambda v: v.quantile(0.5, dim=0))),
    "server_momentum": named("fedavgm", momentum),
    "server_adam": named("fedadam", adam),
    "fednova": named("fednova", nova),
    "feddyn": named("feddyn", feddyn, sampled=5),
    "personal_heads": kind(method="fedper", start=kept("3."), rounds=10),
    "asynchronous": kind(method="fedasync", start=at_one(late(2)), rounds=10),
    "rounded_report": kind(report=lambda f, w: round(accuracy(f, w), 2)),
    "percent_report": kind(report=lambda f, w: round(100 * accuracy(f, w), 1)),
    "training_report": kind(metric="train_acc", report=lambda f, w: accuracy(f, w, X, Y)),
}
GROUPS = {"broken": BROKEN, "planted": PLANTED, "start": STARTS}
GROUPS["sound"] = {name: (make, "") for name, make in SOUND.items()}


def examine(make: Make, seed: int) -> pd.DataFrame:
    """The faults and hints of the doctor on one federation."""
    federation = make(seed)
    with tempfile.TemporaryDirectory() as folder:
        run = fldiag.load(federation.run(Path(folder) / "run", seed), model=federation.build())
        rows = fldiag.diagnose(run, "doctor", device="cpu")
    return rows[rows["severity"].isin(["fault", "hint"])]


def judge(group: str, name: str, seed: int) -> dict[str, Any]:
    """One row of the table."""
    make, words = GROUPS[group][name]
    rows = examine(make, seed)
    texts = (rows["severity"] + ": " + rows["what"] + " (" + rows["evidence"] + ")").tolist()
    worst = "fault" if (rows["severity"] == "fault").any() else "hint" if texts else "clean"
    is_right = any(re.search(words, text) for text in texts)
    outcome = worst if group == "sound" else ("missed", "found")[is_right]
    return {"group": group, "kind": name, "outcome": outcome, "findings": "; ".join(texts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a regular expression of GROUP-KIND")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    rows = []
    for group, name in [(g, n) for g, kinds in GROUPS.items() for n in kinds]:
        if re.search(args.only, f"{group}-{name}"):
            rows.append(judge(group, name, args.seed))
            print("{outcome:7} {group} {kind}: {findings:.200}".format(**rows[-1]), flush=True)
    frame = pd.DataFrame(rows)
    print(frame.groupby(["group", "outcome"]).size().to_string())
    if not args.only:
        frame.to_csv(args.out / "doctor.csv", index=False)
        print(args.out / "doctor.csv")


if __name__ == "__main__":
    main()
