"""Local steps are torch's, means are weighted by examples, partitions obey their rules, and executors share their bits."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import ClassVar

import numpy as np
import pytest
import torch
from reference import Watch, clients_of, train, vector
from torch import nn

import fldiag
from fldiag import Method, Part

WATCHED = {"of": "fedavg", "options": "{}"}
OPTIMISERS = {
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "kept momentum": {"momentum": 0.9, "keep_momentum": True},
    "clipped": {"clip": 0.5, "weight_decay": 0.3},
    "adam": {"optimizer": "adam", "weight_decay": 0.1, "lr": 0.03},
    "later epochs slower": {"local_decay": 0.1, "local_decay_after": 0.4},
    "last batches dropped": {"drop_last": True},
}


@pytest.mark.parametrize("stack", ["on", "off"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_local_steps_are_those_of_torch(name, stack, toy, tmp_path):
    Watch.batches.clear()
    settings = {"epochs": 3, "batch_size": 4, "lr_decay": 0.7, "stack": stack} | OPTIMISERS[name]
    run = toy.train("reference:watched", tmp_path / "run", train=settings, **WATCHED)
    train, kept = run.config.train, {}
    for t in range(run.done):
        stored, lr = run.checkpoint(t + 1), train.lr * train.lr_decay**t
        for k, found in clients_of(stored).items():
            net = nn.Linear(4, 3).double()
            nn.utils.vector_to_parameters(stored.received.double().clone(), net.parameters())
            kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[train.optimizer]
            options = {"momentum": train.momentum, "nesterov": train.nesterov}
            options = options if train.optimizer == "sgd" else {}
            optimiser = kind(net.parameters(), lr, weight_decay=train.weight_decay, **options)
            if train.keep_momentum and k in kept:
                optimiser.load_state_dict(kept[k])
                optimiser.param_groups[0]["lr"] = lr
            batches = Watch.batches[t, k]
            for s, b in enumerate(batches):
                later = train.local_decay != 1 and s >= len(batches) // 3  # after 1 of 3 epochs
                optimiser.param_groups[0]["lr"] = lr * (train.local_decay if later else 1)
                optimiser.zero_grad()
                rows = toy.parts[k][b]
                nn.functional.cross_entropy(net(toy.x[rows]), toy.y[rows]).backward()
                nn.utils.clip_grad_norm_(net.parameters(), train.clip or torch.inf)
                optimiser.step()
            kept[k] = optimiser.state_dict()
            w = nn.utils.parameters_to_vector(net.parameters())
            torch.testing.assert_close(found, w, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["n", "uniform", "batches"])
def test_the_mean_of_unequal_clients(kind, toy, tmp_path):
    """In float64: shares that were rounded to float32 would show."""
    settings = {"aggregate": kind, "batch_size": 5}
    run = toy.train("fedavg", tmp_path / "run", train=settings)
    for r in run.rounds:
        stored = run.checkpoint(r)
        ends = clients_of(stored)
        weigh = {"n": lambda n: n, "uniform": lambda n: 1, "batches": lambda n: n // 5}[kind]
        n = {k: weigh(toy.sizes[k]) for k in ends}
        mean = sum(n[k] * ends[k] for k in ends) / sum(n.values())
        torch.testing.assert_close(vector(stored.state), mean, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_training_starts_from_weights_of_a_file(kind, toy, tmp_path):
    rng = np.random.default_rng(1)
    state = {"classifier.weight": rng.normal(size=(3, 4)), "classifier.bias": rng.normal(size=3)}
    state = {name: array.astype(kind) for name, array in state.items()}
    np.savez(tmp_path / "w.npz", **state)
    start = {"initial": str(tmp_path / "w.npz")}
    received = toy.train("fedavg", tmp_path / "run", rounds=1, train=start).checkpoint(1).received
    expected = np.concatenate([array.ravel() for array in state.values()])
    assert np.array_equal(received.double().numpy(), expected.astype("float64"))


def batch_norm(shape, classes):
    return nn.Sequential(nn.BatchNorm1d(*shape), nn.Linear(*shape, classes))


def test_the_buffers_of_unequal_clients(toy, tmp_path):
    """The running mean of the inputs does not depend on the weights; the largest counter stays."""
    run = toy.train(
        "fedavg", tmp_path / "run", rounds=1, model={"name": "test_local_training:batch_norm"}
    )
    ends, state = clients_of(run.checkpoint(1)), run.checkpoint(1).state
    n = {k: toy.sizes[k] for k in ends}
    means = {k: (1 - 0.9**3) * toy.x[toy.parts[k]].mean(0) for k in ends}
    expected = sum(n[k] * means[k] for k in ends) / sum(n.values())
    torch.testing.assert_close(state["0.running_mean"].double(), expected, rtol=1e-6, atol=1e-7)
    assert state["0.num_batches_tracked"] == 3


def test_more_clients_than_one_stack_holds(tmp_path):
    how = {"clients__total": 20, "clients__per_round": 20, "rounds": 1, "train__precision": "fp64"}
    how |= {"train__epochs": 1}
    on, off = (train(tmp_path / s, train__stack=s, **how).checkpoint(1) for s in ("on", "off"))
    assert on.client_ids == off.client_ids == list(range(20))
    torch.testing.assert_close(on.clients, off.clients, rtol=1e-9, atol=1e-11)


def test_clients_of_a_round(toy, tmp_path):
    """``by_round`` draws as FedSOL's code; ``fixed`` as many each time; ``independent`` each with its probability."""
    samples = {}
    for kind in ("by_round", "fixed", "independent"):
        how = {"clients__total": 10, "clients__per_round": 4, "rounds": 12, "train__epochs": 0}
        run = train(tmp_path / kind, clients__sampling=kind, checkpoint__clients="sampled", **how)
        samples[kind] = [run.checkpoint(r).client_ids for r in run.rounds]
    for t, ids in enumerate(samples["by_round"]):
        assert ids == sorted(np.random.RandomState(t).choice(10, 4, replace=False))
    assert {len(ids) for ids in samples["fixed"]} == {4} != {len(i) for i in samples["independent"]}
    for kind in ("fixed", "independent"):
        assert len({tuple(ids) for ids in samples[kind]}) > 8


