"""FedNova, FedAdam, FedYogi, FedAvgM, FedACG: what the server makes of the mean."""

import pytest
import torch
from helpers import classification, close, config, federation, play, quadratics, whole

DATA = classification((20, 13, 7))
PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "lr_decay": 1.0}


def run(method, options=None, rounds=3, data=DATA, **more):
    made = federation(config(method, options or {}, **{**PLAIN, **more}), data)
    return made, play(made, rounds)


def same(a, b, tolerance=1e-12):
    return float((a - b).abs().max()) <= tolerance


def first_displacement(**more):
    made, [(seen, _)] = run("fedavg", rounds=1, **more)
    return seen.w_g, made.w - seen.w_g


def test_T_NOVA_1_equal_steps_are_fedavg():
    equal = classification((14, 14, 14))
    assert same(run("fednova", data=equal)[0].w, run("fedavg", data=equal)[0].w)
    assert not same(run("fednova")[0].w, run("fedavg")[0].w, 1e-4)


def test_T_NOVA_3_coefficients():
    made, [(seen, _)] = run("fednova", rounds=1)
    p, a = seen.p, seen.steps.double()
    c1, c2 = (p * a).sum(), (p / a).sum()
    by_hand = (1 - c1 * c2) * seen.w_g + c1 * ((p / a)[:, None] * seen.rows).sum(0)
    assert same(made.w, by_hand)


def test_T_ADAM_1_first_step_from_v0():
    w, delta = first_displacement()
    made, _ = run(
        "fedadam", {"server_lr": 0.3, "beta1": 0.8, "beta2": 0.9, "tau": 0.02, "v0": 0.5}, rounds=1
    )
    assert same(made.w, w + 0.3 * 0.2 * delta / ((0.9 * 0.5 + 0.1 * delta**2).sqrt() + 0.02))


@pytest.mark.parametrize("method", ["fedadam", "fedyogi"])
def test_T_ADAM_2_with_a_constant_second_moment_the_right_rate_is_fedavg(method):
    """beta1 = 0 and v = v0 for good (adam: beta2 = 1; yogi likewise), server_lr = sqrt(v0) + tau."""
    options = {"beta1": 0.0, "beta2": 1.0, "v0": 0.25, "tau": 0.1, "server_lr": 0.6}
    made, _ = run(method, options)
    assert same(made.w, run("fedavg")[0].w)
    assert same(
        run(method, {**options, "server_lr": 0.3}, rounds=1)[0].w,
        (run("fedavg", rounds=1)[0].w + first_displacement()[0]) / 2,
    )


def test_T_ADAM_3_sign_of_the_update():
    w, delta = first_displacement()
    made, _ = run("fedadam", {"server_lr": 0.3, "beta1": 0.0, "beta2": 0.0, "tau": 1e-12}, rounds=1)
    moved = delta.abs() > 1e-6  # where tau is nothing beside it
    assert (
        same(made.w[moved], (w + 0.3 * delta.sign())[moved], 1e-6) and moved.double().mean() > 0.8
    )
    # the weights of dead units stay where they are, but for the rounding of the mean: its sign is the processor's
    close(delta[~moved], torch.zeros_like(delta[~moved]), terms=3, size=w.abs().max())


def test_T_YOGI_1_adam_and_yogi_agree_where_v_is_the_square_of_the_update():
    _, delta = first_displacement()
    v0 = float(delta[3] ** 2)
    for method in ("fedadam", "fedyogi"):
        made, _ = run(method, {"v0": v0}, rounds=1)
        assert abs(float(made.state["v"][3]) - v0) <= 1e-12 * v0
        assert not same(made.state["v"], torch.full_like(delta, v0), 1e-2 * v0)


def test_T_YOGI_2_second_moment_stays_non_negative_and_differs_from_adam():
    yogi, adam = run("fedyogi", rounds=6)[0], run("fedadam", rounds=6)[0]
    assert (yogi.state["v"] >= 0).all() and not same(yogi.state["v"], adam.state["v"])


def test_T_ACG_1_momentum_is_the_last_move():
    made, seen = run("fedacg", rounds=4)
    assert same(made.state["m"], made.w - seen[-1][0].w_g)


def test_fedacg_clients_start_ahead_and_the_momentum_is_that_of_the_mean_from_there():
    made, _ = run("fedacg", {"beta": 0.5, "mu": 0.3}, rounds=2)
    m, w = made.state["m"].clone(), made.w.clone()
    assert same(made.sent(), w + 0.5 * m) and m.abs().max() > 1e-3
    [(seen, _)] = play(made)
    assert same(made.state["m"], 0.5 * m + seen.p @ (seen.rows - (w + 0.5 * m)))
    assert same(made.w, seen.p @ seen.rows)


@pytest.mark.slow
def test_fednova_of_clients_with_different_numbers_of_steps_comes_closer_to_the_optimum_than_fedavg():
    """Objective inconsistency: at a small rate only FedAvg's fixed point is that of other weights."""
    q, rounds = quadratics(spread=3.0), 400
    distances = {}
    for method in ("fedavg", "fednova"):
        made = federation(
            q.config(method, lr=0.02, rounds=rounds, stack="on"),
            q.data,
            schedule=whole(q.data[1], rounds, [1, 5, 20]),
        )
        play(made, rounds)
        distances[method] = float((made.w - q.optimum()).norm())
    assert distances["fednova"] < 0.25 * distances["fedavg"]
    assert distances["fedavg"] > 0.1
