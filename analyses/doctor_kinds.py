"""How many kinds of broken federations does the doctor find, and how many kinds of sound ones does it accuse?

    python analyses/doctor_kinds.py [--seeds 1] [--only REGEX] [--runs /tmp/kinds] [--out analyses]

Small loops on the digits, each with one thing changed, handed to the recorder: what clients train on, how the server mixes, what
is reported, where NaN comes from (``BROKEN``), and loops in which all is well, however odd (``SOUND``). A kind is *found* where
a fault or a warning names it (``words``), *half* found where information does, else *missed*; a sound kind is *accused* by any
fault or warning. The kinds that are held out were written down before the checks were; the first run of the doctor on them found
15 of 17 (not the reversed partition and the two clients that swap their data, for which the comparison of both halves of the
rounds was made) and accused none. Writes doctor_kinds.csv. About two minutes of CPU time a seed.
"""

from __future__ import annotations

import argparse
import copy
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


# -- partitions


def skewed(seed: int, clients: int = 10, alpha: float = 0.3, least: int = 8) -> list[np.ndarray]:
    """Dirichlet shares of every class."""
    rng = np.random.default_rng(seed)
    while True:
        parts: list[list[int]] = [[] for _ in range(clients)]
        for label in range(10):
            where = rng.permutation(np.flatnonzero(Y.numpy() == label))
            ends = (rng.dirichlet([alpha] * clients).cumsum() * len(where)).astype(int)[:-1]
            for part, stretch in zip(parts, np.split(where, ends), strict=True):
                part += stretch.tolist()
        if min(map(len, parts)) >= least:
            return [np.array(sorted(part)) for part in parts]


def equal(seed: int, clients: int = 10, examples: int | None = None) -> list[np.ndarray]:
    """Independent and identical: a random deal."""
    order = np.random.default_rng(seed).permutation(len(Y))[:examples]
    return [np.sort(part) for part in np.array_split(order, clients)]


def by_class(seed: int, clients: int = 10) -> list[np.ndarray]:
    """One class a client."""
    order = np.argsort(Y.numpy(), kind="stable")
    return [np.sort(part) for part in np.array_split(order, clients)]


# -- the loop


@dataclass
class Federation:
    """A plain loop of federated averaging. Every field that is a function is a place where something may be changed.

    ``examples`` (t, k) -> what client k trains on in round t; ``upload`` (t, k, received, state) -> what it returns;
    ``server`` (t, received, states, sizes) -> the new model; ``numbers`` (t, model) -> metrics.
    """

    parts: list[np.ndarray]
    build: Callable[[], nn.Module] = mlp
    rounds: int = 6
    epochs: int = 2
    batch: int = 16
    rate: float = 0.1
    steps: int | None = None
    sampled: int | None = None
    examples: Callable[[int, int], tuple[Tensor, Tensor]] | None = None
    upload: Callable[[int, int, State, State], State] | None = None
    server: Callable[[int, State, list[State], list[int]], State] | None = None
    numbers: Callable[[int, State], dict[str, Any]] | None = None
    optimise: Callable[[nn.Module, float], torch.optim.Optimizer] | None = None
    told: Sequence[Any] | None = None  # the partition that is recorded
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, out: Path, seed: int) -> Path:
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        net = self.build()
        state = copy.deepcopy(net.state_dict())
        options = {"data": "digits", "seed": seed, **self.options}
        told = self.parts if self.told is None else self.told
        recorder = fldiag.Recorder(out, self.build(), clients=told, **options)
        sizes = [len(part) for part in self.parts]
        for t in range(1, self.rounds + 1):
            ids = list(range(len(self.parts)))
            if self.sampled:
                ids = sorted(rng.choice(len(ids), self.sampled, replace=False).tolist())
            states = {k: self._trained(t, k, net, state) for k in ids}
            if self.upload:
                states = {k: self.upload(t, k, state, s) for k, s in states.items()}
            n = [sizes[k] for k in ids]
            new = (self.server or by_examples)(t, state, list(states.values()), n)
            metrics = self.numbers(t, new) if self.numbers else None
            recorder.round(received=state, clients=states, aggregated=new, metrics=metrics)
            state = new
        recorder.close()
        return out

    def _trained(self, t: int, k: int, net: nn.Module, state: State) -> State:
        x, y = self.examples(t, k) if self.examples else own(self.parts[k])
        net.load_state_dict(state)
        if not len(y):
            return copy.deepcopy(net.state_dict())
        optimiser = (
            self.optimise(net, self.rate)
            if self.optimise
            else torch.optim.SGD(net.train().parameters(), self.rate)
        )
        batches = [b for _ in range(self.epochs) for b in torch.randperm(len(y)).split(self.batch)]
        for batch in batches[: self.steps]:
            optimiser.zero_grad()
            nn.functional.cross_entropy(net.train()(x[batch]), y[batch]).backward()
            optimiser.step()
        return copy.deepcopy(net.state_dict())