# -- partitions


class Examples(Part):
    """Notes which examples each client has: the data number them."""

    of: ClassVar[dict[int, list[int]]] = {}

    def batch(self, step):
        for j, k in enumerate(step.local.ids[: step.k]):
            counted = slice(None) if step.weight is None else step.weight[j] > 0
            self.of[k] += step.x[j, counted, 0].long().tolist()


def noted() -> Method:
    return Method(Examples())


N, CLASSES = 600, 6
LABELS = np.random.default_rng(3).permutation(np.arange(N) % CLASSES)


def partition(tmp_path, clients, seed=0, public=None, **section):
    """The numbers of examples of each client and class, and the clients' examples."""
    x = np.arange(N, dtype=np.float32)[:, None]
    arrays = {
        f"{s}_{n}": v for s in ("train", "test") for n, v in (("images", x), ("labels", LABELS))
    }
    np.savez(tmp_path / "numbered.npz", **arrays)
    Examples.of = defaultdict(list)
    config = fldiag.Config.load(
        "digits",
        rounds=1,
        data={"name": f"npz:{tmp_path / 'numbered.npz'}", "public": public},
        partition={"seed": seed, **section},
        clients={"total": clients, "per_round": clients},
        model={"name": "mlp", "hidden": ()},
        method={"name": "test_local_training:noted"},
        train={"epochs": 1, "batch_size": 1000, "lr": 1e-9},
    )
    fldiag.train(config, out=tmp_path / f"run{seed}")
    examples = [Examples.of[k] for k in range(clients)]
    return np.stack([np.bincount(LABELS[e], minlength=CLASSES) for e in examples]), examples


@pytest.mark.parametrize("kind", ["lda", "lda_fedsol"])
def test_lda_gives_no_more_of_a_class_to_clients_that_are_full(kind, tmp_path):
    for seed in range(3):
        counts, examples = partition(tmp_path, 12, seed, kind=kind, alpha=0.3, min_size=4)
        assert sorted(chain(*examples)) == list(range(N))
        assert counts.sum(1).min() >= 4
        before = counts.cumsum(1) - counts  # what a client had when a class was dealt
        assert (counts[before >= N / 12] == 0).all() and (before >= N / 12).sum() > 5


def test_the_other_partitions(tmp_path):
    counts, examples = partition(tmp_path, 7, 0, kind="iid")
    assert sorted(chain(*examples)) == list(range(N)) and np.ptp(counts.sum(1)) <= 1
    assert counts.min() > 2
    counts, examples = partition(tmp_path, 7, 5, "holdout:60", kind="iid")
    assert len(set(chain(*examples))) == N - 60 and set(counts.sum(0)) == {(N - 60) // CLASSES}
    counts, examples = partition(tmp_path, 12, 1, kind="sharding", shards=2)
    assert sorted(chain(*examples)) == list(range(N))
    assert set(counts[counts > 0] % (N // 24)) == {0} and (counts > 0).sum(1).max() == 2
    counts, _ = partition(tmp_path, 10, 2, kind="pathological", classes=3)
    assert set(counts.sum(1)) == {N // 10} and set((counts > 0).sum(1)) == {3}
    narrow, _ = partition(tmp_path, 10, 3, kind="dirichlet", alpha=0.1)
    wide, _ = partition(tmp_path, 10, 4, kind="dirichlet", alpha=100.0)
    assert set(narrow.sum(1)) == set(wide.sum(1)) == {N // 10}
    assert narrow.max(1).mean() > 2 * wide.max(1).mean()


# -- executors


@pytest.mark.parametrize(
    "executor", [pytest.param("processes:2", marks=pytest.mark.slow), "threads"]
)
def test_every_executor_gives_the_same_bits(executor, runs, tmp_path):
    options = {"rounds": 2, "clients__per_round": 3, "method__name": "scaffold"}
    if executor == "threads":
        with ThreadPoolExecutor(2) as executor:
            run = train(tmp_path / "run", executor=executor, **options)
    else:
        run = train(tmp_path / "run", executor=executor, **options)
    for r in run.rounds:
        a, b = run.checkpoint(r), runs["scaffold"].checkpoint(r)
        assert torch.equal(a.clients, b.clients) and torch.equal(a.received, b.received)
        assert all(torch.equal(a.state[n], b.state[n]) for n in b.state)


def test_a_sweep_trains_what_train_does(tmp_path):
    config = fldiag.Config.load("digits", model={"name": "mlp", "hidden": (4,)}, rounds=1)
    config = config.replace(clients__per_round=2, train__epochs=1)
    over = {"method.name": ["fedavg", "feddyn"], "seed": [0, 1]}
    runs = {
        (r.config.method.name, r.config.seed): r
        for r in fldiag.sweep(config, over, out=tmp_path / "sweep")
    }
    assert len(runs) == 4
    for (name, seed), run in runs.items():
        chosen = config.replace(method__name=name, seed=seed)
        alone = fldiag.train(chosen, out=tmp_path / f"{name}{seed}")
        assert torch.equal(vector(run.checkpoint(1).state), vector(alone.checkpoint(1).state))
