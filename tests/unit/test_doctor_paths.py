"""Where clients start and which way they go: what the doctor says of loops with one thing changed, and of sound ones."""

import copy

import numpy as np
import pytest
import torch
from federations import mean, record, trained

from fldiag.data import Dataset, load
from fldiag.diagnostics.doctor.adapters import Factors, pairs
from fldiag.diagnostics.doctor.directions import UpdateDirections, Uploads
from fldiag.diagnostics.doctor.examine import examine
from fldiag.diagnostics.doctor.starts import Starts, chain

ALL = {"sampled": lambda t, rng: list(range(8)), "rounds": 10}
#: ``Elsewhere`` trains itself.
UNTRAINED = {**ALL, "steps": 0}


def digits():
    """Ten classes; of every client each class, and two of them in the main."""
    data = load("digits")
    x, y = data.normalise(data.train_x), data.train_y.long()
    rng = np.random.default_rng(0)
    labels = y.numpy()
    shares = [rng.permutation(np.flatnonzero(labels == c)) for c in range(10)]
    parts = [
        np.concatenate(
            [s[k * 8 : k * 8 + (8 if c in (k, k + 2) else 4)] for c, s in enumerate(shares)]
        )
        for k in range(8)
    ]
    test = data.normalise(data.test_x), data.test_y.long()
    return Dataset("digits", x.float(), y, test[0].float(), test[1], 10), parts


def wide(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 24), torch.nn.ReLU(), torch.nn.Linear(24, 10)
    )


WORLD = digits()


class Elsewhere:
    """A client's training that may start elsewhere: ``start`` (t, k, self) -> state, in place of the received one."""

    def __init__(self, start):
        self.start, self.received, self.own, self.before = start, [], {}, None

    def __call__(self, t, k, received, state):
        if len(self.received) < t:
            self.received.append(copy.deepcopy(received))
            self.before = None
        net = wide()
        net.load_state_dict(self.start(t, k, self))
        data, parts = WORLD
        # minibatches differ from round to round, as in a real loop
        rows = np.random.default_rng(100 * t + k).choice(parts[k], 32, replace=False)
        new = trained(net, data.train_x[rows], data.train_y[rows], 0.1).state_dict()
        self.own[k] = self.before = new
        return new


def received(t, k, loop):
    return loop.received[-1]


def not_loaded(prefix):
    return lambda t, k, loop: {
        n: loop.own[k][n] if k in loop.own and n.startswith(prefix) else v
        for n, v in loop.received[-1].items()
    }


def at_one(start):
    return lambda t, k, loop: (start if k == 3 else received)(t, k, loop)


STARTS = [
    (not_loaded("3."), "clients do not load layer 3"),
    (not_loaded(""), "clients do not load the model"),
    (at_one(not_loaded("")), "client 3 does not load the model"),
    (at_one(lambda t, k, loop: loop.received[0]), "client 3 starts from the initial model"),
    (lambda t, k, loop: loop.received[max(t - 2, 0)], "one round old"),
    (
        lambda t, k, loop: loop.received[3 if t == 8 else -1],
        "clients of round 8 start from an older",
    ),
    (lambda t, k, loop: loop.before or loop.received[-1], "one after the other"),
    (lambda t, k, loop: loop.received[0], "the initial model in every round"),
]


def said(run, *checks, **options):
    run.model = wide()
    for key, value in options.items():
        setattr(run, key, value)
    table = examine([run], {"device": "cpu"}, checks)
    return table[table["severity"].isin(["fault", "warning", "information"])]


@pytest.mark.parametrize(("start", "what"), STARTS, ids=[what for _, what in STARTS])
def test_clients_that_start_elsewhere(tmp_path, start, what):
    run = record(tmp_path / "run", world=WORLD, net=wide(), client=Elsewhere(start), **UNTRAINED)
    rows = said(run, Starts)
    assert rows["what"].str.contains(what).any(), rows[["what", "evidence"]].to_dict("records")
    # training from the initial model looks as training that converges in every round
    assert set(rows["severity"]) == {"information" if "every round" in what else "warning"}


def test_a_loop_that_starts_where_it_says_is_not_accused(tmp_path):
    run = record(tmp_path / "run", world=WORLD, net=wide(), client=Elsewhere(received), **UNTRAINED)
    assert said(run, Starts, UpdateDirections, Uploads).empty


def test_layers_that_a_method_does_not_send_are_information(tmp_path):
    run = record(
        tmp_path / "run",
        world=WORLD,
        net=wide(),
        client=Elsewhere(not_loaded("3.")),
        method="fedper",
        **UNTRAINED,
    )
    assert set(said(run, Starts)["severity"]) == {"information"}


def test_updates_that_continue_each_other_have_no_negative_cosine():
    rng = np.random.default_rng(0)
    steps = rng.normal(size=(12, 400)) + 0.3
    assert chain(steps.cumsum(0))[0] > -0.3
    assert chain(steps * (1 + 0.01 * np.arange(12))[:, None])[0] < -0.42


# -- directions


