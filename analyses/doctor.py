"""How many broken federations does the doctor find, and how many sound ones does it accuse?

    python analyses/doctor.py [SEED ...]

Small loops on the digits, each with one thing changed, are recorded and examined. A broken one is *found* where a fault, or a
hint that names the cause, says so: the text of a finding matches the words of its case, a regular expression. Of a sound one
every fault and hint is written down. ``planted`` cases were chosen by somebody who had not read the checks; the last three of
them cannot be seen in one run. Writes doctor.csv, by which the doctor is tested.
"""

from __future__ import annotations

import copy
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import fldiag
from fldiag import data

SEEDS = (1, 7)
digits = data.load("digits")
#: All examples. The last are the test examples.
X = digits.normalise(torch.cat([digits.train_x, digits.test_x]))
Y = torch.cat([digits.train_y, digits.test_y])
N = len(digits.train_y)
TEST = np.arange(N, len(Y))
#: Where the head and the statistics of batch-norm lie among the numbers of ``mlp`` and ``normed``.
HEAD, STATISTICS = slice(2080, 2410), slice(2144, 2209)


def mlp(norm=nn.Identity):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), norm(32), nn.ReLU(), nn.Linear(32, 10))


def normed():
    return mlp(nn.BatchNorm1d)


def convolutional():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))


def dead():
    """Most hidden units answer no example."""
    model = mlp()
    nn.init.uniform_(model[1].bias, -8, 0)
    return model


def skewed(seed, clients=10, alpha=0.3, least=8):
    """Dirichlet shares of every class."""
    rng, sizes = np.random.default_rng(seed), [0]
    while min(sizes) < least:
        ends = rng.dirichlet([alpha] * clients, size=10).cumsum(1)
        owner = (rng.random(N)[:, None] > ends[Y[:N], :-1]).sum(1)
        sizes = np.bincount(owner, minlength=clients)
    return [np.flatnonzero(owner == k) for k in range(clients)]


def equal(seed, clients=10, examples=N):
    """A random deal."""
    return np.array_split(np.random.default_rng(seed).permutation(N)[:examples], clients)


def by_class(seed):
    """One class a client."""
    return np.array_split(Y[:N].argsort(stable=True).numpy(), 10)


def with_tenth(part):
    """Nine clients, and one that holds ``part`` (the others')."""
    return lambda seed: [*skewed(seed, 9), part(skewed(seed, 9))]


def keep(f, client, value):
    return value


