"""How many broken federations does the doctor find, and how many sound ones does it accuse?

    python analyses/doctor.py

Small loops on the digits, each with one thing changed, are recorded and examined. A broken one is *found* where a fault, or a
hint that names the cause, says so: the text of a finding matches the words of its case, a regular expression. Of a sound one
every fault and hint is written down. ``planted`` cases were chosen by somebody who had not read the checks; dead units and the
two of seeds cannot be seen in one run. Writes doctor.csv, by which the doctor is tested.
"""

import re
from functools import cache, partial
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import torch
from pydantic.dataclasses import dataclass
from torch import nn, optim
from torch.nn import functional as F

import fldiag
from fldiag import data
from fldiag.params import Layout

SEEDS = (1, 7)
digits = data.load("digits")
#: All examples. The last are the test examples.
X = digits.normalise(torch.cat([digits.train_x, digits.test_x]))
Y = torch.cat([digits.train_y, digits.test_y])
N = 1500
TEST = np.arange(N, 1797)


def mlp(norm=nn.Identity):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), norm(32), nn.ReLU(), nn.Linear(32, 10))


normed = partial(mlp, nn.BatchNorm1d)


def dead():
    """Most hidden units answer no example."""
    model = mlp()
    nn.init.uniform_(model[1].bias, -8, 0)
    return model


def skewed(f, seed):
    """Dirichlet shares of every class, at least so many examples."""
    rng = np.random.default_rng(seed)
    while True:
        ends = rng.dirichlet([f.alpha] * f.clients, 10).cumsum(1)
        owner = (rng.random((N, 1)) > ends[digits.train_y, :-1]).sum(1)
        parts = [np.flatnonzero(owner == k) for k in range(f.clients)]
        if min(map(len, parts)) >= f.least:
            return parts


def equal(f, seed):
    """A random deal."""
    return np.array_split(np.random.default_rng(seed).permutation(N), f.clients)


def by_class(f, seed):
    """One class a client."""
    return digits.train_y.argsort(stable=True).tensor_split(10)


def by_writer(f, seed):
    """The order of the file, where 13 people wrote one after the other."""
    return np.array_split(range(N), 13)


adam = optim.Adam
momentum_sgd = partial(optim.SGD, momentum=0.9)


def sgd(f, k):
    """A client's optimiser, new in every round."""
    return f.kind(f.model.parameters(), f.rate)


#: With which the client goes on: its momentum is kept.
kept = cache(sgd)