def own(part: np.ndarray) -> tuple[Tensor, Tensor]:
    rows = torch.as_tensor(part, dtype=torch.long)
    return X[rows], Y[rows]


def mean(states: Sequence[State], weights: Sequence[float]) -> State:
    total = float(sum(weights))
    return {
        n: sum(float(w) / total * s[n].double() for w, s in zip(weights, states, strict=True)).to(
            v.dtype
        )
        if v.is_floating_point()
        else v
        for n, v in states[0].items()
    }


def by_examples(t: int, received: State, states: list[State], sizes: list[int]) -> State:
    return mean(states, sizes)


def flat(state: State) -> Tensor:
    return torch.cat([v.reshape(-1).double() for v in state.values()])


def moved(received: State, new: State, factor: float) -> State:
    """A step of another length."""
    return {
        n: (received[n].double() + factor * (v.double() - received[n].double())).to(v.dtype)
        for n, v in new.items()
    }


def accuracy(state: State, x: Tensor = TEST_X, y: Tensor = TEST_Y) -> float:
    net = mlp()
    net.load_state_dict(state)
    with torch.no_grad():
        return float((net.eval()(x).argmax(1) == y).double().mean())


# -- servers of other rules


def scores(states: Sequence[State], near: int) -> Tensor:
    rows = torch.stack([flat(s) for s in states])
    return (torch.cdist(rows, rows) ** 2).sort(1).values[:, 1 : near + 1].sum(1)


def krum(keep: int, near: int, farthest: bool = False) -> Callable[..., State]:
    def server(t: int, received: State, states: list[State], sizes: list[int]) -> State:
        rows = scores(states, near).argsort(descending=farthest)[:keep].tolist()
        return mean([states[i] for i in rows], [1] * len(rows))

    return server


def coordinates(function: Callable[[Tensor], Tensor]) -> Callable[..., State]:
    """``function`` of the sorted values [K, ...] of every coordinate."""

    def server(t: int, received: State, states: list[State], sizes: list[int]) -> State:
        return {n: function(torch.stack([s[n] for s in states]).sort(0).values) for n in states[0]}

    return server


def trimmed(cut: int) -> Callable[..., State]:
    return coordinates(lambda v: v[cut : len(v) - cut].mean(0))


