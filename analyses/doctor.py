"""How many broken federations does the doctor find, and how many sound ones does it accuse?

    python analyses/doctor.py [SEED ...]

Small loops on the digits, each with one thing changed, are recorded and examined. A broken one is *found* where a fault, or a
hint that names the cause, says so: the text of a finding matches the words of its case, a regular expression. Of a sound one
every fault and hint is written down. ``planted`` cases were chosen by somebody who had not read the checks; the last three of
them cannot be seen in one run. Writes doctor.csv, by which the doctor is tested.
"""

import re
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
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


normed = partial(mlp, nn.BatchNorm1d)


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


@dataclass
class Federation:
    """A plain loop of federated averaging. A model is a vector of all numbers of its state_dict.

    A change is a number or a function. ``rows`` (f, k), ``inputs`` (x), ``labels`` (k, y), ``start`` (f, k) and ``upload``
    (f, w) change what client k reads, from what it starts and what it returns; only that of client ``only``, if given.
    ``server`` (f, v) makes the new model of the clients' [K, n]. In a round there are the received model ``w``, the drawn
    clients ``ids`` and their shares ``p``; ``past``: the models so far; ``last``: what each client trained last.
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
    factor: Any = lambda f, k: 1
    optimiser: Any = SGD
    sampled: Any = None
    x: Any = X
    only: Any = None
    draw: Any = lambda f, rng: rng.permutation(len(f.parts))[: f.sampled]
    rows: Any = lambda f, k: f.parts[k]
    inputs: Any = lambda x: x
    labels: Any = lambda k, y: y
    start: Any = lambda f, k: f.w
    upload: Any = lambda f, w: w
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
        about = {"test": (self.x[N:], Y[N:]), "method": self.method, "seed": self.seed}
        with fldiag.Recorder(out, self.model, (self.x, Y), self.parts, **about) as recorder:
            for _ in range(self.rounds):
                self.round, self.w = len(self.past), self.broadcast(self)
                self.ids = sorted(map(int, self.draw(self, rng)))
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
        change = self if self.only in (None, k) else Federation
        rows = torch.as_tensor(change.rows(self, k)).long()
        x, y = change.inputs(self.x[rows]), change.labels(k, Y[rows])
        model = self.load(change.start(self, k)).train()
        optimiser = self.optimiser(model.parameters(), self.rate * self.factor(self, k))
        batches = [b for _ in range(self.epochs) for b in torch.randperm(len(y)).split(self.batch)]
        for batch in batches[: self.steps]:
            if len(batch) > (self.build is normed):  # no batch-norm of one example
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimiser.step()
        self.last[k] = flat(model)
        return change.upload(self, self.last[k])

    def state(self, w):
        """The state_dict of the numbers w."""
        state, start = {}, 0
        for name, tensor in self.model.state_dict().items():
            part = w[start : start + tensor.numel()]
            state[name], start = part.view_as(tensor).to(tensor), start + len(part)
        return state

    def load(self, w):
        """The model with the numbers w."""
        self.model.load_state_dict(self.state(w))
        return self.model

    def accuracy(self, rows, w=None):
        """Of the last aggregate, or of w."""
        model = self.load(self.past[-1] if w is None else w).eval()
        return (model(self.x[rows]).argmax(1) == Y[rows]).double().mean().item()


def flat(model):
    return parameters_to_vector(model.state_dict().values()).double()


# -- changes


def data_of(whose):
    """Client k reads the examples of client ``whose`` (k)."""
    return lambda f, k: f.parts[whose(k) % 10]


def redrawn(f, k):
    """Every round deals anew."""
    return f.deal(1000 * f.seed + f.round)[k]


def shuffled(k, y):
    return y[torch.randperm(len(y), generator=torch.Generator().manual_seed(k))]


def late(rounds):
    """Clients start from an older model, the initial one at most."""
    return lambda f, k: f.past[-rounds - 1 :][0]


def own(part):
    """A part of the model stays the client's own."""

    def start(f, k):
        new = f.w.clone()
        new[part] = f.last.get(k, new)[part]
        return new

    return start


def update(change):
    """An upload with another update."""
    return lambda f, w: f.w + change(w - f.w)


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


def case(group, suffix, name, words="", **changes):
    CASES[group, name + suffix] = words, changes


broken = partial(case, "broken", "")
planted = partial(case, "planted", "", method="fedavg")