@dataclass
class Federation:
    """A plain loop of federated averaging. A model is a vector of all numbers of its state_dict.

    ``rows``, ``inputs``, ``labels``, ``start`` and ``upload`` (f, client, value) change what a client reads, from what it starts
    and what it returns; ``server`` (f, v) makes the new model of the clients' [K, n]. In a round there are the received model
    ``w``, the drawn clients ``ids`` and their shares ``p``; ``past``: the models so far; ``last``: the clients' last ones.
    """

    seed: int
    deal: Any = skewed
    build: Any = mlp
    method: str = "own"
    rounds: int = 8
    epochs: int = 2
    batch: int = 16
    steps: Any = None
    rate: float = 0.1
    sampled: Any = None
    x: Tensor = X
    draw: Any = lambda f, rng: rng.permutation(len(f.parts))[: f.sampled]
    rows: Any = keep
    inputs: Any = keep
    labels: Any = keep
    start: Any = keep
    upload: Any = keep
    optimiser: Any = lambda f, client, parameters: SGD(parameters, f.rate)
    broadcast: Any = lambda f: f.past[-1]
    server: Any = lambda f, v: f.p @ v
    report: Any = lambda f: None
    last: dict = field(default_factory=dict)
    memory: dict = field(default_factory=dict)

    def run(self, out):
        """Train and record it in a folder."""
        torch.manual_seed(self.seed)
        rng = np.random.default_rng(self.seed)
        self.parts, self.model = self.deal(self.seed), self.build()
        self.past = [flat(self.model)]
        test = self.x[N:], Y[N:]
        options = {"test": test, "method": self.method, "seed": self.seed}
        with fldiag.Recorder(out, self.model, (self.x, Y), self.parts, **options) as recorder:
            for _ in range(self.rounds):
                self.w, self.ids = self.broadcast(self), sorted(map(int, self.draw(self, rng)))
                sizes = torch.tensor([len(self.parts[k]) for k in self.ids]).double()
                self.p = sizes / sizes.sum()
                uploads = {k: self.train(k) for k in self.ids}
                self.past.append(self.server(self, torch.stack([*uploads.values()])))
                recorder.round(
                    received=self.state(self.w),
                    clients={k: self.state(w) for k, w in uploads.items()},
                    aggregated=self.state(self.past[-1]),
                    metrics=self.report(self),
                )
        return out

    def train(self, k):
        """What client k returns."""
        rows = torch.as_tensor(self.rows(self, k, self.parts[k])).long()
        x, y = self.inputs(self, k, self.x[rows]), self.labels(self, k, Y[rows])
        model = self.load(self.start(self, k, self.w)).train()
        optimiser = self.optimiser(self, k, model.parameters())
        batches = [b for _ in range(self.epochs) for b in torch.randperm(len(y)).split(self.batch)]
        for batch in batches[: self.steps]:
            if len(batch) > (self.build is normed):  # no batch-norm of one example
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimiser.step()
        self.last[k] = flat(model)
        return self.upload(self, k, self.last[k])

    def load(self, w):
        """The model with the numbers w."""
        tensors = self.model.state_dict().values()
        for tensor, part in zip(tensors, w.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.reshape(tensor.shape))
        return self.model

    def state(self, w):
        return copy.deepcopy(self.load(w).state_dict())

    @torch.no_grad()
    def accuracy(self, rows, w=None):
        """Of the last aggregate, or of w."""
        model = self.load(self.past[-1] if w is None else w).eval()
        return float((model(self.x[rows]).argmax(1) == Y[rows]).double().mean())


def flat(model):
    return torch.cat([v.reshape(-1).double() for v in model.state_dict().values()])


# -- changes


def at(who, change):
    """A change at one client."""
    return lambda f, k, value: change(f, k, value) if k == who else value


def data_of(whose):
    """Client k reads the examples of client ``whose`` (k)."""
    return lambda f, k, rows: f.parts[whose(k) % 10]


def redrawn(f, k, rows):
    """Every round deals anew."""
    return f.deal(1000 * f.seed + len(f.past))[k]


def shuffled(f, k, y):
    return y[torch.randperm(len(y), generator=torch.Generator().manual_seed(k))]


def late(rounds):
    return lambda f, k, w: f.past[-rounds - 1 :][0]


def initial(f, k, w):
    return f.past[0]


def own(part):
    """A part of the model stays the client's own."""
    return lambda f, k, w: torch.cat([w[: part.start], f.last.get(k, w)[part], w[part.stop :]])


def update(change):
    """An upload with another update."""
    return lambda f, k, w: f.w + change(w - f.w)


def plain(f, v):
    return v.mean(0)


def last_statistics(f, v):
    """The last client's statistics of batch-norm."""
    new = f.p @ v
    new[STATISTICS] = v[-1, STATISTICS]
    return new


def krum(f, v):
    return v[torch.cdist(v, v).sort(1).values[:, :7].square().sum(1).argmin()]


def noisy(f, v):
    """Noise of 1 % of the step."""
    d = f.p @ v - f.w
    return f.w + d + 0.01 * d.square().mean().sqrt() * torch.randn_like(d)


def momentum(f, v):
    f.memory[0] = 0.9 * f.memory.get(0, 0) + f.p @ v - f.w
    return f.w + f.memory[0]


def feddyn(f, v):
    """h <- h - a / K sum (w_k - w), w <- mean - h / a."""
    f.memory[0] = f.memory.get(0, 0) - (v - f.w).sum(0) / len(f.parts)
    return v.mean(0) - f.memory[0]


# -- cases: (group, name) -> the words of the cause, and what is changed

CASES = {}