def middle(v: Tensor) -> Tensor:
    return (v[(len(v) - 1) // 2] + v[len(v) // 2]) / 2


def geometric(steps: int) -> Callable[..., State]:
    def server(t: int, received: State, states: list[State], sizes: list[int]) -> State:
        new = mean(states, sizes)
        for _ in range(steps):
            far = [float((flat(s) - flat(new)).norm()) for s in states]
            new = mean(states, [n / d for n, d in zip(sizes, far, strict=True)])
        return new

    return server


def normalised(batch: int = 16, epochs: int = 2, effective: bool = True) -> Callable[..., State]:
    """FedNova."""

    def server(t: int, received: State, states: list[State], sizes: list[int]) -> State:
        p, tau = np.array(sizes) / sum(sizes), epochs * np.ceil(np.array(sizes) / batch)
        whole = float(p @ tau) if effective else 1.0
        weights = whole * p / tau
        return {
            n: (
                v.double()
                + sum(
                    float(w) * (s[n].double() - v.double())
                    for w, s in zip(weights, states, strict=True)
                )
            ).to(v.dtype)
            for n, v in received.items()
        }

    return server


def optimiser(kind: str) -> Callable[..., State]:
    """A server's Adam, Yogi or momentum on the mean update."""
    m: State = {}
    v: State = {}

    def server(t: int, received: State, states: list[State], sizes: list[int]) -> State:
        new = mean(states, sizes)
        for n, w in new.items():
            d = w.double() - received[n].double()
            m[n] = 0.9 * m.get(n, 0 * d) + (0.1 if kind != "momentum" else 1.0) * d
            old = v.get(n, 0 * d)
            v[n] = (
                0.99 * old + 0.01 * d**2
                if kind == "adam"
                else old - 0.01 * d**2 * (old - d**2).sign()
            )
            step = 0.5 * m[n] if kind == "momentum" else 0.03 * m[n] / (v[n].sqrt() + 1e-3)
            new[n] = (received[n].double() + step).to(w.dtype)
        return new

    return server


# -- the kinds


@dataclass(frozen=True)
class Kind:
    """``make`` (seed) -> the federation; ``words``: what the text of a finding must match to be about this fault; ``held_out``:
    written down before the checks were, and not looked at until they stood."""

    make: Callable[[int], Federation]
    words: str = ""
    held_out: bool = False


def shuffled(y: Tensor, seed: int) -> Tensor:
    return y[torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))]


def relabelled(
    t: int, k: int, parts: list[np.ndarray], whose: Callable[[int], bool], map_: Any
) -> Any:
    """The client's own examples, with the labels that ``map_`` (labels, client) makes where ``whose`` (client)."""
    x, y = own(parts[k])
    return x, map_(y, k) if whose(k) else y


def with_examples(
    parts: list[np.ndarray],
    change: Callable[[int, int, Tensor, Tensor], tuple[Tensor, Tensor]],
    **options: Any,
) -> Federation:
    """``change`` (t, k, x, y) -> what the client trains on in place of its own examples."""
    return Federation(parts, examples=lambda t, k: change(t, k, *own(parts[k])), **options)


def of_others(
    parts: list[np.ndarray], whose: Callable[[int, int], int], **options: Any
) -> Federation:
    """Client k trains on the data of client ``whose`` (k, number of clients)."""
    return Federation(parts, examples=lambda t, k: own(parts[whose(k, len(parts))]), **options)


def permutation(k: int) -> Tensor:
    return torch.randperm(10, generator=torch.Generator().manual_seed(100 + k))


def redrawn(seed: int, deal: Callable[[int], list[np.ndarray]]) -> Federation:
    """Every round deals anew; the first deal is recorded."""
    deals = {t: deal(1000 * seed + t) for t in range(1, 9)}
    return Federation(deals[1], examples=lambda t, k: own(deals[t][k]), rounds=8, epochs=4)


def on_test(seed: int, whose: Callable[[int], bool], epochs: int) -> Federation:
    parts = equal(seed)
    test = np.array_split(np.random.default_rng(seed).permutation(len(TEST_Y)), 10)

    def examples(t: int, k: int) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(test[k] if sum(map(whose, range(10))) > 1 else np.concatenate(test))
        return (TEST_X[rows], TEST_Y[rows]) if whose(k) else own(parts[k])

    return Federation(parts, examples=examples, rounds=8, epochs=epochs)