ANOTHER, OTHER = "data of another", "other labels"
CLIENT_4 = "(training|updates) of client 4"
broken("neighbours_data", ANOTHER, rows=data_of(lambda k: k + 1))
broken("neighbours_class", ANOTHER, deal=by_class, rows=data_of(lambda k: k + 1))
broken("counted_from_one", ANOTHER, rows=data_of(lambda k: k - 1))
broken("reversed_partition", ANOTHER, rows=data_of(lambda k: 9 - k))
broken("two_swapped", "training of client 2|data", rows=data_of(lambda k: {2: 6, 6: 2}.get(k, k)))
broken("own_label_maps", OTHER, deal=equal, labels=lambda k, y: (y * 7 + k) % 10)
broken("labels_plus_one", OTHER, labels=lambda k, y: (y + 1) % 10)
broken("shuffled_at_all", OTHER, labels=shuffled)
at_4 = partial(broken, words=CLIENT_4, deal=equal, only=4)
at_4("shuffled_at_one", labels=shuffled)
at_4("shuffled_skewed", deal=partial(skewed, alpha=1.0), rounds=10, labels=shuffled)
at_4("flipped_at_one", labels=lambda k, y: 9 - y)
at_4("transposed_at_one", inputs=lambda x: x.mT)
at_4("negated_at_one", inputs=torch.neg)
at_4("small_at_one", inputs=lambda x: x / 16)
at_4("large_at_one", rate=0.02, inputs=lambda x: 16 * x)
at_4("raw_at_one", rate=0.001, inputs=lambda x: 255 * x)
broken("redrawn_equal", "partition", deal=equal, rows=redrawn, epochs=4)
broken("redrawn_skewed", "partition", rows=redrawn, epochs=4)
on_test = partial(broken, epochs=10)
on_test("all_on_test", "test examples", rows=lambda f, k: TEST[k::10])
on_test("one_on_test", "client 3.*test examples", deal=equal, only=3, rows=lambda f, k: TEST)
broken(
    "twice_in_list",
    "client 3 holds examples twice",
    deal=lambda seed: [np.tile(p, 1 + (k == 3)) for k, p in enumerate(skewed(seed))],
)
broken("copied_examples", "clients 2 and 9 hold equal", deal=with_tenth(lambda parts: parts[2]))
broken("nan_of_client", "client 5 are not finite", only=5, upload=lambda f, w: w / (f.round != 4))
broken("nan_of_server", "aggregate.*not finite", server=lambda f, v: f.p @ v / (f.round != 4))
mean = partial(broken, method="fedavg")
mean("one_less", "left out", server=lambda f, v: f.p[:-1] @ v[:-1] / f.p[:-1].sum())
mean("divided_by_all", "do not sum to 1", server=lambda f, v: 0.9 * f.p @ v)
mean("rate_twice", "multiple", server=lambda f, v: f.w + 0.25 * (f.p @ v - f.w))
mean("said_by_examples", "plain mean", server=plain)
mean("squared_sizes", "other weights", server=lambda f, v: f.p**2 @ v / (f.p @ f.p))
broken(
    "reports_another_split",
    "reported accuracy",
    report=lambda f: {"accuracy": f.accuracy(TEST[:230]) + 0.03},
)
broken(
    "reports_too_much",
    "reported test_acc",
    report=lambda f: {"test_acc": min(f.accuracy(TEST) + 0.04, 1)},
)
broken(
    "reports_training",
    "training data",
    report=lambda f: {"test_accuracy": f.accuracy(slice(N))},
)