def case(group, name, words="", **changes):
    CASES[group, name] = words, changes


def broken(name, words, **changes):
    case("broken", name, words, **changes)


def planted(name, words, **changes):
    case("planted", name, words, **{"method": "fedavg"} | changes)


ANOTHER, OTHER = "data of another", "other labels"
CLIENT_4 = "(training|updates) of client 4"
broken("neighbours_data", ANOTHER, rows=data_of(lambda k: k + 1))
broken("neighbours_class", ANOTHER, deal=by_class, rows=data_of(lambda k: k + 1))
broken("counted_from_one", ANOTHER, rows=data_of(lambda k: k - 1))
broken("reversed_partition", ANOTHER, rows=data_of(lambda k: 9 - k))
broken("two_swapped", "training of client 2|data", rows=data_of(lambda k: {2: 6, 6: 2}.get(k, k)))
broken("own_label_maps", OTHER, deal=equal, labels=lambda f, k, y: (y * 7 + k) % 10)
broken("labels_plus_one", OTHER, labels=lambda f, k, y: (y + 1) % 10)
broken("shuffled_at_all", OTHER, labels=shuffled)
broken("shuffled_at_one", CLIENT_4, deal=equal, labels=at(4, shuffled))
broken(
    "shuffled_skewed",
    CLIENT_4,
    deal=lambda seed: skewed(seed, alpha=1.0),
    rounds=10,
    labels=at(4, shuffled),
)
broken("flipped_at_one", CLIENT_4, deal=equal, labels=at(4, lambda f, k, y: 9 - y))
for name, rate, change in (
    ("transposed", 0.1, lambda f, k, x: x.mT),
    ("negated", 0.1, lambda f, k, x: -x),
    ("small", 0.1, lambda f, k, x: x / 16),
    ("large", 0.02, lambda f, k, x: 16 * x),
    ("raw", 0.001, lambda f, k, x: 255 * x),
):
    broken(f"{name}_at_one", CLIENT_4, deal=equal, rate=rate, inputs=at(4, change))
broken("redrawn_equal", "partition", deal=equal, rows=redrawn, epochs=4)
broken("redrawn_skewed", "partition", rows=redrawn, epochs=4)
broken("all_on_test", "test examples", rows=lambda f, k, rows: TEST[k::10], epochs=10)
broken(
    "one_on_test",
    "client 3.*test examples",
    deal=equal,
    rows=at(3, lambda f, k, rows: TEST),
    epochs=10,
)
broken(
    "twice_in_list",
    "client 3 holds examples twice",
    deal=lambda seed: [np.tile(p, 1 + (k == 3)) for k, p in enumerate(skewed(seed))],
)
broken("copied_examples", "clients 2 and 9 hold equal", deal=with_tenth(lambda parts: parts[2]))
broken(
    "nan_of_client", "client 5 are not finite", upload=at(5, lambda f, k, w: w / (len(f.past) != 4))
)
broken("nan_of_server", "aggregate.*not finite", server=lambda f, v: f.p @ v / (len(f.past) != 4))
for name, words, server in (
    ("one_less", "left out", lambda f, v: f.p[:-1] @ v[:-1] / f.p[:-1].sum()),
    ("divided_by_all", "do not sum to 1", lambda f, v: 0.9 * f.p @ v),
    ("rate_twice", "multiple", lambda f, v: f.w + 0.25 * (f.p @ v - f.w)),
    ("said_by_examples", "plain mean", plain),
    ("squared_sizes", "other weights", lambda f, v: f.p**2 @ v / (f.p @ f.p)),
):
    broken(name, words, method="fedavg", server=server)
for name, words, report in (
    ("another_split", "reported accuracy", lambda f: {"accuracy": f.accuracy(TEST[:230]) + 0.03}),
    ("too_much", "reported test_acc", lambda f: {"test_acc": min(f.accuracy(TEST) + 0.04, 1)}),
    ("training", "training data", lambda f: {"test_accuracy": f.accuracy(slice(N))}),
):
    broken(f"reports_{name}", words, report=report)

