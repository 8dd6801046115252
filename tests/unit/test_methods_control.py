"""SCAFFOLD and FedDyn: what their memories hold, and the optimum they reach where FedAvg stalls."""

from functools import cache

import numpy as np
import pytest
import torch
from helpers import (
    Recorded,
    classification,
    close,
    config,
    diagonal,
    federation,
    play,
    quadratics,
    trace,
    whole,
)

UNEQUAL = (20, 13, 7)


def far(a, b):
    return float((a - b).abs().max())


def test_T_SCAF_1_round_0_is_fedavg():
    data = classification(UNEQUAL)
    (one, _), (other, _) = (play(federation(config(m), data))[0] for m in ("scaffold", "fedavg"))
    assert torch.equal(one.rows, other.rows)


@pytest.mark.parametrize("train", [{"momentum": 0.0}, {"momentum": 0.9}])
def test_T_SCAF_2_the_server_variate_is_the_mean_over_all_clients(train):
    made = federation(
        config("scaffold", total=5, per_round=2, rounds=6, **train), classification((9, 8, 7, 6, 5))
    )
    for _ in range(6):
        play(made)
        mean = (
            sum(s["c_k"] for s in made.clients.values()) / 5
        )  # a client that never trained holds 0
        assert far(made.state["c"], mean) <= 1e-12
    assert made.state["c"].abs().max() > 1e-2


@pytest.mark.parametrize("problem", ["network", "quadratic"])
def test_T_SCAF_3_a_variate_is_the_mean_gradient_along_the_local_path(problem):
    if problem == "network":
        data, chosen = classification(UNEQUAL), config("scaffold", momentum=0.0, weight_decay=0.0)
    else:
        q = quadratics()
        data, chosen = q.data, q.config("scaffold", batch_size=5, lr=0.05)
    made = federation(chosen, data)
    play(made, 2)  # so that the variates are not zero
    spy = trace(made, raw=True)
    play(made)
    for k in range(3):
        met = torch.stack(
            [g[ids.index(k)] for g, ids in zip(spy.g, spy.ids, strict=True) if k in ids]
        )
        assert far(made.clients[k]["c_k"], met.mean(0)) <= 1e-10


def test_T_SCAF_4_a_single_client_is_fedavg():
    data = classification((20,))
    one, other = (federation(config(m, total=1), data) for m in ("scaffold", "fedavg"))
    play(one, 4)
    play(other, 4)
    assert far(one.w, other.w) <= 1e-10
    assert one.state["c"].abs().max() > 1e-3


def test_the_correction_is_the_server_variate_less_the_clients_own():
    made = federation(config("scaffold", total=3), classification(UNEQUAL))
    play(made, 2)
    c, own = made.state["c"].clone(), {k: s["c_k"].clone() for k, s in made.clients.items()}
    raw, corrected = trace(made, raw=True), trace(made)
    play(made)
    for g, g_u, ids in zip(raw.g, corrected.g, raw.ids, strict=True):
        for j, k in enumerate(ids):
            assert far(g_u[j], g[j] - own[k] + c) <= 1e-12


def test_the_server_rate_scales_the_step_of_the_mean():
    data = classification(UNEQUAL)
    whole_step, half_step = (
        federation(config("scaffold", {"server_lr": s}), data) for s in (1.0, 0.5)
    )
    start = whole_step.w.clone()
    play(whole_step)
    play(half_step)
    close(half_step.w, start + 0.5 * (whole_step.w - start), terms=3)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_effective_steps_are_the_displacement_under_a_constant_gradient(momentum):
    """T-NOVA-2 at momentum 0: the number of steps itself."""
    from fldiag.local import Local
    from fldiag.training.optim import SGD

    made = federation(config(momentum=momentum, weight_decay=0.0), classification(UNEQUAL)).setup
    for steps in (1, 2, 7):
        w, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
        optimizer = SGD(made.config.train, w)
        for _ in range(steps):
            optimizer.step(w, one.clone(), lr=1.0)
        local = Local(
            network=made.network,
            train=made.config.train,
            seed=0,
            t=0,
            lr=1.0,
            ids=[0],
            w_g=w[0],
            w=w,
            n=torch.ones(1),
            steps=torch.tensor([steps]),
            state={},
            sent={},
        )
        assert abs(float(local.effective_steps()) + float(w)) <= 1e-12
        if not momentum:
            assert float(local.effective_steps()) == steps


def test_T_DYN_1_without_regulariser_clients_are_fedavgs_and_the_server_oversteps():
    data, start = classification(UNEQUAL), None
    one, other = (
        federation(config(*m, per_round=2, aggregate="uniform"), data)
        for m in (("feddyn", {"lam": 0.0}), ("fedavg",))
    )
    start = one.w.clone()
    [(seen, _)], [(plain, _)] = play(one), play(other)
    assert torch.equal(seen.rows, plain.rows)
    close(one.w, start + (1 + 2 / 3) * (seen.rows - start).mean(0), terms=3)


