"""FedDC, FedGAMMA, FedSpeed, FedSMOO and the FedLESAMs: regularisers and perturbations that remember."""

import pytest
import torch
from helpers import classification, config, federation, play, trace
from test_methods_momentum import without_server_term
from test_methods_server import DATA, PLAIN, run, same

from fldiag.training.setup import Seeded


def test_T_DC_1_without_gradient_states_it_is_feddyn():
    made = federation(config("feddc", {"lam": 0.2}, **PLAIN), DATA)
    made.setup.method.parts = made.setup.method.parts[:1]
    play(made, 3)
    assert torch.equal(made.w, run("feddyn", {"lam": 0.2})[0].w)
    assert not same(made.w, run("feddc", {"lam": 0.2})[0].w, 1e-4)


def test_T_DC_2_without_a_penalty_the_local_steps_are_scaffolds():
    """Two rounds in, with the same states on both sides."""
    theirs, _ = run("scaffold", rounds=2)
    ours = federation(config("feddc", {"lam": 0.0}, **PLAIN), DATA, start=theirs.w)
    ours.t, ours.state["g"] = 2, theirs.state["c"].clone()
    ours.clients = {
        k: {"h_k": torch.zeros_like(ours.w), "g_k": s["c_k"].clone()}
        for k, s in theirs.clients.items()
    }
    [(a, _)], [(b, _)] = play(ours), play(theirs)
    assert same(a.rows, b.rows)
    assert same(ours.state["g"], theirs.state["c"]) and ours.state["g"].norm() > 1e-3
    assert all(same(ours.clients[k]["g_k"], theirs.clients[k]["c_k"]) for k in range(3))


def test_T_DC_3_global_state_is_the_mean_of_the_clients():
    made, _ = run("feddc", rounds=4, per_round=2)
    assert same(made.state["g"], sum(s["g_k"] for s in made.clients.values()) / 3)
    assert made.state["g"].norm() > 1e-3


def test_sizes_are_of_no_consequence_for_feddc_when_they_are_equal():
    equal = classification((14, 14, 14))
    assert same(run("feddc", {"omega": "n"}, data=equal)[0].w, run("feddc", data=equal)[0].w)
    assert not same(run("feddc", {"omega": "n"})[0].w, run("feddc")[0].w, 1e-6)


def test_T_GAM_1_without_a_radius_it_is_scaffold():
    assert torch.equal(run("fedgamma", {"rho": 0.0})[0].w, run("scaffold")[0].w)


def test_T_GAM_2_round_0_is_fedsam():
    assert same(
        run("fedgamma", {"rho": 0.2}, rounds=1)[0].w,
        run("fedsam", {"rho": 0.2}, rounds=1)[0].w,
        1e-6,
    )
    assert not same(run("fedgamma", {"rho": 0.2})[0].w, run("fedsam", {"rho": 0.2})[0].w, 1e-4)


def test_T_SPEED_1_without_a_radius_it_is_feddyn():
    assert torch.equal(
        run("fedspeed", {"rho": 0.0, "lam": 0.3})[0].w, run("feddyn", {"lam": 0.3})[0].w
    )


def test_T_SPEED_2_without_regulariser_and_server_term_it_is_fedsam():
    assert same(
        without_server_term("fedspeed", {"rho": 0.3, "lam": 0.0}),
        run("fedsam", {"rho": 0.3})[0].w,
        1e-6,
    )


def test_T_SMOO_1_without_duals_of_the_perturbation_it_is_fedspeed():
    made = federation(config("fedsmoo", {"rho": 0.3}, **PLAIN), DATA)
    part = made.setup.method.parts[0]
    inner = part.perturb

    def forgetful(step):
        e = inner(step)
        step.state("mu_k").zero_()
        return e

    part.perturb = forgetful
    play(made, 3)
    assert torch.equal(made.w, run("fedspeed", {"rho": 0.3})[0].w)
    assert not same(made.w, run("fedsmoo", {"rho": 0.3})[0].w, 1e-5)


def test_T_SMOO_2_the_first_step_is_fedspeeds():
    one = {"epochs": 1, "batch_size": 100, "rounds": 1}
    assert same(run("fedsmoo", **one)[0].w, run("fedspeed", **one)[0].w)
    assert not same(run("fedsmoo", rounds=1)[0].w, run("fedspeed", rounds=1)[0].w, 1e-6)


def test_T_SMOO_3_the_servers_perturbation_has_length_rho_or_none():
    made = federation(config("fedsmoo", {"rho": 0.25}, **PLAIN), DATA)
    assert not made.state["s"].any()
    for _ in range(3):
        play(made)
        assert abs(float(made.state["s"].norm()) - 0.25) < 1e-9
    assert not run("fedsmoo", {"rho": 0.25}, epochs=0)[0].state["s"].any()


BASES = [("fedlesam", "fedavg"), ("fedlesam_d", "feddyn"), ("fedlesam_s", "scaffold")]


@pytest.mark.parametrize(("method", "base"), BASES)
def test_T_LE_1_the_first_participation_is_the_base_methods(method, base):
    assert torch.equal(run(method, {"rho": 0.5}, rounds=1)[0].w, run(base, rounds=1)[0].w)
    assert not same(run(method, {"rho": 0.5}, rounds=2)[0].w, run(base, rounds=2)[0].w, 1e-5)


@pytest.mark.parametrize(("method", "base"), BASES)
@pytest.mark.parametrize("estimate", ["client", "server"])
def test_T_LE_2_without_a_radius_it_is_the_base_method(method, base, estimate):
    assert torch.equal(run(method, {"rho": 0.0, "estimate": estimate})[0].w, run(base)[0].w)


@pytest.mark.parametrize("estimate", ["client", "server"])
def test_T_LE_3_the_perturbation_points_to_the_model_before_has_length_rho_and_stays_for_the_round(
    estimate,
):
    """Rounds 0, 1 and 2 with clients {0, 1}, {1, 2}, {0, 2}: who remembers what."""
    seeded = Seeded(0, 3, 2, 2, 8)

    class Chosen:
        def sampled(self, t):
            return [[0, 1], [1, 2], [0, 2]][t]

        def batches(self, t, client, n):
            return seeded.batches(t, client, n)

    made = federation(
        config("fedlesam", {"rho": 0.5, "estimate": estimate}, per_round=2, **PLAIN),
        DATA,
        schedule=Chosen(),
    )
    sent = [made.w.clone()]
    for t, last in enumerate(({}, {1: 0}, {0: 0, 2: 1})):
        spy = trace(made)
        play(made)
        for e, [k] in zip(spy.e, spy.ids, strict=True):
            before = (
                sent[last[k]]
                if estimate == "client" and k in last
                else sent[t - 1]
                if estimate == "server" and t
                else sent[t]
            )
            d = before - sent[t]
            assert same(e[0], 0.5 * d / d.norm() if d.any() else d)
        made.setup.method.parts = made.setup.method.parts[:1]
        del made.setup.method.parts[0].perturb
        sent.append(made.w.clone())