planted("uniform_mean", "plain mean", server=plain, sampled=5)
planted(
    "counted_twice", "weights|left out", server=lambda f, v: f.p @ v[[0, 0, 2, 3, 4]], sampled=5
)
planted("divisor", "do not sum to 1", server=lambda f, v: f.p @ v / 2, sampled=5)
planted(
    "stale_broadcast",
    "another model than the last aggregate",
    method="own",
    broadcast=lambda f: f.past[0],
)
planted(
    "last_buffers",
    "buffers are those of one client",
    method="own",
    build=normed,
    server=last_statistics,
)
planted("momentum_buffers", "buffers are", build=normed, server=momentum, rounds=12)
planted(
    "returns_received",
    "client 2 is exactly zero",
    upload=at(2, lambda f, k, w: f.w),
    sampled=5,
    rounds=12,
)
planted(
    "old_model",
    "client 5 returned weights",
    upload=at(5, lambda f, k, w: f.memory.setdefault(0, w)),
)
planted(
    "summed_loss",
    "client 6 are unusually long",
    upload=at(6, lambda f, k, w: f.w + 20 * (w - f.w)),
)
planted(
    "shared_module",
    "each other",
    upload=lambda f, k, w: f.memory.setdefault(len(f.past), w),
)
planted(
    "never_drawn",
    "client 9 is never drawn",
    draw=lambda f, rng: rng.permutation(9)[:5],
    rounds=25,
)
planted("shuffled_labels", CLIENT_4, labels=at(4, shuffled), sampled=5, rounds=12)
planted("leaked_test", "overlaps", deal=with_tenth(lambda parts: TEST[:40]))
planted("collapsed_head", "chance|other labels", labels=lambda f, k, y: y // 5, rounds=12)
planted("rate_too_high", "chance|finite|diverged", rate=20.0)
planted(
    "best_reported",
    "the best so far",
    report=lambda f: {"accuracy": max(f.accuracy(TEST, w) for w in f.past)},
    rounds=20,
    sampled=3,
    rate=0.5,
)
planted(
    "mean_of_clients",
    "reported accuracy",
    report=lambda f: {"accuracy": np.mean([f.accuracy(f.parts[k], f.last[k]) for k in f.ids])},
)
planted("dead_units", "units", build=dead, rounds=12)
for name in ("seed_unused", "order_unseeded"):
    planted(name, "seed")

for deal in (skewed, equal):
    for name, words, start in (
        ("head_kept_by_all", "own last", own(HEAD)),
        ("head_kept_by_one", "client 3 .*own last", at(3, own(HEAD))),
        ("own_model_at_one", "client 3 .*own last", at(3, own(slice(0, 2410)))),
        ("initial_at_one", "client 3 starts from an old", at(3, initial)),
        ("all_late", "clients start from an old model", late(1)),
        ("one_late", "client 3 starts from an old", at(3, late(2))),
    ):
        case("start", f"{name}_{deal.__name__}", words, deal=deal, start=start, rounds=12)
    for name, changes in {
        "stated": dict(method="fedavg"),
        "sampled": dict(method="fedavg", sampled=4, rounds=12),
        "one_step": dict(steps=1),
        "long": dict(epochs=10, rounds=10),
        "full_batch": dict(batch=N),
        "batch_of_4": dict(batch=4, rate=0.05),
        "large_rate": dict(rate=0.5),
        "larger_rate": dict(rate=1.0),
        "tiny_rate": dict(rate=1e-5),
        "decay": dict(optimiser=lambda f, k, p: SGD(p, 0.3 * 0.7 ** len(f.past)), rounds=12),
        "unequal_rates": dict(optimiser=lambda f, k, p: SGD(p, 0.02 * (1 + k))),
        "local_momentum": dict(optimiser=lambda f, k, p: SGD(p, 0.1, 0.9, weight_decay=1e-3)),
        "local_adam": dict(optimiser=lambda f, k, p: Adam(p, 0.01)),
        "batch_norm": dict(build=normed),
        "batch_norm_sampled": dict(build=normed, sampled=4, rounds=10),
        "convolutional": dict(build=convolutional, rounds=6),
        "churn": dict(draw=lambda f, rng: range(len(f.past) // 2, len(f.past) // 2 + 6)),
        "signs": dict(upload=update(lambda d: 0.005 * d.sign())),
        "server_momentum": dict(method="fedavgm", server=momentum),
        "feddyn": dict(method="feddyn", server=feddyn, sampled=5),
        "personal_heads": dict(method="fedper", start=own(HEAD), rounds=10),
        "asynchronous": dict(method="fedasync", start=at(3, late(2)), rounds=10),
    }.items():
        case("sound", f"{name}_{deal.__name__}", deal=deal, **changes)
for name, deal in {
    "very_skewed": lambda seed: skewed(seed, alpha=0.1, least=4),
    "tiny_skewed": lambda seed: skewed(seed, clients=40, alpha=0.1, least=1),
    "one_class": by_class,
    "one_client": lambda seed: equal(seed, 1),
    "two_clients": lambda seed: skewed(seed, 2),
    "three_clients": lambda seed: equal(seed, 3),
    "3_examples_a_client": lambda seed: equal(seed, 20, 60),
    "20_examples_a_client": lambda seed: equal(seed, 10, 200),
    "empty_client": with_tenth(lambda parts: TEST[:0]),
}.items():
    case("sound", name, deal=deal, rounds=12)
for name, changes in {
    "one_class_sampled": dict(deal=by_class, sampled=4, rounds=16),
    "few_rows": dict(x=X.sign().relu() * (torch.arange(64) % 21 == 10).reshape(8, 8)),
    "converged": dict(epochs=3, rounds=40),
    "last_minibatch_of_2": dict(
        deal=lambda seed: [p[: len(p) // 16 * 16 - 14] for p in skewed(seed, least=32)],
        build=normed,
        sampled=4,
        rounds=10,
    ),
    "half_precision": dict(
        method="fedavg", server=lambda f, v: f.w + f.p @ (v - f.w).half().double()
    ),
    "noise_of_1_percent": dict(method="fedavg", server=noisy),
    "private": dict(upload=update(lambda d: 0.5 * d + 0.01 * torch.randn_like(d))),
    "krum": dict(method="krum", server=krum),
    "krum_unnamed": dict(server=krum),
    "median": dict(method="fedmedian", server=lambda f, v: v.median(0).values),
    "rounded_report": dict(report=lambda f: {"accuracy": round(f.accuracy(TEST), 2)}),
    "percent_report": dict(report=lambda f: {"accuracy": round(100 * f.accuracy(TEST), 1)}),
    "training_report": dict(report=lambda f: {"train_acc": f.accuracy(slice(N))}),
}.items():
    case("sound", name, **changes)


def judge(group, name, seed):
    """A row of the table."""
    words, changes = CASES[group, name]
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(seed, **changes)
        run = fldiag.load(federation.run(Path(folder) / "run"), model=federation.model)
        rows = fldiag.diagnose(run, "doctor", device="cpu")
    rows = rows[rows["severity"].isin(["fault", "hint"])]
    texts = (rows["severity"] + ": " + rows["what"] + " (" + rows["evidence"] + ")").tolist()
    outcome = "found" if any(re.search(words, text) for text in texts) else "missed"
    if group == "sound":
        outcome = min(rows["severity"], default="clean")  # a fault before a hint
    return {
        "seed": seed,
        "group": group,
        "case": name,
        "outcome": outcome,
        "findings": "; ".join(texts),
    }


def main():
    rows = []
    for seed in [int(text) for text in sys.argv[1:]] or SEEDS:
        for group, name in CASES:
            rows.append(judge(group, name, seed))
            print(*rows[-1].values(), flush=True)
    table = pd.DataFrame(rows)
    table.to_csv(Path(__file__).with_suffix(".csv"), index=False)
    print(table.groupby(["group", "outcome", "seed"]).size().unstack(fill_value=0).to_string())


if __name__ == "__main__":
    main()