@dataclass(eq=False)
class Federation:
    """A plain loop of federated averaging. A model is a vector of all numbers of its state_dict.

    ``deal`` (f, seed) gives every client its examples, and ``share`` (parts) changes that. ``sampled`` of the clients
    ``present`` (f), a number or a list, take part in a round. They receive the model ``lag`` rounds older than the last. Client k
    starts from the one ``age`` rounds older, but for its own numbers from ``own`` on (2080: the head), and trains on the ``rows``
    (f, k) of client ``whose`` (k), seen as ``inputs`` (x) and ``labels`` (k, y); ``upload`` (f, w) is what it returns. All of
    this is of client ``only``, if given. The ``optimiser`` (f, k) is of a ``kind`` of torch's. ``weigh`` (p) changes the clients'
    shares, ``server`` (f, v) makes the new model of the clients' [K, n], and its ``reported`` number is ``report`` (f). In a
    ``round`` there are the received model ``w``, the drawn clients ``ids`` and their shares ``p``; ``past``: the models so far;
    ``last``: what each client trained last; ``memory``: the server's.
    """

    seed: int
    method: str = "own"
    clients: int = 10
    alpha: float = 0.3
    least: int = 8
    sampled: int = 99
    rounds: int = 8
    epochs: int = 2
    batch: int = 16
    rate: float = 0.1
    only: int = -1
    lag: int = 0
    age: int = 0
    own: int = 9999
    deal: object = skewed
    build: object = mlp
    kind: object = optim.SGD
    optimiser: object = sgd
    present: object = lambda f: len(f.parts)
    share: object = lambda parts: parts
    whose: object = lambda k: k
    rows: object = lambda f, k: f.parts[k]
    inputs: object = lambda x: x
    labels: object = lambda k, y: y
    upload: object = lambda f, w: w
    weigh: object = lambda p: p
    server: object = lambda f, v: f.p @ v
    reported: str = "accuracy"
    report: object = None

    def run(self, out):
        """Train and record it in a folder; the run."""
        torch.manual_seed(self.seed)
        rng = np.random.default_rng(self.seed)
        self.parts, self.model = self.share(self.deal(self, self.seed)), self.build()
        state, self.last, self.memory = self.model.state_dict(), {}, 0
        self.layout = Layout([*state], [v.shape for v in state.values()], "")
        self.past = [self.layout.row(state).double()]
        views = self.layout.views
        with fldiag.Recorder(
            out, self.model, (X, Y, X[N:], digits.test_y), self.parts, method=self.method
        ) as recorder:
            for t in range(self.rounds):
                self.round, self.w = t, self.past[-1 - self.lag :][0]
                self.ids = sorted(rng.permutation(self.present(self))[: self.sampled])
                sizes = torch.tensor([len(self.parts[k]) for k in self.ids]).double()
                self.p = self.weigh(sizes / sizes.sum())
                uploads = torch.stack([self.train(k) for k in self.ids])
                self.past.append(self.server(self, uploads))
                recorder.round(
                    received=views(self.w),
                    clients=dict(zip(self.ids, map(views, uploads), strict=True)),
                    aggregated=views(self.past[-1]),
                    metrics=self.report and {self.reported: self.report(self)},
                )
        return fldiag.load(out, model=self.build())

    def train(self, k):
        """What client k returns."""
        change = self if self.only in (-1, k) else Federation
        rows = change.rows(self, change.whose(k))
        x, y = change.inputs(X[rows]), change.labels(k, Y[rows])
        w = self.past[-1 - change.age :][0].clone()
        w[change.own :] = self.last.get(k, w)[change.own :]
        optimiser, model = self.optimiser(self, k), self.load(w).train()
        for _ in range(self.epochs):
            for batch in torch.randperm(len(y)).split(self.batch):
                if len(batch) > (self.build is normed):  # no batch-norm of one example
                    optimiser.zero_grad()
                    F.cross_entropy(model(x[batch]), y[batch]).backward()
                    optimiser.step()
        self.last[k] = self.layout.row(model.state_dict()).double()
        return change.upload(self, self.last[k])

    def load(self, w):
        """The model with the numbers w."""
        self.model.load_state_dict(self.layout.views(w))
        return self.model

    def accuracy(self, rows=TEST, w=None):
        """Of the last aggregate, or of w."""
        outputs = self.load(self.past[-1] if w is None else w).eval()(X[rows])
        return (outputs.argmax(1) == Y[rows]).double().mean()


# -- changes


def redrawn(f, k):
    """Every round deals anew."""
    return f.deal(f, 100 + f.round)[k]


def shuffled(k, y):
    return y[np.random.default_rng(k).permutation(len(y))]


