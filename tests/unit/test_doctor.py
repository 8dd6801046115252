"""Every check of the doctor: a fault that is planted is found where it is, and the clean twin is not accused of it."""

import copy
import math

import federations
import numpy as np
import pandas as pd
import pytest
import torch
from federations import blobs, mean, network, record
from scipy.stats import binom
from torch import nn

import fldiag
from fldiag import FldiagError, registry
from fldiag.checkpoint.run import Run
from fldiag.diagnostics.doctor import fails
from fldiag.diagnostics.doctor.checks import CHECKS
from fldiag.diagnostics.doctor.findings import Finding, Skip, holm

BAD = ("fault", "warning")


def examined(*runs):
    return fldiag.diagnose(list(runs), "doctor", data=blobs()[0], model=network(), device="cpu")


def found(table, check=None, severities=BAD):
    rows = table[table["severity"].isin(severities)]
    return rows if check is None else rows[rows["metric"] == check]


# -- faults of a loop: (check, options of record, what the finding says, columns)


def ended(t, received, states, sizes):
    """Buffers of the model as it was received, weights averaged."""
    made = mean(states, sizes)
    return {n: received[n] if "running" in n else v for n, v in made.items()}


def weights(factor):
    """A server that averages updates and scales them: factor (K, sizes) -> number."""
    def server(t, received, states, sizes):
        made, s = mean(states, sizes), factor(len(states), sizes)
        return {n: received[n] + s * (v - received[n]) if v.is_floating_point() else v for n, v in made.items()}
    return server


def one_layer(t, received, states, sizes):
    return {**mean(states, sizes), **{n: states[-1][n] for n in states[0] if n.startswith("3.")}}


def total(t, received, states, sizes):
    """Shares of all clients' examples, so that they sum to less than 1."""
    n = sum(federations.SIZES)
    return {k: sum(m / n * s[k] for m, s in zip(sizes, states, strict=True)) if v.is_floating_point() else v
            for k, v in states[0].items()}


def noisy(t, received, states, sizes):
    g, made = torch.Generator().manual_seed(t), mean(states, sizes)
    return {n: v + 0.1 * torch.randn(v.shape, generator=g) if v.is_floating_point() and "running" not in n else v
            for n, v in made.items()}


def broken(change, only=None):
    """A client (2) whose reply is changed: change (received, state) -> state."""
    def client(t, k, received, state):
        return change(received, state) if k == 2 and (only is None or t == only) else state
    return client


def moved(s):
    """The update times s."""
    return lambda received, state: {n: received[n] + s * (v - received[n]) if v.is_floating_point() and "running" not in n else v
                                    for n, v in state.items()}


def flipped(received, state):
    """What a client returns that trains on wrong labels."""
    net, (data, parts) = network(), blobs()
    net.load_state_dict(received)
    return federations.trained(net, data.train_x[parts[2]], (data.train_y[parts[2]] + 1) % 4).state_dict()


def variance(received, state):
    return {n: torch.zeros_like(v) if n.endswith("running_var") else v for n, v in state.items()}


def nan(received, state):
    return {n: v * math.nan if n == "0.weight" else v for n, v in state.items()}


def copied():
    last = {}

    def client(t, k, received, state):
        if k == 2 and last.get("t") == t:
            return last["state"]
        last.update(t=t, state=state)
        return state
    return client


def replayed():
    first = {}
    return lambda t, k, received, state: first.setdefault(k, state) if k == 2 else state


def dead(received, state):
    return {n: torch.full_like(v, -100.0) if n == "1.bias" else torch.zeros_like(v) if n == "1.weight" else v
            for n, v in state.items()}


def dying(t, received, states, sizes):
    return mean([dead(received, s) for s in states], sizes)


def accuracy(state, x, y):
    net = network()
    net.load_state_dict(state)
    return float((net.eval()(x).argmax(1) == y).float().mean())


def best_so_far():
    seen = []

    def metrics(t, state, data):
        seen.append(accuracy(state, data.test_x, data.test_y))
        return {"accuracy": max(seen)}
    return metrics


def on_training_data(t, state, data):
    return {"test_acc": accuracy(state, data.train_x, data.train_y)}


def plain_mean(t, state, data):
    each = {k: 0.5 + 0.05 * k for k in range(8)}
    return {"accuracy": each, "mean_accuracy": float(np.mean(list(each.values())))}


def mean_f1(t, state, data):
    each, n = {k: 0.5 + 0.05 * k for k in range(8)}, np.array(federations.SIZES)
    return {"f1": each, "global_f1": float(np.array(list(each.values())) @ n / n.sum())}


def worse_and_worse(t, received, states, sizes):
    """Training helps at first and harms later, so that the best round is not the last."""
    return weights(lambda k, n: 1.0 if t < 3 else -0.5)(t, received, states, sizes)


def same_examples():
    data, parts = blobs()
    return data, [*parts[:5], parts[4], *parts[6:]]


def leaked():
    data, parts = blobs()
    return fldiag.data.Dataset("leaked", data.train_x, data.train_y, data.train_x[:60], data.train_y[:60], 4), parts