def twice(seed: int) -> Federation:
    """Half of client 3's examples stand in its list twice."""
    parts = skewed(seed)
    parts[3] = np.concatenate([parts[3], parts[3][: len(parts[3]) // 2]])
    return Federation(parts)


def copied_examples(seed: int) -> Federation:
    """Client 7 holds copies of client 2's examples, under numbers of their own."""
    parts = skewed(seed)
    copies = np.arange(len(Y), len(Y) + len(parts[2]))
    x, y = torch.cat([X, X[parts[2]]]), torch.cat([Y, Y[parts[2]]])
    parts[7] = copies
    return Federation(
        parts,
        examples=lambda t, k: (x[parts[k]], y[parts[k]]),
        options={"data": (x, y), "test": (TEST_X, TEST_Y)},
    )


def some(change: Callable[[Tensor], Tensor], k: int = 4) -> Callable[..., tuple[Tensor, Tensor]]:
    """Other inputs at client 4."""
    return lambda t, i, x, y: (change(x), y) if i == k else (x, y)


def reporting(
    name: str, number: Callable[[int, State], float], **options: Any
) -> Callable[[int], Federation]:
    return lambda seed: Federation(
        skewed(seed), numbers=lambda t, w: {name: number(t, w)}, **options
    )


def not_a_number(layer: str, k: int | None) -> Callable[[int], Federation]:
    def upload(t: int, i: int, received: State, state: State) -> State:
        return {
            n: v * float("nan") if (n == layer and i == k and t >= 3) else v
            for n, v in state.items()
        }

    def server(t: int, received: State, states: list[State], sizes: list[int]) -> State:
        new = mean(states, sizes)
        return {n: v / 0.0 if (n == layer and t == 3) else v for n, v in new.items()}

    if k is None:
        return lambda seed: Federation(skewed(seed), server=server)
    return lambda seed: Federation(skewed(seed), upload=upload)


def named(
    name: str, server: Callable[[], Any] | None = None, **options: Any
) -> Callable[[int], Federation]:
    """A server that calls itself ``name``."""
    about = {"method": name, **options}
    return lambda seed: Federation(
        skewed(seed), server=server() if server else None, options=about, rounds=7
    )


def few_of(total: int) -> Callable[..., State]:
    """A sum over one client less, divided by all of them."""
    return lambda t, w, states, n: mean(states[:-1], n[:-1])


BROKEN: dict[str, Kind] = {
    # what it trains on
    "neighbours_data": Kind(
        lambda s: of_others(skewed(s), lambda k, n: (k + 1) % n), r"fits the data of client k \+ 1"
    ),
    "neighbours_class": Kind(
        lambda s: of_others(by_class(s), lambda k, n: (k + 1) % n),
        r"fits the data of client k \+ 1",
    ),
    "counted_from_one": Kind(
        lambda s: of_others(skewed(s), lambda k, n: (k - 1) % n), r"fits the data of client k - 1"
    ),
    "reversed_partition": Kind(
        lambda s: of_others(skewed(s), lambda k, n: n - 1 - k), r"data of another client", True
    ),
    "two_swapped": Kind(
        lambda s: of_others(skewed(s), lambda k, n: {2: 6, 6: 2}.get(k, k)),
        r"client 2 that of client 6",
        True,
    ),
    "own_label_maps": Kind(
        lambda s: with_examples(equal(s), lambda t, k, x, y: (x, permutation(k)[y])), r"labels"
    ),
    "labels_plus_one": Kind(
        lambda s: with_examples(skewed(s), lambda t, k, x, y: (x, (y + 1) % 10)), r"labels", True
    ),
    "shuffled_at_one": Kind(
        lambda s: with_examples(
            equal(s), lambda t, k, x, y: (x, shuffled(y, t)) if k == 4 else (x, y), rounds=8
        ),
        r"client 4",
    ),
    "shuffled_skewed": Kind(
        lambda s: with_examples(
            skewed(s, alpha=1.0),
            lambda t, k, x, y: (x, shuffled(y, 4)) if k == 4 else (x, y),
            rounds=10,
        ),
        r"client 4",
    ),
    "shuffled_at_all": Kind(
        lambda s: with_examples(skewed(s), lambda t, k, x, y: (x, shuffled(y, k))), r"labels"
    ),
    "flipped_at_one": Kind(
        lambda s: with_examples(equal(s), lambda t, k, x, y: (x, 9 - y) if k == 4 else (x, y)),
        r"client 4",
        True,
    ),
    "transposed_at_one": Kind(
        lambda s: with_examples(equal(s), some(lambda x: x.transpose(-1, -2))), r"client 4", True
    ),
    "raw_at_one": Kind(
        lambda s: with_examples(equal(s), some(lambda x: 255 * x), rate=0.001), r"client 4.*"
    ),
    "unnormalised_at_one": Kind(
        lambda s: with_examples(
            equal(s), some(lambda x: 16 * (x * digits.std[0] + digits.mean[0])), rate=0.02
        ),
        r"client 4",
        True,
    ),
    "small_at_one": Kind(lambda s: with_examples(equal(s), some(lambda x: x / 16)), r"client 4"),
    "negated_at_one": Kind(
        lambda s: with_examples(equal(s), some(lambda x: -x)), r"client 4", True
    ),
    "redrawn_equal": Kind(lambda s: redrawn(s, equal), r"another partition|anew"),
    "redrawn_skewed": Kind(lambda s: redrawn(s, skewed), r"another partition|anew", True),
    "all_on_test": Kind(lambda s: on_test(s, lambda k: True, 10), r"test"),
    "one_on_test": Kind(lambda s: on_test(s, lambda k: k == 3, 10), r"client 3.*test"),
    "twice_in_list": Kind(twice, r"client 3.*twice"),
    "copied_examples": Kind(copied_examples, r"clients 2 and 7 hold equal"),
    # how the server mixes
    "named_krum_averages": Kind(named("krum"), "names Krum"),
    "named_krum_random": Kind(
        named("krum", lambda: lambda t, w, s, n: s[t % len(s)]), "names Krum"
    ),
    "named_multikrum_farthest": Kind(
        named("multi-krum", lambda: krum(6, 6, farthest=True)), "names Multi-Krum", True
    ),
    "named_median_trims": Kind(
        named("fedmedian", lambda: trimmed(2)), "names the coordinate-wise median", True
    ),
    "named_trimmed_averages": Kind(
        named("fedtrimmedavg", lambda: lambda t, w, s, n: mean(s, [1] * len(s))),
        "names the trimmed",
        True,
    ),
    "named_geometric_averages": Kind(named("geometric_median"), "names the geometric", True),
    "named_nova_averages": Kind(named("fednova"), "names FedNova"),
    "named_nova_forgets_tau": Kind(
        lambda s: Federation(
            skewed(s, 12),
            server=normalised(effective=False),
            sampled=6,
            options={"method": "fednova"},
        ),
        "names FedNova",
    ),
    "named_adam_averages": Kind(named("fedadam"), "names fedadam"),
    "named_yogi_averages": Kind(named("FedYogi"), "names FedYogi", True),
    "one_less": Kind(named("fedavg", lambda: few_of(10)), "left out"),
    "all_but_divided_by_all": Kind(
        named(
            "fedavg",
            lambda: (
                lambda t, w, s, n: {
                    k: v * (1 - 1 / len(s)) if v.is_floating_point() else v
                    for k, v in mean(s, n).items()
                }
            ),
        ),
        "do not sum to 1",
    ),
    "rate_twice": Kind(
        named(
            "fedavg",
            lambda: lambda t, w, s, n: moved(w, mean(s, n), 0.25),
            origin={"server_lr": 0.5},
        ),
        "acts twice",
        True,
    ),
    "said_by_examples": Kind(
        named(
            "fedavg",
            lambda: lambda t, w, s, n: mean(s, [1] * len(s)),
            origin={"weights": "by examples"},
        ),
        "plain mean",
    ),
    "squared_sizes": Kind(
        named("fedavg", lambda: lambda t, w, s, n: mean(s, [i**2 for i in n])),
        "neither equal nor",
        True,
    ),
    # reported numbers
    "reports_another_split": Kind(
        reporting("accuracy", lambda t, w: accuracy(w, TEST_X[:230], TEST_Y[:230]) + 0.03),
        "reported accuracy",
        True,
    ),
    "reports_too_much": Kind(
        reporting("test_acc", lambda t, w: min(accuracy(w) + 0.04, 1.0)), "reported test_acc"
    ),
    "reports_training": Kind(
        reporting("test_accuracy", lambda t, w: accuracy(w, X, Y)), "training data"
    ),
    # numbers that are none
    "nan_of_client": Kind(not_a_number("3.weight", 5), "client 5 are not finite"),
    "nan_of_server": Kind(not_a_number("1.bias", None), "although those of the clients", True),
}


def personal(seed: int) -> Federation:
    """FedPer: the head stays with the client, and the server keeps its own."""
    heads: dict[int, State] = {}

    def upload(t: int, k: int, received: State, state: State) -> State:
        heads[k] = {n: v for n, v in state.items() if n.startswith("3.")}
        return state

    def server(t: int, received: State, states: list[State], sizes: list[int]) -> State:
        return {**mean(states, sizes), **{n: v for n, v in received.items() if n.startswith("3.")}}

    return Federation(skewed(seed), upload=upload, server=server, options={"method": "fedper"})


def private(seed: int) -> Federation:
    """Clipped and noisy uploads, as differential privacy has them."""

    def upload(t: int, k: int, received: State, state: State) -> State:
        factor = min(1.0, 1.0 / float((flat(state) - flat(received)).norm()))
        new = moved(received, state, factor)
        return {n: v + 0.01 * torch.randn_like(v) for n, v in new.items()}

    return Federation(equal(seed), upload=upload, options={"method": "dp-fedavg"})


def few_rows(seed: int) -> Federation:
    """A table with so few distinct rows that all clients hold the same."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 3, (1500, 3), generator=g).float()
    y = (x.sum(1).long() + torch.randint(0, 2, (1500,), generator=g)).clamp(max=3)
    net = lambda: nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))  # noqa: E731
    parts = [np.sort(p) for p in np.array_split(np.random.default_rng(seed).permutation(1200), 10)]
    return Federation(
        parts,
        build=net,
        examples=lambda t, k: (x[parts[k]], y[parts[k]]),
        options={"data": (x[:1200], y[:1200]), "test": (x[1200:], y[1200:])},
    )


def buffered(seed: int) -> Federation:
    """FedBuff: half of the replies started from the global model of two rounds before."""
    past: list[State] = []

    def upload(t: int, k: int, received: State, state: State) -> State:
        if k == 0:
            past.append(received)
        old = past[max(len(past) - 3, 0)] if k % 2 else received
        return {n: old[n] + (v - received[n]) for n, v in state.items()}

    def server(t: int, received: State, states: list[State], sizes: list[int]) -> State:
        new = {n: v.clone().double() for n, v in received.items()}
        for k, s in enumerate(states):
            old = past[max(len(past) - 3, 0)] if k % 2 else received
            for n in new:
                new[n] += (s[n].double() - old[n].double()) / len(states)
        return {n: v.to(received[n].dtype) for n, v in new.items()}

    return Federation(skewed(seed), upload=upload, server=server, options={"method": "fedbuff"})


def weighed(powers: float) -> Callable[..., State]:
    """q-FFL, as it were: clients that moved further count more."""

    def server(t: int, received: State, states: list[State], sizes: list[int]) -> State:
        far = [float((flat(s) - flat(received)).norm()) ** powers for s in states]
        return mean(states, far)

    return server


SOUND: dict[str, Kind] = {
    "plain": Kind(lambda s: Federation(skewed(s))),
    "empty_client": Kind(lambda s: Federation([*skewed(s, 9), np.array([], dtype=int)])),
    "krum": Kind(named("krum", lambda: krum(1, 6))),
    "multikrum": Kind(named("krum", lambda: krum(7, 5))),
    "krum_unnamed": Kind(named("own", lambda: krum(1, 6)), held_out=True),
    "trimmed_mean": Kind(named("fedtrimmedavg", lambda: trimmed(2))),
    "median": Kind(named("FedMedian", lambda: coordinates(middle))),
    "geometric_median": Kind(named("geometric_median", lambda: geometric(3)), held_out=True),
    "fednova": Kind(named("fednova", normalised)),
    "fedadam": Kind(named("fedadam", lambda: optimiser("adam"))),
    "fedyogi": Kind(named("fedyogi", lambda: optimiser("yogi")), held_out=True),
    "momentum": Kind(named("fedavgm", lambda: optimiser("momentum"))),
    "bulyan": Kind(
        named(
            "bulyan",
            lambda: (
                lambda t, w, s, n: trimmed(1)(t, w, [s[i] for i in scores(s, 6).argsort()[:6]], n)
            ),
        ),
        held_out=True,
    ),
    "q_ffl": Kind(named("q-FFL", lambda: weighed(1.0)), held_out=True),
    "fedbuff": Kind(buffered, held_out=True),
    "rate_stated": Kind(
        named(
            "fedavg",
            lambda: lambda t, w, s, n: moved(w, mean(s, n), 0.5),
            origin={"server_lr": 0.5},
        )
    ),
    "large_rate": Kind(lambda s: Federation(equal(s), rate=0.5)),
    "larger_rate": Kind(lambda s: Federation(skewed(s), rate=0.7, rounds=8), held_out=True),
    "one_step": Kind(lambda s: Federation(equal(s), steps=1, rate=0.1)),
    "one_step_skewed": Kind(lambda s: Federation(skewed(s), steps=1, rate=0.1), held_out=True),
    "one_class_a_client": Kind(lambda s: Federation(by_class(s))),
    "equal": Kind(lambda s: Federation(equal(s), epochs=5, rounds=8)),
    "long_training": Kind(lambda s: Federation(skewed(s), epochs=10, rounds=10)),
    "tiny_clients": Kind(lambda s: Federation(equal(s, 20, 60), rounds=8)),
    "tiny_skewed": Kind(lambda s: Federation(skewed(s, 40, 0.1, 1), sampled=10), held_out=True),
    "batch_norm_few_steps": Kind(lambda s: Federation(skewed(s), build=normed, steps=2)),
    "personal_heads": Kind(personal),
    "private": Kind(private, held_out=True),
    "few_rows": Kind(few_rows, held_out=True),
    "rounded_report": Kind(reporting("accuracy", lambda t, w: round(accuracy(w), 2))),
    "percent_report": Kind(
        reporting("test_acc", lambda t, w: round(100 * accuracy(w), 1)), held_out=True
    ),
    "training_report": Kind(reporting("train_acc", lambda t, w: accuracy(w, X, Y))),
    "validation_report": Kind(
        reporting("val_accuracy", lambda t, w: accuracy(w, X[:200], Y[:200])), held_out=True
    ),
}


def doctor(kind: Kind, name: str, seed: int, folder: Path) -> pd.DataFrame:
    """What the doctor says of one federation of a kind."""
    federation = kind.make(seed)
    out = folder / f"{name}-{seed}"
    if not (out / "run.json").is_file():
        federation.run(out, seed)
    return fldiag.diagnose(fldiag.load(out, model=federation.build()), "doctor", device="cpu")


def outcome(kind: Kind, table: pd.DataFrame) -> str:
    """found, half (as information alone) or missed."""
    said = table[table["severity"].isin(["fault", "warning", "information"])]
    text = said["what"].str.cat(said["evidence"], sep="; ")
    right = said[text.str.contains(kind.words, regex=True)]
    if right.empty:
        return "missed"
    return "half" if set(right["severity"]) == {"information"} else "found"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="1", help="comma-separated")
    parser.add_argument("--only", default="", help="a regular expression of kinds")
    parser.add_argument("--runs", type=Path, help="a folder that keeps the runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    kinds = [(name, kind, False) for name, kind in BROKEN.items()]
    kinds += [(f"sound-{name}", kind, True) for name, kind in SOUND.items()]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, kind, is_sound in kinds:
            for seed in [int(s) for s in args.seeds.split(",") if re.search(args.only, name)]:
                table = doctor(kind, name, seed, args.runs or Path(scratch))
                alarms = table[table["severity"].isin(["fault", "warning"])]
                result = (
                    outcome(kind, table) if not is_sound else ("ok", "accused")[len(alarms) > 0]
                )
                texts = (
                    alarms["severity"] + ": " + alarms["what"] + " (" + alarms["evidence"] + ")"
                ).tolist()
                rows.append(
                    {
                        "kind": name,
                        "held out": kind.held_out,
                        "seed": seed,
                        "outcome": result,
                        "findings": "; ".join(texts),
                    }
                )
                print(f"{result:8} {name} {seed}: {'; '.join(texts)[:160]}", flush=True)
    frame = pd.DataFrame(rows)
    frame.to_csv(args.out / "doctor_kinds.csv", index=False)
    is_sound = frame["kind"].str.startswith("sound-")
    for label, part in (("broken", frame[~is_sound]), ("sound", frame[is_sound])):
        for held, some in part.groupby("held out"):
            counts = ", ".join(f"{n} {o}" for o, n in some["outcome"].value_counts().items())
            print(f"{label}{' (held out)' if held else ''}: {len(some)} runs, {counts}")
    print(args.out / "doctor_kinds.csv")


if __name__ == "__main__":
    main()
