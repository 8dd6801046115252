"""Server optimisers, momentum and the sharpness family: the identities and closed forms of their definitions."""

import torch
from helpers import classification, config, federation, play

from fldiag.parts.projection import project

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
    made, _ = run("fedadam", {"server_lr": 0.3, "beta1": 0.8, "beta2": 0.9, "tau": 0.02, "v0": 0.5}, rounds=1)
    assert same(made.w, w + 0.3 * 0.2 * delta / ((0.9 * 0.5 + 0.1 * delta**2).sqrt() + 0.02))


def test_T_ADAM_3_sign_of_the_update():
    w, delta = first_displacement()
    made, _ = run("fedadam", {"server_lr": 0.3, "beta1": 0.0, "beta2": 0.0, "tau": 1e-12}, rounds=1)
    assert same(made.w, w + 0.3 * delta.sign(), 1e-6)


def test_T_YOGI_2_second_moment_stays_non_negative_and_differs_from_adam():
    yogi, adam = run("fedyogi", rounds=6)[0], run("fedadam", rounds=6)[0]
    assert (yogi.state["v"] >= 0).all() and not same(yogi.state["v"], adam.state["v"])


def test_T_ACG_1_momentum_is_the_last_move():
    made, seen = run("fedacg", rounds=4)
    assert same(made.state["m"], made.w - seen[-1][0].w_g)


def test_T_CM_2_round_0_is_fedavg_with_a_smaller_rate():
    assert same(run("fedcm", {"alpha_cm": 0.3}, rounds=1)[0].w, run("fedavg", rounds=1, lr=0.03)[0].w)


def test_T_CM_3_delta_is_the_mean_of_the_gradients_used():
    made, [(seen, _)] = run("fedcm", {"alpha_cm": 0.3}, rounds=1)
    by_hand = -((seen.rows - seen.w_g) / (seen.steps[:, None].double() * 0.1)).mean(0)
    assert same(made.state["delta"], by_hand)


def test_T_DC_1_and_2_frozen_pieces_are_feddyn_and_scaffold():
    made = federation(config("feddc", {"lam": 0.2}, **PLAIN), DATA)
    made.setup.method.parts = made.setup.method.parts[:1]
    play(made, 3)
    assert same(made.w, run("feddyn", {"lam": 0.2})[0].w)
    ours, theirs = run("feddc", {"lam": 0.0}, rounds=1)[0], run("scaffold", rounds=1)[0]
    assert same(ours.state["g"], theirs.state["c"]) and ours.state["g"].norm() > 1e-3
    assert all(same(ours.clients[i]["g_k"], theirs.clients[i]["c_k"]) for i in ours.clients)


def test_T_DC_3_global_state_is_the_mean_of_the_clients():
    made, _ = run("feddc", rounds=3)
    assert same(made.state["g"], torch.stack([s["g_k"] for s in made.clients.values()]).mean(0))
    assert made.state["g"].norm() > 1e-3


def test_T_MOSAM_1_without_mixing_is_fedsam():
    assert same(run("mofedsam", {"rho": 0.2, "alpha_cm": 1.0})[0].w, run("fedsam", {"rho": 0.2})[0].w, 1e-6)


def test_T_GAM_2_round_0_is_fedsam():
    assert same(run("fedgamma", {"rho": 0.2}, rounds=1)[0].w, run("fedsam", {"rho": 0.2}, rounds=1)[0].w, 1e-6)


def test_T_SMOO_2_and_3():
    one = {"epochs": 1, "batch_size": 100, "rounds": 1}
    assert same(run("fedsmoo", **one)[0].w, run("fedspeed", **one)[0].w)
    made, _ = run("fedsmoo", {"rho": 0.25}, rounds=2)
    assert abs(float(made.state["s"].norm()) - 0.25) < 1e-9


