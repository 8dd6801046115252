"""Local steps are torch's, means are weighted by examples, clients are drawn and dealt by their rules, executors share their bits."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers import seeded
from reference import Watch, clients_of, train, vector
from torch import nn

from fldiag.data import partition

WATCHED = {"of": "fedavg", "options": "{}"}
OPTIMISERS = {
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "kept momentum": {"momentum": 0.9, "keep_momentum": True},
    "clipped": {"clip": 0.5, "weight_decay": 0.3},
    "adam": {"optimizer": "adam", "weight_decay": 0.1, "lr": 0.03},
    "later epochs slower": {"local_decay": 0.1, "local_decay_after": 0.4},
    "last epoch slower": {"local_decay": 0.1, "local_decay_after": 0.8, "drop_last": True},
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
                later = s >= len(batches) * int(3 * train.local_decay_after) // 3
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
    """In float64: shares that were rounded to float32 would show. Of a client of 5 examples no minibatch is full."""
    settings = {"aggregate": kind, "batch_size": 6}
    run = toy.train("fedavg", tmp_path / "run", train=settings)
    for r in run.rounds:
        stored = run.checkpoint(r)
        ends = clients_of(stored)
        weigh = {"n": lambda n: n, "uniform": lambda n: 1, "batches": lambda n: n // 6}[kind]
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


def test_clients_of_a_round():
    """``by_round`` draws as FedSOL's code; ``fixed`` as many each time; ``independent`` each with its probability."""
    kinds = "by_round", "fixed", "independent"
    draws = [[seeded(3, 50, 5, 1, 8, k).sampled(t) for t in range(2000)] for k in kinds]
    for t, ids in enumerate(draws[0][:300]):
        assert ids == sorted(np.random.RandomState(t).choice(50, 5, replace=False))
    assert {len(set(ids)) for ids in draws[1]} == {5}
    sizes = np.array([len(ids) for ids in draws[2]])
    # Binomial(50, 0.1) without its 0: mean 5 / (1 - 0.9^50) = 5.026, deviation 2.1 -> standard error 0.05
    assert (sizes.mean(), sizes.std()) == pytest.approx((5.026, 2.1), abs=0.2)
    for ids in draws:
        shares = np.bincount(np.concatenate(ids), minlength=50) / 2000
        assert 0.07 < shares.min() <= shares.max() < 0.13


@pytest.mark.parametrize("kind", ["lda", "lda_fedsol"])
def test_lda_gives_no_more_of_a_class_to_clients_that_are_full(kind):
    labels = np.random.default_rng(3).permutation(np.arange(600) % 6)
    for seed in range(3):
        parts = partition.make(kind, labels, 12, seed, alpha=0.3, min_size=4)
        counts = np.stack([np.bincount(labels[part], minlength=6) for part in parts])
        before = counts.cumsum(1) - counts  # what a client had when a class was dealt
        assert (counts[before >= 50] == 0).all() and (before >= 50).sum() > 5


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
