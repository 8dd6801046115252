"""FedCM, MoFedSAM and FedTOGA: the last global update in the clients' steps."""

import itertools

import pytest
import torch
from helpers import classification, config, federation, play, trace
from test_methods_server import DATA, PLAIN, run, same

from fldiag.methods.fedtoga import fedtoga
from fldiag.parts.momentum import Register

MODES = ("global", "neighbour", "fusion")


def test_T_CM_2_round_0_is_fedavg_with_a_smaller_rate():
    assert same(
        run("fedcm", {"alpha_cm": 0.3}, rounds=1)[0].w, run("fedavg", rounds=1, lr=0.03)[0].w
    )


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_T_CM_3_after_round_0_delta_is_alpha_times_the_mean_gradient(alpha):
    made = federation(config("fedcm", {"alpha_cm": alpha}, **PLAIN), DATA)
    spy = trace(made, raw=True)
    play(made)
    met = [
        torch.stack([g[0] for g, ids in zip(spy.g, spy.ids, strict=True) if ids == [k]]).mean(0)
        for k in range(3)
    ]
    assert same(made.state["delta"], alpha * sum(met) / 3)


def test_delta_holds_the_gradients_also_with_momentum():
    """One step a client and momentum: the divisor is the weight with which the gradient entered."""
    made = federation(
        config("fedcm", {"alpha_cm": 0.5}, weight_decay=0.0, epochs=1, batch_size=100), DATA
    )
    spy = trace(made)
    play(made)
    assert same(made.state["delta"], sum(g[0] for g in spy.g) / 3)


@pytest.mark.parametrize("method", ["fedcm", "mofedsam"])
def test_the_server_rate_scales_the_step_but_not_delta(method):
    whole_step, half_step = (run(method, {"server_lr": s}, rounds=1)[0] for s in (1.0, 0.5))
    start = federation(config(method, **PLAIN), DATA).w
    assert same(half_step.w, (start + whole_step.w) / 2)
    assert torch.equal(half_step.state["delta"], whole_step.state["delta"])


def test_T_MOSAM_1_without_mixing_is_fedsam():
    assert same(
        run("mofedsam", {"rho": 0.2, "alpha_cm": 1.0})[0].w, run("fedsam", {"rho": 0.2})[0].w, 1e-6
    )
    assert not same(run("mofedsam", {"rho": 0.2, "alpha_cm": 1.0})[0].w, run("fedavg")[0].w, 1e-4)


def test_T_MOSAM_2_without_a_radius_it_is_fedcm():
    assert torch.equal(
        run("mofedsam", {"rho": 0.0, "alpha_cm": 0.3})[0].w, run("fedcm", {"alpha_cm": 0.3})[0].w
    )


# -- FedTOGA


@pytest.mark.parametrize("rho", [0.1, 0.6])
def test_T_TOGA_1_without_both_corrections_it_is_fedspeed(rho):
    ours = run("fedtoga", {"kappa": 0.0, "beta_dual": 0.0, "rho": rho})[0].w
    assert torch.equal(ours, run("fedspeed", {"rho": rho})[0].w)


def test_T_TOGA_2_and_without_a_radius_feddyn():
    assert torch.equal(
        run("fedtoga", {"rho": 0.0, "kappa": 0.0, "beta_dual": 0.0})[0].w, run("feddyn")[0].w
    )


def test_T_TOGA_3_round_0_is_fedspeed():
    assert torch.equal(run("fedtoga", rounds=1)[0].w, run("fedspeed", rounds=1)[0].w)
    assert not same(run("fedtoga", rounds=3)[0].w, run("fedspeed", rounds=3)[0].w, 1e-6)


def test_T_TOGA_4_neighbour_takes_one_gradient_a_step_after_the_first(monkeypatch):
    from fldiag.step import Step

    counts, inner = {}, Step.local_gradient
    for mode in MODES:
        made = federation(
            config("fedtoga", {"mode": mode}, total=1, **PLAIN), classification((20,))
        )
        calls = []
        monkeypatch.setattr(
            Step,
            "local_gradient",
            lambda self, *a, calls=calls: calls.append(1) or inner(self, *a),
        )
        play(made, 1)
        counts[mode] = len(calls)
    steps = 2 * 3  # 2 epochs of 20 examples in batches of 8
    assert counts == {"global": 2 * steps, "neighbour": steps + 1, "fusion": 2 * steps}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stack", ["off", "on"])
def test_T_TOGA_5_the_perturbation_has_length_rho(mode, stack):
    made = federation(config("fedtoga", {"mode": mode, "rho": 0.3}, stack=stack), DATA)
    spy = trace(made)
    play(made, 2)
    assert all(same(e.norm(dim=1), torch.full((len(e),), 0.3), 1e-6) for e in spy.e)


def test_T_TOGA_6_delta_times_the_steps_is_the_mean_displacement_turned_round():
    equal = classification((14, 14, 14))
    made, seen = run("fedtoga", rounds=2, data=equal)
    seen = seen[-1][0]
    assert seen.steps.tolist() == [4, 4, 4]
    assert same(4 * made.state["delta"], -(seen.rows - seen.w_g).mean(0))
    scaled, seen = run("fedtoga", {"delta_scale": "steps_lr"}, rounds=1, data=equal)
    assert same(4 * 0.1 * scaled.state["delta"], -(seen[0][0].rows - seen[0][0].w_g).mean(0))


@pytest.mark.parametrize("scale", ["steps", "steps_lr"])
def test_delta_is_of_each_clients_own_number_of_steps_also_with_momentum(scale):
    """M 1.29; version 1 weighed the steps by the momentum."""
    made, seen = run("fedtoga", {"delta_scale": scale}, rounds=2, momentum=0.9)
    seen = seen[-1][0]
    assert len(set(seen.steps.tolist())) == 3
    lr = 1.0 if scale == "steps" else seen.lr
    expected = -((seen.rows - seen.w_g) / (seen.steps[:, None].double() * lr)).mean(0)
    assert same(made.state["delta"], expected) and not same(seen.effective[:, 0], seen.steps)


def test_gradients_are_registered_only_where_they_are_read():
    for mode, registered in itertools.product(MODES, ("gradient", "corrected")):
        built = fedtoga(mode=mode, registered=registered)
        assert sum(isinstance(part, Register) for part in built) == (mode != "global")


def without_server_term(method, options):
    made = federation(config(method, options, **PLAIN), DATA)
    for part in made.setup.method:
        if "h" in part.server_init(made.w):
            part.server = lambda round, w: w
    play(made, 3)
    return made.w


def test_T_TOGA_7_with_everything_off_it_is_fedsam():
    ours = without_server_term("fedtoga", {"rho": 0.3, "lam": 0.0, "kappa": 0.0, "beta_dual": 0.0})
    assert same(ours, run("fedsam", {"rho": 0.3})[0].w, 1e-6)
    assert not same(
        ours, run("fedtoga", {"rho": 0.3, "lam": 0.0, "kappa": 0.0, "beta_dual": 0.0})[0].w, 1e-4
    )


def test_T_TOGA_8_the_ladder_of_the_ablation():
    """SAM, with the dynamic regulariser, with the dual correction, with the global perturbation: each rung changes."""
    rungs = [
        {"lam": 0.0, "beta_dual": 0.0, "kappa": 0.0},
        {"beta_dual": 0.0, "kappa": 0.0},
        {"kappa": 0.0},
        {},
    ]
    ends = [run("fedtoga", rung)[0].w for rung in rungs]
    assert same(ends[1], run("fedspeed")[0].w)
    assert all(not same(a, b, 1e-5) for a, b in itertools.pairwise(ends))