def test_T_LE_1_first_participation_is_the_base_method():
    for method, base in (("fedlesam", "fedavg"), ("fedlesam_d", "feddyn"), ("fedlesam_s", "scaffold")):
        assert same(run(method, {"rho": 0.5}, rounds=1)[0].w, run(base, rounds=1)[0].w)
        assert not same(run(method, {"rho": 0.5}, rounds=2)[0].w, run(base, rounds=2)[0].w, 1e-5)


def test_T_LE_3_perturbation_has_length_rho_and_is_fixed_for_the_round():
    made = federation(config("fedlesam", {"rho": 0.5}, **PLAIN), DATA)
    play(made, 1)
    [part] = made.setup.method.parts
    inner, seen = part.perturb, {}

    def perturb(step):
        e = inner(step)
        for i, row in zip(step.local.ids, e.value, strict=False):
            seen.setdefault(i, []).append(row.clone())
        return e

    part.perturb = perturb
    play(made, 1)
    for rows in seen.values():
        assert all(torch.equal(r, rows[0]) for r in rows) and abs(float(rows[0].norm()) - 0.5) < 1e-12


def test_T_TOGA_2_3_6():
    assert same(run("fedtoga", {"rho": 0.0, "kappa": 0.0, "beta_dual": 0.0})[0].w, run("feddyn")[0].w)
    assert same(run("fedtoga", rounds=1)[0].w, run("fedspeed", rounds=1)[0].w)
    made, [(seen, _)] = run("fedtoga", rounds=1)
    assert same(made.state["delta"], -((seen.rows - seen.w_g) / seen.steps[:, None]).mean(0))
    assert not same(run("fedtoga", rounds=3)[0].w, run("fedspeed", rounds=3)[0].w, 1e-6)


def test_T_TOGA_4_neighbour_takes_one_gradient_a_step_after_the_first():
    from fldiag.step import Step

    counts = {}
    for mode in ("global", "neighbour", "fusion"):
        made = federation(config("fedtoga", {"mode": mode}, total=1, **PLAIN), classification((20,)))
        calls, inner = [], Step.gradient
        Step.gradient = lambda self, *a, calls=calls, inner=inner: calls.append(1) or inner(self, *a)
        try:
            play(made, 1)
        finally:
            Step.gradient = inner
        counts[mode] = len(calls)
    steps = 2 * 3  # 2 epochs of 20 examples in batches of 8
    assert counts == {"global": 2 * steps, "neighbour": steps + 1, "fusion": 2 * steps}


def test_T_MOON_2_round_0_is_fedavg_and_later_it_is_not():
    assert same(run("moon", {"mu": 1.0}, rounds=1)[0].w, run("fedavg", rounds=1)[0].w, 1e-9)
    assert not same(run("moon", {"mu": 1.0}, rounds=3)[0].w, run("fedavg", rounds=3)[0].w, 1e-6)


def test_T_PGP_1_3_4_projection():
    generator = torch.Generator().manual_seed(0)
    g, h = (torch.randn(200, 30, generator=generator, dtype=torch.float64) for _ in range(2))
    out = project(g, h)
    inner = (g * h).sum(1)
    assert ((out * h).sum(1) >= -1e-10).all()
    assert torch.equal(out[inner >= 0], g[inner >= 0]) and 20 < (inner < 0).sum() < 180
    assert (out.norm(dim=1) <= g.norm(dim=1) + 1e-12).all()
    assert same(project(g, 7 * h), out)
    assert same(out[inner < 0], (g - inner[:, None] / h.square().sum(1, keepdim=True) * h)[inner < 0])


def test_T_PGP_2_one_step_is_fedavg():
    one = {"epochs": 1, "batch_size": 100, "rounds": 1}
    for loss in ("l2", "kl"):
        assert same(run("gradient_projection", {"loss": loss}, **one)[0].w, run("fedavg", **one)[0].w)
        assert not same(run("gradient_projection", {"loss": loss})[0].w, run("fedavg")[0].w, 1e-9)