def churn(f):
    """Clients leave and others come."""
    return range(f.round // 2, f.round // 2 + 6)


def scaffold_sgd(f, k):
    """Adds c - c_k to every gradient: those of all and of the client at the model before (option I)."""
    f.model = f.build()
    losses = F.cross_entropy(f.load(f.past[-2:][0])(X[:N]), digits.train_y, reduction="none")
    (losses.mean() - losses[f.parts[k]].mean()).backward()
    for w in f.model.parameters():
        w.register_hook(partial(torch.add, w.grad))
    return sgd(f, k)


def plain(f, v):
    return v.mean(0)


def krum_server(f, v):
    return v[torch.cdist(v, v).sort(1).values[:, :7].norm(dim=1).argmin()]


def half(f, v):
    return f.w + (f.p @ v - f.w).half()


def noisy(f, v):
    """Noise of 1 % of the step."""
    return f.w.lerp(f.p @ v, 1 + 0.01 * torch.randn_like(f.w))


def last_statistics(f, v):
    """The last client's statistics of batch-norm, which lie here among the numbers of ``normed``."""
    new = f.p @ v
    new[2144:2209] = v[-1, 2144:2209]
    return new


def momentum(f, v):
    f.memory = 0.9 * f.memory + f.p @ v - f.w
    return f.w + f.memory


def feddyn_server(f, v):
    """h <- h - a / K sum (w_k - w), w <- mean - h / a."""
    f.memory -= (v - f.w).sum(0) / len(f.parts)
    return v.mean(0) - f.memory


# -- cases: (group, name) -> the words of the cause, and what is changed

CASES = {}


def case(group, *texts, suffix="", **changes):
    """``texts``: name, settings, and the words. A setting that names a thing of this file is that thing."""
    for text in texts:
        line, _, words = text.partition(": ")
        settings = {
            key: globals().get(value, value) for key, value in re.findall(r"(\w+)=(\S+)", line)
        }
        CASES[group, line.split()[0] + suffix] = words, changes | settings


broken = partial(case, "broken")
broken(
    "neighbours_data: data of another",
    "neighbours_class deal=by_class: data of another",
    whose=lambda k: k - 9,
)
broken("counted_from_one: data of another", whose=lambda k: k - 1)
broken("reversed_partition: data of another", whose=lambda k: 9 - k)
broken("two_swapped: training of client 2|data", whose=lambda k: {2: 6, 6: 2}.get(k, k))
broken("own_label_maps deal=equal: other labels", labels=lambda k, y: (y * 7 + k) % 10)
broken("labels_plus_one: other labels", labels=lambda k, y: (y + 1) % 10)
broken(
    "shuffled_at_all labels=shuffled: other labels",
    "shuffled_at_one labels=shuffled deal=equal only=4: (?:training|updates) of client 4",
    "shuffled_skewed labels=shuffled alpha=1 only=4 rounds=10: (?:training|updates) of client 4",
    "redrawn_equal rows=redrawn deal=equal epochs=4: partition",
    "redrawn_skewed rows=redrawn epochs=4: partition",
    "said_by_examples method=fedavg server=plain: plain mean",
)
broken(
    "flipped_at_one deal=equal only=4: (?:training|updates) of client 4", labels=lambda k, y: 9 - y
)
broken(
    "transposed_at_one deal=equal only=4: (?:training|updates) of client 4", inputs=lambda x: x.mT
)
broken("negated_at_one deal=equal only=4: (?:training|updates) of client 4", inputs=lambda x: -x)
broken("small_at_one deal=equal only=4: (?:training|updates) of client 4", inputs=lambda x: x / 16)
broken(
    "large_at_one deal=equal only=4 rate=0.02: (?:training|updates) of client 4",
    inputs=lambda x: 16 * x,
)
broken(
    "raw_at_one deal=equal only=4 rate=0.001: (?:training|updates) of client 4",
    inputs=lambda x: 255 * x,
)
broken("all_on_test epochs=10: test examples", rows=lambda f, k: TEST[k::10])
broken("one_on_test deal=equal only=3 epochs=10: client 3.*test examples", rows=lambda f, k: TEST)
broken(
    "twice_in_list: client 9 holds examples twice",
    share=lambda parts: [*parts[:9], np.tile(parts[9], 2)],
)
broken(
    "copied_examples clients=9: clients 2 and 9 hold equal",
    share=lambda parts: [*parts, parts[2]],
)
broken("nan_of_client only=5: client 5 are not finite", upload=lambda f, w: w / (f.round != 3))
broken("nan_of_server: aggregate.*not finite", server=lambda f, v: f.p @ v / (f.round != 3))
broken(
    "one_less method=fedavg: left out",
    weigh=lambda p: F.normalize(p * (torch.arange(10) < 9), 1, 0),
)
broken("divided_by_all method=fedavg: do not sum to 1", weigh=lambda p: 0.9 * p)
broken("rate_twice method=fedavg: multiple", server=lambda f, v: f.w.lerp(f.p @ v, 0.25))
broken("squared_sizes method=fedavg: other weights", weigh=lambda p: p**2 / (p @ p))
broken("reports_another_split: reported accuracy", report=lambda f: f.accuracy(TEST[:230]) + 0.03)
broken(
    "reports_too_much reported=test_acc: reported test_acc",
    report=lambda f: f.accuracy() + 0.04,
)
broken(
    "reports_training reported=test_accuracy: training data",
    report=lambda f: f.accuracy(slice(N)),
)

planted = partial(case, "planted", method="fedavg")
planted(
    "uniform_mean server=plain sampled=5: plain mean",
    "stale_broadcast method=own lag=99 age=99: another model than the last aggregate",
    "last_buffers build=normed method=own server=last_statistics: buffers are those of one client",
    "momentum_buffers build=normed server=momentum rounds=12: buffers are",
    "shuffled_labels labels=shuffled sampled=5 only=4 rounds=12: (?:training|updates) of client 4",
    "rate_too_high rate=20: chance|finite|diverged",
    "dead_units build=dead rounds=12: units",
    "seed_unused: seed",
    "order_unseeded: seed",
)
planted("counted_twice sampled=5: weights|left out", server=lambda f, v: f.p @ v[[0, 0, 2, 3, 4]])
planted("never_drawn sampled=5 rounds=25: client 9 is never drawn", present=lambda f: 9)
planted("divisor sampled=5: do not sum to 1", weigh=lambda p: p / 2)
planted(
    "returns_received sampled=5 only=2 rounds=12: client 2 is exactly zero",
    upload=lambda f, w: f.w,
)
planted("old_model only=5: client 5 returned weights", upload=lambda f, w: f.past[0])
planted("summed_loss only=6: client 6 are unusually long", upload=lambda f, w: f.w.lerp(w, 20))
planted("shared_module: each other", upload=lambda f, w: f.last[f.ids[0]])
planted("leaked_test clients=9: overlaps", share=lambda parts: [*parts, TEST[:40]])
planted("collapsed_head rounds=12: chance|other labels", labels=lambda k, y: y // 5)
planted(
    "best_reported rounds=20 sampled=3 rate=0.5: the best so far",
    report=lambda f: max(f.accuracy(w=w) for w in f.past),
)
planted(
    "mean_of_clients: reported accuracy",
    report=lambda f: np.mean([f.accuracy(f.parts[k], f.last[k]) for k in f.ids]),
)

for deal in (skewed, equal):
    both = partial(case, suffix=f"_{deal.__name__}", deal=deal)
    both(
        "start",
        "head_kept_by_all own=2080 rounds=12: own last",
        "head_kept_by_one own=2080 only=3 rounds=12: client 3 .*own last",
        "own_model_at_one own=0 only=3 rounds=12: client 3 .*own last",
        "initial_at_one only=3 age=99 rounds=12: client 3 starts from an old",
        "all_late age=1 rounds=12: clients start from an old model",
        "one_late only=3 age=2 rounds=12: client 3 starts from an old",
    )
    both(
        "sound",
        "stated method=fedavg",
        "sampled method=fedavg sampled=4 rounds=12",
        "one_step epochs=1 batch=9999",
        "long epochs=10 rounds=10",
        "full_batch batch=9999",
        "batch_of_4 batch=4 rate=0.05",
        "large_rate rate=0.5",
        "larger_rate rate=1",
        "tiny_rate rate=1e-5",
        "one_epoch epochs=1",
        "sampled_rarely method=fedavg sampled=2 rounds=20",
        "batch_norm build=normed",
        "batch_norm_stated method=fedavg build=normed",
        "batch_norm_few_steps build=normed epochs=1 batch=64",
        "batch_norm_sampled build=normed sampled=4 rounds=10",
        "server_momentum method=fedavgm server=momentum",
        "feddyn method=feddyn server=feddyn_server sampled=5",
        "personal_heads method=fedper own=2080 rounds=10",
        "asynchronous method=fedasync only=3 age=2 rounds=10",
        "scaffold method=scaffold optimiser=scaffold_sgd",
        "local_adam kind=adam rate=0.01",
        "local_momentum kind=momentum_sgd",
        "momentum_kept kind=momentum_sgd optimiser=kept rate=0.02",
        "two_clients rounds=12 clients=2",
        "churn present=churn rounds=10",
    )


sound = partial(case, "sound")
sound(
    "very_skewed rounds=12 alpha=0.1 least=4",
    "tiny_skewed rounds=12 alpha=0.1 least=1 clients=40",
    "one_class deal=by_class rounds=12",
    "one_client deal=equal rounds=12 clients=1",
    "four_clients_nearly_parallel deal=equal rounds=12 clients=4 batch=9999",
    "20_examples_a_client deal=equal rounds=12 clients=75 sampled=10",
    "converged epochs=3 rounds=40",
    "krum method=krum server=krum_server",
    "krum_unnamed server=krum_server",
    "noise_of_1_percent method=fedavg server=noisy",
    "half_precision method=fedavg server=half",
    "natural deal=by_writer rounds=12",
)
sound(
    "last_minibatch_of_2 build=normed sampled=4 rounds=10 least=32",
    share=lambda parts: [p[: len(p) // 16 * 16 - 14] for p in parts],
)


def judge(group, name, seed):
    """The outcome of a case, and what the doctor says."""
    words, changes = CASES[group, name]
    with TemporaryDirectory() as folder:
        run = Federation(seed, **changes).run(folder)
        rows = fldiag.diagnose(run, "doctor", device="cpu").query("severity in ['fault', 'hint']")
    findings = rows.severity + ": " + rows.what + " (" + rows.evidence + ")"
    outcome = "found" if findings.str.contains(words).any() else "missed"
    if group == "sound":
        outcome = min(rows.severity, default="clean")  # a fault before a hint
    return outcome, "; ".join(findings)


if __name__ == "__main__":
    rows = [[seed, *case, *judge(*case, seed)] for seed in SEEDS for case in CASES]
    pd.DataFrame(rows, columns=["seed", "group", "case", "outcome", "findings"]).to_csv(
        __file__.replace(".py", ".csv"), index=False
    )