def sent(change, who=(3,)):
    """``change`` of the update that these clients send."""

    def client(t, k, received, state):
        if k not in who:
            return state
        g = torch.Generator().manual_seed(100 * t + k)
        return {n: received[n] + change(v - received[n], g) for n, v in state.items()}

    return client


def noise(d, g):
    return 0.02 * torch.randn(d.shape, generator=g)


@pytest.mark.parametrize(
    ("change", "what"),
    [(lambda d, g: -d, "client 3 have the wrong sign"), (noise, "client 3 are random")],
)
def test_one_client_goes_another_way(tmp_path, change, what):
    run = record(tmp_path / "run", world=WORLD, net=wide(), client=sent(change), **ALL)
    rows = said(run, UpdateDirections)
    assert rows["what"].str.contains(what).any(), rows.to_dict("records")
    assert set(rows["client"]) == {3} and set(rows["severity"]) == {"warning"}


CODES = {
    r"half precision \(fp16\)": lambda d, g: d.half().float(),
    r"grid": lambda d, g: (d / d.abs().max() * 100).round() * d.abs().max() / 100,
    r"sparse": lambda d, g: d * (d.abs() >= d.abs().flatten().quantile(0.8)),
}


@pytest.mark.parametrize("what", CODES)
def test_codes_of_uploads_are_named_and_accuse_nobody(tmp_path, what):
    run = record(
        tmp_path / "run", world=WORLD, net=wide(), client=sent(CODES[what], range(8)), **ALL
    )
    rows = said(run, Uploads)
    assert rows["what"].str.contains(what).any(), rows.to_dict("records")
    assert set(rows["severity"]) == {"information"}


# -- adapters


def test_transposed_factors_are_pairs():
    assert pairs({"a.lora_A": (8, 2), "a.lora_B": (2, 5), "b.lora_A": (8, 2)}) == [
        ("a.lora_A", "a.lora_B")
    ]


class Adapted(torch.nn.Module):
    def __init__(self, transposed):
        super().__init__()
        torch.manual_seed(0)
        a, b = torch.randn(2, 64), torch.zeros(10, 2)
        self.transposed = transposed
        self.lora_A = torch.nn.Parameter(a.T.clone() if transposed else a)
        self.lora_B = torch.nn.Parameter(b.T.clone() if transposed else b)

    def forward(self, x):
        x = x.flatten(1)
        return (
            x @ self.lora_A @ self.lora_B if self.transposed else x @ self.lora_A.T @ self.lora_B.T
        )


def refactored(transposed):
    """The mean of the products (of rank 4 at most, so of rank 2 as well as that can be done) in two factors."""

    def server(t, w, states, sizes):
        p = np.array(sizes) / sum(sizes)
        ab = [
            (s["lora_A"].T, s["lora_B"].T) if transposed else (s["lora_A"], s["lora_B"])
            for s in states
        ]
        u, s, v = torch.linalg.svd(sum(float(q) * b @ a for q, (a, b) in zip(p, ab, strict=True)))
        a, b = v[:2], u[:, :2] * s[:2]
        return {
            "lora_A": a.T.contiguous() if transposed else a,
            "lora_B": b.T.contiguous() if transposed else b,
        }

    return server


@pytest.mark.parametrize("transposed", [False, True])
def test_any_aggregate_of_adapters_is_compared_with_the_mean_of_products(tmp_path, transposed):
    net = Adapted(transposed)
    options = {"world": WORLD, "net": net, "method": "fedavg", "rounds": 4}
    mixed = said(record(tmp_path / "mean", **options), Factors, model=net)
    assert mixed["severity"].tolist() == ["information"]  # one by one is what plain averaging does
    double = said(
        record(
            tmp_path / "double",
            server=lambda t, w, s, n: {k: 2 * v for k, v in mean(s, n).items()},
            **options,
        ),
        Factors,
        model=net,
    )
    assert double["severity"].tolist() == ["warning"]
    best = said(
        record(tmp_path / "svd", server=refactored(transposed), **options), Factors, model=net
    )
    worst = mixed["value"].iloc[0]
    assert best.empty or best["value"].iloc[0] < worst + 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_small_cohorts_of_clients_of_one_class_are_not_accused(tmp_path, count):
    """One cohort undoes what the last one did, which looks as a start from the model before."""
    data, _ = WORLD
    labels = data.train_y.numpy()
    parts = [part for c in range(4) for part in np.array_split(np.flatnonzero(labels == c)[:90], 3)]

    def client(t, k, received, state):
        net = wide()
        net.load_state_dict(received)
        return trained(net, data.train_x[parts[k]], data.train_y[parts[k]], 0.1).state_dict()

    run = record(
        tmp_path / "run",
        world=(data, parts),
        net=wide(),
        client=client,
        sampled=lambda t, rng: sorted(rng.choice(12, count, replace=False).tolist()),
        rounds=12,
    )
    rows = said(run, Starts, UpdateDirections)
    assert set(rows["severity"]) <= {"information"}, rows[["what", "evidence"]].to_dict("records")