five = partial(planted, sampled=5)
five("uniform_mean", "plain mean", server=plain)
five("counted_twice", "weights|left out", server=lambda f, v: f.p @ v[[0, 0, 2, 3, 4]])
five("divisor", "do not sum to 1", server=lambda f, v: f.p @ v / 2)
planted(
    "stale_broadcast",
    "another model than the last aggregate",
    method="own",
    broadcast=lambda f: f.past[0],
)
buffers = partial(planted, build=normed)
buffers("last_buffers", "buffers are those of one client", method="own", server=last_statistics)
buffers("momentum_buffers", "buffers are", server=momentum, rounds=12)
five("returns_received", "client 2 is exactly zero", only=2, upload=lambda f, w: f.w, rounds=12)
planted(
    "old_model",
    "client 5 returned weights",
    only=5,
    upload=lambda f, w: f.memory.setdefault(0, w),
)
planted("summed_loss", "client 6 are unusually long", only=6, upload=update(lambda d: 20 * d))
planted("shared_module", "each other", upload=lambda f, w: f.memory.setdefault(f.round, w))
planted(
    "never_drawn",
    "client 9 is never drawn",
    draw=lambda f, rng: rng.permutation(9)[:5],
    rounds=25,
)
five("shuffled_labels", CLIENT_4, only=4, labels=shuffled, rounds=12)
planted("leaked_test", "overlaps", deal=with_tenth(lambda parts: TEST[:40]))
planted("collapsed_head", "chance|other labels", labels=lambda k, y: y // 5, rounds=12)
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
planted("seed_unused", "seed")
planted("order_unseeded", "seed")

for deal in (skewed, equal):
    start = partial(case, "start", f"_{deal.__name__}", deal=deal, rounds=12)
    start("head_kept_by_all", "own last", start=own(HEAD))
    start("head_kept_by_one", "client 3 .*own last", only=3, start=own(HEAD))
    start("own_model_at_one", "client 3 .*own last", only=3, start=own(slice(2410)))
    start("initial_at_one", "client 3 starts from an old", only=3, start=late(99))
    start("all_late", "clients start from an old model", start=late(1))
    start("one_late", "client 3 starts from an old", only=3, start=late(2))

    sound = partial(case, "sound", f"_{deal.__name__}", deal=deal)
    sound("stated", method="fedavg")
    sound("sampled", method="fedavg", sampled=4, rounds=12)
    sound("one_step", steps=1)
    sound("long", epochs=10, rounds=10)
    sound("full_batch", batch=N)
    sound("batch_of_4", batch=4, rate=0.05)
    sound("large_rate", rate=0.5)
    sound("larger_rate", rate=1.0)
    sound("tiny_rate", rate=1e-5)
    sound("decay", rate=0.3, factor=lambda f, k: 0.7**f.round, rounds=12)
    sound("unequal_rates", rate=0.02, factor=lambda f, k: 1 + k)
    sound("local_momentum", optimiser=partial(SGD, momentum=0.9, weight_decay=1e-3))
    sound("local_adam", optimiser=Adam, rate=0.01)
    sound("batch_norm", build=normed)
    sound("batch_norm_sampled", build=normed, sampled=4, rounds=10)
    sound("convolutional", build=convolutional, rounds=6)
    sound("churn", draw=lambda f, rng: range(f.round // 2, f.round // 2 + 6))
    sound("signs", upload=update(lambda d: 0.005 * d.sign()))
    sound("server_momentum", method="fedavgm", server=momentum)
    sound("feddyn", method="feddyn", server=feddyn, sampled=5)
    sound("personal_heads", method="fedper", start=own(HEAD), rounds=10)
    sound("asynchronous", method="fedasync", only=3, start=late(2), rounds=10)

sound = partial(case, "sound", "")
twelve = partial(sound, rounds=12)
twelve("very_skewed", deal=partial(skewed, alpha=0.1, least=4))
twelve("tiny_skewed", deal=partial(skewed, clients=40, alpha=0.1, least=1))
twelve("one_class", deal=by_class)
twelve("one_client", deal=partial(equal, clients=1))
twelve("two_clients", deal=partial(skewed, clients=2))
twelve("three_clients", deal=partial(equal, clients=3))
twelve("3_examples_a_client", deal=partial(equal, clients=20, examples=60))
twelve("20_examples_a_client", deal=partial(equal, examples=200))
twelve("empty_client", deal=with_tenth(lambda parts: TEST[:0]))
sound("one_class_sampled", deal=by_class, sampled=4, rounds=16)
sound("few_rows", x=X.sign().relu() * (torch.arange(64) % 21 == 10).reshape(8, 8))
sound("converged", epochs=3, rounds=40)
sound(
    "last_minibatch_of_2",
    deal=lambda seed: [p[: len(p) // 16 * 16 - 14] for p in skewed(seed, least=32)],
    build=normed,
    sampled=4,
    rounds=10,
)
sound(
    "half_precision",
    method="fedavg",
    server=lambda f, v: f.w + f.p @ (v - f.w).half().double(),
)
sound("noise_of_1_percent", method="fedavg", server=noisy)
sound("private", upload=update(lambda d: 0.5 * d + 0.01 * torch.randn_like(d)))
sound("krum", method="krum", server=krum)
sound("krum_unnamed", server=krum)
sound("median", method="fedmedian", server=lambda f, v: v.median(0).values)
sound("rounded_report", report=lambda f: {"accuracy": round(f.accuracy(TEST), 2)})
sound("percent_report", report=lambda f: {"accuracy": round(100 * f.accuracy(TEST), 1)})
sound("training_report", report=lambda f: {"train_acc": f.accuracy(slice(N))})


def judge(group, name, seed):
    """The outcome of a case, and what the doctor says."""
    words, changes = CASES[group, name]
    with TemporaryDirectory() as folder:
        federation = Federation(seed, **changes)
        run = fldiag.load(federation.run(folder), model=federation.model)
        rows = fldiag.diagnose(run, "doctor", device="cpu")
    rows = rows.query("severity in ['fault', 'hint']")
    findings = [f"{row.severity}: {row.what} ({row.evidence})" for row in rows.itertuples()]
    if group == "sound":
        outcome = min(rows["severity"], default="clean")  # a fault before a hint
    else:
        outcome = "found" if re.search(words, "\n".join(findings)) else "missed"
    return outcome, "; ".join(findings)


def main():
    rows = []
    for seed, case in product([int(text) for text in sys.argv[1:]] or SEEDS, CASES):
        rows.append([seed, *case, *judge(*case, seed)])
        print(*rows[-1], flush=True)
    table = pd.DataFrame(rows, columns=["seed", "group", "case", "outcome", "findings"])
    table.to_csv(Path(__file__).with_suffix(".csv"), index=False)
    print(table.groupby(["group", "outcome", "seed"]).size().unstack(fill_value=0).to_string())


if __name__ == "__main__":
    main()
