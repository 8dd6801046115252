"""FedAvg and FedProx: identities, closed forms on quadratics, and a textbook loop in plain PyTorch."""

import copy

import numpy as np
import pytest
import torch
from helpers import (
    classification,
    close,
    config,
    diagonal,
    federation,
    images,
    play,
    quadratics,
    trace,
    whole,
)
from torch.nn import functional as F

from fldiag.training.setup import Seeded

UNEQUAL = (20, 13, 7)


def test_T_AVG_1_one_client_gives_its_weights():
    made = federation(config(total=3, per_round=1), classification(UNEQUAL))
    [(seen, _)] = play(made)
    assert torch.equal(made.w, seen.rows[0])


def test_T_AVG_2_identical_clients_and_one_full_step_are_one_centralised_step():
    q = quadratics((12,))
    dataset, [all_of_it] = q.data
    made = federation(q.config(total=3, epochs=1, lr=0.2), (dataset, [all_of_it] * 3))
    start = made.w.clone()
    play(made)
    assert far(made.w, start - 0.2 * q.gradient(0, start)) <= 1e-12


def test_T_AVG_2_on_a_network():
    data, _ = classification((20,))
    everything = np.arange(20)
    made = federation(
        config(momentum=0.0, weight_decay=0.0, epochs=1, batch_size=20), (data, [everything] * 3)
    )
    module = copy.deepcopy(made.setup.module).requires_grad_()
    F.cross_entropy(module(data.train_x.double()), data.train_y).backward()
    expected = torch.cat([(p - 0.1 * p.grad).flatten() for p in module.parameters()])
    play(made)
    assert far(made.w, expected) <= 1e-12


def test_T_AVG_3_no_epoch_changes_nothing():
    made = federation(config(epochs=0), classification(UNEQUAL))
    before = made.w.clone()
    play(made)
    close(made.w, before, terms=3)


@pytest.mark.parametrize("rule", ["n", "uniform"])
def test_the_mean_has_the_weights_the_config_names(rule):
    made = federation(config(aggregate=rule), classification(UNEQUAL))
    [(seen, _)] = play(made)
    p = np.array(UNEQUAL) / 40 if rule == "n" else np.full(3, 1 / 3)
    close(made.w, torch.from_numpy(p @ seen.rows.numpy()), terms=3)


@pytest.mark.parametrize(
    "train",
    [
        {"momentum": 0.9, "weight_decay": 1e-2},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.0, "clip": 0.3},
        {"optimizer": "adam", "lr": 0.01, "weight_decay": 1e-2},
    ],
    ids=["momentum", "nesterov", "clip", "adam"],
)
@pytest.mark.parametrize(
    ("model", "data"),
    [("mlp", classification(UNEQUAL)), ("small_cnn", images())],
    ids=["mlp", "cnn"],
)
@pytest.mark.parametrize("stack", ["off", "on"])
def test_rounds_are_those_of_a_textbook_loop(train, model, data, stack):
    """deepcopy, torch.optim, backward, state_dict averaging: the loop every paper describes."""
    chosen = config(
        model=model,
        model_options={"hidden": (7, 5)} if model == "mlp" else {},
        stack=stack,
        lr_decay=0.5,
        rounds=2,
        **train,
    )
    made = federation(chosen, data)
    server = copy.deepcopy(made.setup.module).requires_grad_()
    play(made, 2)
    for t in range(2):
        average(
            server, [local(server, chosen, data, t, k) for k in range(3)], [len(p) for p in data[1]]
        )
    expected = torch.cat([p.detach().flatten() for p in server.parameters()])
    assert far(made.w, expected) <= 1e-12


def local(server, chosen, data, t, k):
    (dataset, parts), train = data, chosen.train
    x, y = dataset.train_x[parts[k]].double(), dataset.train_y[parts[k]]
    model, lr = copy.deepcopy(server), train.lr * train.lr_decay**t
    if train.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr, weight_decay=train.weight_decay)
    else:
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr,
            train.momentum,
            nesterov=train.nesterov,
            weight_decay=train.weight_decay,
        )
    for batch in Seeded(0, 3, 3, train.epochs, train.batch_size).batches(t, k, len(x)):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        if train.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
    return model.state_dict()


def average(server, states, sizes):
    server.load_state_dict(
        {
            name: sum(n / sum(sizes) * s[name] for n, s in zip(sizes, states, strict=True))
            for name in states[0]
        }
    )


def test_T_PROX_2_the_first_local_step_of_a_round_is_fedavgs():
    data = classification(UNEQUAL)
    spies = []
    for method, options in (("fedavg", {}), ("fedprox", {"mu": 2.0})):
        made = federation(config(method, options, per_round=1), data)
        spies.append(trace(made))
        play(made)
    plain, pulled = spies
    assert torch.equal(plain.g[0], pulled.g[0])
    assert far(plain.g[1], pulled.g[1]) > 1e-3


@pytest.mark.parametrize("mu", [1e2, 1e4])
def test_T_PROX_3_a_strong_pull_keeps_the_client_where_it_started(mu):
    q = quadratics()
    made = federation(q.config("fedprox", {"mu": mu}, epochs=60, lr=0.5 / mu), q.data)
    start = made.w.clone()
    [(seen, _)] = play(made)
    for k in range(3):
        moved = seen.rows[k] - start
        exact = torch.linalg.solve(
            q.A[k] + mu * torch.eye(4, dtype=torch.float64), -q.gradient(k, start)
        )
        assert far(moved, exact) <= 1e-10
        assert moved.norm() <= q.gradient(k, start).norm() / mu


@pytest.mark.parametrize("a", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_T_PROX_4_fixed_point_on_the_plane(a, mu):
    """x = (a x* + mu x_g) / (a + mu), y = (y* + mu y_g) / (1 + mu)."""
    q = diagonal([[a, 1.0]], [[3.0, 2.0]])
    received = torch.tensor([0.5, -0.4], dtype=torch.float64)
    made = federation(
        q.config("fedprox", {"mu": mu}, epochs=600, lr=1 / (max(a, 1) + mu)), q.data, start=received
    )
    play(made)
    exact = torch.tensor(
        [(a * 3 + mu * 0.5) / (a + mu), (2 + mu * -0.4) / (1 + mu)], dtype=torch.float64
    )
    assert far(made.w, exact) <= 2e-6  # the data are stored in float32
    assert (
        far(
            made.w,
            torch.linalg.solve(
                q.A[0] + mu * torch.eye(2, dtype=torch.float64), q.b[0] + mu * received
            ),
        )
        <= 1e-10
    )


@pytest.mark.slow
def test_fedavg_with_different_numbers_of_steps_does_not_find_the_optimum():
    """The known inconsistency: the fixed point of FedAvg is not the minimiser of the mean loss."""
    q = quadratics(spread=3.0)
    made = federation(
        q.config(lr=0.1, rounds=120, stack="on"), q.data, schedule=whole(q.data[1], 120, [1, 5, 20])
    )
    play(made, 120)
    assert (made.w - q.optimum()).norm() > 0.05
    assert (
        far(made.w, play(made_again(q, made.w))[0][0].rows.mean(0)) <= 1e-8
    )  # and it is a fixed point


def made_again(q, w):
    return federation(
        q.config(lr=0.1, rounds=1), q.data, schedule=whole(q.data[1], 1, [1, 5, 20]), start=w
    )


def far(a, b):
    return float((a - b).detach().abs().max())