PLANTED = [
    ("aggregate", {"server": lambda t, w, s, n: mean(s, [1] * len(s))}, "plain mean", "warning"),
    ("aggregate", {"server": lambda t, w, s, n: s[-1]}, "model of one client", "fault"),
    ("aggregate", {"server": lambda t, w, s, n: w}, "did not change", "fault"),
    ("aggregate", {"server": lambda t, w, s, n: mean(s[1:], n[1:])}, "left out", "fault"),
    ("aggregate", {"server": lambda t, w, s, n: mean(s, n[::-1])}, "each other's sizes", "fault"),
    ("aggregate", {"server": total}, "do not sum to 1", "fault"),
    ("aggregate", {"server": lambda t, w, s, n: weights(lambda k, n: k)(t, w, s, [1] * len(s)), "rounds": 3}, "adds", "fault"),
    ("aggregate", {"server": weights(lambda k, n: sum(n) / sum(federations.SIZES))}, "divided by all clients", "fault"),
    ("aggregate", {"server": weights(lambda k, n: -1.0), "rounds": 3}, "against its clients", "fault"),
    ("aggregate", {"server": one_layer}, "some layers", "warning"),
    ("aggregate", {"server": noisy}, "no mean of the clients", "warning"),
    ("aggregate", {"server": lambda t, w, s, n: mean(s, [1, 2, 3, 10])}, "neither equal nor by examples", "warning"),
    ("aggregate", {"server": weights(lambda k, n: 0.7), "method": "fedavg"}, "further or less far", "warning"),
    ("continuity", {"start": lambda t, past: past[max(t - 2, 0)]}, "of round", "warning"),
    ("buffers", {"server": ended}, "not aggregated", "fault"),
    ("buffers", {"server": lambda t, w, s, n: {**mean(s, n), **{k: v for k, v in s[-1].items() if "running" in k}}}, "those of",
     "fault"),
    ("buffer_values", {"client": broken(variance)}, "variance 0", "fault"),
    ("finite", {"client": broken(nan), "rounds": 3}, "not finite", "fault"),
    ("sampling", {"sampled": lambda t, rng: rng.choice(7, 4, replace=False).tolist(), "rounds": 16}, "client 7 was sampled never",
     "warning"),
    ("sampling", {"sampled": lambda t, rng: [0, 2, 3, 5]}, "the same 4 of 8 clients", "warning"),
    ("zero_updates", {"client": broken(lambda w, s: w)}, "exactly zero", "warning"),
    ("copies", {"client": copied(), "sampled": lambda t, rng: [1, 2, 4, 5]}, "is that of client 1", "fault"),
    ("copies", {"client": replayed()}, "had returned before", "fault"),
    ("norms", {"client": broken(moved(20.0))}, "outlyingly long", "warning"),
    ("own_data", {"client": broken(moved(-1.0))}, "raises the loss of client 2", "warning"),
    ("own_data", {"client": broken(flipped)}, "raises the loss of client 2", "warning"),
    ("dead_units", {"server": dying}, "units of 0.weight are dead", "warning"),
    ("reported", {"metrics": best_so_far(), "server": worse_and_worse}, "best so far", "warning"),
    ("reported", {"metrics": on_training_data}, "training data", "warning"),
    ("means", {"metrics": plain_mean}, "plain mean", "warning"),
    ("means", {"metrics": mean_f1}, "not the one of all", "warning"),
    ("partition", {"world": same_examples()}, "the same examples", "warning"),
]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return record(tmp_path_factory.mktemp("clean") / "run", metrics=lambda t, s, d: {"accuracy": accuracy(s, d.test_x, d.test_y)})


@pytest.fixture(scope="module")
def healthy(clean):
    return examined(clean)


@pytest.mark.parametrize(("check", "plant", "what", "severity"), PLANTED, ids=lambda v: v.replace(" ", "-") if isinstance(v, str) else "")
def test_a_planted_fault_is_found(tmp_path, healthy, check, plant, what, severity):
    run = record(tmp_path / "run", **plant)
    rows = found(examined(run), check)
    assert len(rows) and rows["what"].str.contains(what).any(), rows[["what", "evidence"]].to_dict("records")
    assert severity in set(rows["severity"])
    assert all(len(rows[c].dropna()) == len(rows) for c in ("evidence", "consequence", "remedy"))
    if plant.get("client") and check in ("zero_updates", "norms", "own_data", "finite"):
        assert set(rows["client"].dropna()) == {2}
    assert found(healthy, check).empty


def test_the_clean_twin_is_healthy(healthy):
    assert found(healthy).empty, found(healthy)[["metric", "what", "evidence"]].to_dict("records")
    assert set(healthy["metric"]) == {check.name for check in CHECKS}
    unchecked = healthy[healthy["severity"] == "not checked"]
    assert set(unchecked["metric"]) == {"adapters", "means", "seeds", "edge"} and unchecked["evidence"].str.startswith("because").all()