def test_T_DYN_2_the_gradient_form_of_the_paper_gives_the_same_vectors():
    """Acar et al.'s own variables (client gradients ghat_k, server h), written out for quadratics."""
    lam, lr, steps, rounds = 0.3, 0.1, 4, 6
    q = quadratics((12, 12, 12, 12))
    who = [[0, 2], [1, 2], [0, 3], [1, 3], [0, 1], [2, 3]]
    full = {k: [list(range(12))] * steps for k in range(4)}
    made = federation(
        q.config("feddyn", {"lam": lam}, lr=lr, per_round=2, rounds=rounds),
        q.data,
        schedule=Recorded(who, [full] * rounds),
    )
    w, h, ghat = (
        made.w.clone(),
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(4, 4, dtype=torch.float64),
    )
    for t in range(rounds):
        ends = []
        for k in who[t]:
            v = w.clone()
            for _ in range(steps):
                v = v - lr * (q.gradient(k, v) - ghat[k] + lam * (v - w))
            ghat[k] = ghat[k] - lam * (v - w)
            ends.append(v)
        mean = torch.stack(ends).mean(0)
        h = h - lam * sum(v - w for v in ends) / 4
        w = mean - h / lam
        play(made)
        assert far(made.w, w) <= 1e-10
        for k in made.clients:
            assert far(-lam * made.clients[k]["h_k"], ghat[k]) <= 1e-10


@pytest.mark.slow
def test_T_DYN_3_exact_local_minimisation_reaches_the_optimum_and_the_gradients_there():
    q = diagonal([[1.0, 3.0], [2.0, 0.5], [0.7, 1.5]], [[1.0, -2.0], [-3.0, 0.5], [2.0, 4.0]])
    lam = 1.0
    made = federation(
        q.config("feddyn", {"lam": lam}, epochs=60, lr=0.4, rounds=50, stack="on"), q.data
    )
    play(made, 50)
    optimum = q.optimum()
    assert far(made.w, optimum) <= 1e-8
    for k in range(3):
        assert far(-lam * made.clients[k]["h_k"], q.gradient(k, optimum)) <= 1e-7
        assert q.gradient(k, optimum).norm() > 0.5


def test_T_DYN_4_the_first_step_of_the_first_participation_is_fedavgs():
    """Also in a later round, when the other clients hold memories."""
    data, parts = classification(UNEQUAL)
    steps = {k: [list(range(len(parts[k])))] * 2 for k in range(3)}
    made = federation(
        config("feddyn", per_round=1),
        (data, parts),
        schedule=Recorded([[0], [1], [1]], [steps] * 3),
    )
    play(made)
    raw, corrected = trace(made, raw=True), trace(made)
    play(made, 2)
    assert torch.equal(raw.g[0], corrected.g[0])
    assert far(raw.g[1], corrected.g[1]) > 1e-4
    assert far(raw.g[2], corrected.g[2]) > 1e-4  # its second participation starts with a memory


@cache
def distance_from_the_optimum(method, **options):
    q, rounds = quadratics(spread=3.0), 150
    made = federation(
        q.config(method, options, lr=0.1, rounds=rounds, stack="on"),
        q.data,
        schedule=whole(q.data[1], rounds, [10] * 3),
    )
    play(made, rounds)
    return float((made.w - q.optimum()).norm())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("scaffold", {}),
        ("feddyn", {"lam": 0.5}),
        ("feddc", {"lam": 0.5}),
        ("feddc", {"lam": 0.5, "rate": "initial"}),
    ],
)
def test_the_optimum_of_heterogeneous_quadratics_is_reached_where_fedavg_stalls(method, options):
    assert distance_from_the_optimum("fedavg") > 1e-2
    assert distance_from_the_optimum(method, **options) <= 1e-8


def test_a_client_that_takes_no_step_has_no_news():
    """Otherwise its variate would lose the server's, though it met no gradient."""
    data, parts = classification(UNEQUAL)
    steps = [
        {k: [list(range(len(parts[k])))] * n for k, n in enumerate(plan)}
        for plan in ([2, 2, 2], [0, 2, 2])
    ]
    made = federation(config("scaffold"), (data, parts), schedule=Recorded([[0, 1, 2]] * 2, steps))
    play(made)
    before = {k: s["c_k"].clone() for k, s in made.clients.items()}
    [(seen, _)] = play(made)
    assert torch.equal(made.clients[0]["c_k"], before[0])
    assert not seen.uploads["delta_c"][0].any()
    assert not torch.equal(made.clients[1]["c_k"], before[1])


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_memories_follow_the_client_not_its_place(method):
    """The same clients, sampled in different company, keep what is theirs."""
    data, parts = classification((9, 8, 7, 6))
    steps = {k: [list(range(len(parts[k])))] for k in range(4)}
    made = federation(
        config(method, total=4, per_round=2),
        (data, parts),
        schedule=Recorded([[1, 3], [0, 2]], [steps] * 2),
    )
    play(made)
    before = {k: {n: v.clone() for n, v in s.items()} for k, s in made.clients.items()}
    assert sorted(before) == [1, 3]
    play(made)
    assert all(torch.equal(made.clients[k][n], v) for k, s in before.items() for n, v in s.items())
    assert sorted(made.clients) == [0, 1, 2, 3]
    assert not np.allclose(*(next(iter(made.clients[k].values())) for k in (0, 1)))
