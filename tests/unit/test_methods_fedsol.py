"""FedSOL: the perturbation, the gradient taken there, and what is left when it is switched off."""

import pytest
import torch
from helpers import (
    StartAt,
    classification,
    config,
    diagonal,
    federation,
    final,
    images,
    play,
    quadratics,
    trace,
    whole,
)
from test_methods_sharpness import FULL, UNEQUAL, far, one, traced
from torch.nn import functional as F

from fldiag import losses
from fldiag.errors import FldiagError
from fldiag.local import Local
from fldiag.method import Method
from fldiag.models.network import Network
from fldiag.params import Layout


def test_T_SOL_2_with_the_local_loss_as_proximal_loss_it_is_sam():
    data = classification(UNEQUAL)
    made = federation(config("fedsol", {**FULL, "rho": 0.5}), data)
    [part] = made.setup.method.parts
    part.loss_p.term = lambda step, out: step.mean(losses.per_example(out.logits, step.y))
    play(made, 2)
    assert far(made.w, final(config("fedsam", {"rho": 0.5}), data)) <= 1e-10


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("part", ["full", "body", "head"])
@pytest.mark.parametrize("loss", ["kl", "l2"])
@pytest.mark.parametrize("strength", ["fixed", "adaptive"])
def test_T_SOL_3_the_first_local_step_of_a_round_is_fedavgs(loss, part, strength, precision):
    data = classification(UNEQUAL)
    options = {"rho": 2.0, "loss": loss, "part": part, "strength": strength}
    _, sol = traced("fedsol", options, data, rounds=2, per_round=1, precision=precision)
    starts = [s for s in range(len(sol.w)) if s == 0 or not sol.e[s].any()]
    assert len(starts) == 2  # one in each round
    plain = federation(config(precision=precision, per_round=1), data)
    spy = trace(plain)
    play(plain)
    torch.testing.assert_close(
        sol.g[0], spy.g[0], rtol=1e-6 if precision == "fp32" else 1e-12, atol=1e-8
    )
    assert far(sol.g[1], spy.g[1]) > 1e-5


@pytest.mark.parametrize("part", ["full", "body", "head"])
def test_T_SOL_4_length_of_the_perturbation(part):
    data = classification(UNEQUAL)
    _, fixed = traced("fedsol", {"rho": 1.3, "part": part, "strength": "fixed"}, data, per_round=1)
    assert all(far(one(e), 1.3) <= 1e-8 for e in fixed.e[1:])
    made, adaptive = traced("fedsol", {"rho": 1.3, "part": part}, data, per_round=1)
    start = adaptive.w[0]
    for w, e in zip(adaptive.w[1:], adaptive.e[1:], strict=True):
        strength = losses.strengths(w - start, made.setup.network.layout)
        assert 0 < float(one(e)) <= 1.3 * float(strength.max()) <= 1.3


def test_T_SOL_4_strengths_have_unit_length_in_each_layer():
    layout = federation(config(), classification(UNEQUAL)).setup.network.layout
    d = torch.randn(2, layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slices = layout.slices()
    by_layer, by_tensor, by_axis = (
        losses.strengths(d, layout, rule) for rule in ("layer", "tensor", "dim0")
    )
    for names in layout.layers.values():
        squares = sum(by_layer[:, slices[n]].square().sum(1) for n in names)
        assert far(squares, torch.ones(2)) <= 1e-12
    for name, view in layout.views(d).items():
        assert far(by_tensor[:, slices[name]].square().sum(1), torch.ones(2)) <= 1e-12
        assert (
            far(by_axis[:, slices[name]], (view.abs() / view.norm(dim=1, keepdim=True)).flatten(1))
            <= 1e-12
        )
        columns = view[0].numel() // view.shape[1]
        assert (
            far(by_axis[:, slices[name]].square().sum(1), torch.full((2,), float(columns))) <= 1e-10
        )
    assert not losses.strengths(torch.zeros(1, layout.size), layout).any()


def test_the_strength_of_a_scalar_parameter_is_one_under_every_rule():
    """Such as the temperature of an attention: its layer and its first axis have a single entry."""
    module = torch.nn.Linear(3, 2)
    module.gain = torch.nn.ParameterDict({"t": torch.nn.Parameter(torch.tensor(1.0))})
    layout = Layout.of(module)
    d = torch.randn(2, layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for rule in ("layer", "tensor", "dim0"):
        strength = losses.strengths(d, layout, rule)
        assert strength.shape == d.shape
        assert far(strength[:, layout.slices()["gain.t"]], torch.ones(2, 1)) <= 1e-12


def test_T_SOL_5_a_perturbed_head_moves_the_gradient_of_the_body():
    data = classification(UNEQUAL)
    made, sol = traced("fedsol", {"part": "head", "rho": 2.0}, data, per_round=1)
    cut = made.setup.network.size - made.setup.network.layout.head_size
    plain = federation(config(per_round=1), data)
    spy = trace(plain)
    play(plain)
    for e in sol.e[1:]:
        assert not e[:, :cut].any()
        assert e[:, cut:].any()
    assert torch.equal(sol.w[1], spy.w[1])
    assert far(sol.g[1][:, :cut], spy.g[1][:, :cut]) > 1e-5
    _, body = traced("fedsol", {"part": "body", "rho": 2.0}, data, per_round=1)
    assert all(e[:, :cut].any() and not e[:, cut:].any() for e in body.e[1:])


def test_T_SOL_6_full_strength_everywhere_is_the_fixed_method(monkeypatch):
    data = classification(UNEQUAL)
    fixed = final(config("fedsol", {"strength": "fixed"}), data)
    assert far(final(config("fedsol"), data), fixed) > 1e-5
    monkeypatch.setattr(losses, "strengths", lambda d, *_: torch.ones_like(d))
    assert torch.equal(final(config("fedsol"), data), fixed)


def test_T_SOL_7_what_a_step_does_to_both_losses_on_quadratics():
    """The identities behind Propositions 1 and 2 of the paper, exact for a quadratic loss."""
    q = quadratics()
    rho, lr = 0.8, 0.05
    made = federation(
        q.config("fedsol", {**FULL, "rho": rho, "loss": "l2"}, lr=lr, epochs=6), q.data
    )
    start, spy = made.w.clone(), trace(made)
    play(made)
    checked = 0
    for w, g_u, e, [k] in zip(spy.w, spy.g, spy.e, spy.ids, strict=True):
        w, g_u, e = w[0], g_u[0], e[0]
        if not e.any():
            continue
        checked += 1
        g, A, unit = q.gradient(k, w), q.A[k], (w - start) / (w - start).norm()
        after = w - lr * g_u
        assert far(g_u, g + rho * A @ unit) <= 1e-10
        gap = -g @ g_u + q.gradient(k, w + e / 2).square().sum()
        assert abs(gap - rho**2 / 4 * (A @ unit).square().sum()) <= 1e-10
        moved = q.loss(k, after) - q.loss(k, w)
        assert abs(moved - (-lr * g @ g_u + lr**2 / 2 * g_u @ A @ g_u)) <= 1e-10
        away = 0.5 * ((after - start).square().sum() - (w - start).square().sum())
        assert abs(away - (-lr * (w - start) @ g_u + lr**2 / 2 * g_u @ g_u)) <= 1e-10
    assert checked == 3 * 5


@pytest.mark.parametrize("a", [0.2, 1.0, 5.0])
@pytest.mark.parametrize(("rho", "x", "y"), [(0.5, 2.639306, 1.653734), (1.5, 1.917919, 0.961202)])
def test_T_SOL_8_equilibrium_on_the_plane_does_not_depend_on_the_curvature(a, rho, x, y):
    """w = w_l* - rho (w_l* - w_g) / D for every a, where FedProx leaves the line."""
    q = diagonal([[a, 1.0]], [[3.0, 2.0]])
    received = torch.tensor([0.5, -0.4], dtype=torch.float64)
    made = federation(
        q.config(
            "fedsol", {**FULL, "rho": rho, "loss": "l2"}, lr=0.2 if a > 1 else 0.8, epochs=400
        ),
        q.data,
        start=received,
    )
    play(made)
    optimum = torch.linalg.solve(q.A[0], q.b[0])
    away = optimum - received
    assert far(made.w, optimum - rho * away / away.norm()) <= 1e-10
    assert far(made.w, torch.tensor([x, y], dtype=torch.float64)) <= 2e-6


def test_T_SOL_9_the_inner_product_with_the_proximal_gradient_grows_with_the_radius():
    q = quadratics(spread=3.0)
    away = torch.tensor([0.4, -0.3, 0.2, 0.5], dtype=torch.float64)
    last = None
    for rho in (0.0, 0.5, 1.0, 2.0, 8.0):
        made = federation(q.config("fedsol", {**FULL, "rho": rho, "loss": "l2"}), q.data)
        start = made.w.clone()
        made.setup.method = Method(StartAt(start + away), *made.setup.method.parts)
        spy = trace(made)
        play(made)
        firsts = [spy.ids.index([k]) for k in range(3)]
        inner = torch.stack([spy.g[s][0] @ away for s in firsts])
        wanted = torch.stack(
            [
                q.gradient(k, start + away) @ away + rho * away @ q.A[k] @ away / away.norm()
                for k in range(3)
            ]
        )
        assert far(inner, wanted) <= 1e-10
        assert last is None or bool((inner >= last).all())
        last = inner


def test_T_SOL_10_the_scale_of_the_proximal_loss_is_of_no_consequence():
    data = classification(UNEQUAL)
    ends = []
    for scale in (1.0, 3.7):
        made = federation(config("fedsol", {**FULL, "rho": 1.0}), data)
        [part] = made.setup.method.parts
        part.loss_p.term = lambda step, out, inner=part.loss_p.term, scale=scale: (
            scale * inner(step, out)
        )
        play(made)
        ends.append(made.w)
    assert (
        far(*ends) <= 1e-8
    )  # the first perturbed gradients are small, and the guard 1e-12 is not scaled with them


def test_the_kl_gradient_is_that_of_torchs_divergence():
    """mean_x KL(teacher || student) at temperature 3, without a factor tau^2."""
    data = classification((20,))
    made = federation(
        config("fedsol", {**FULL, "tau": 3.0}, total=1, batch_size=20, epochs=3), data
    )
    [part], seen = made.setup.method.parts, []
    inner, received = part.gradient, made.w.clone()
    part.gradient = lambda step, *cut: (
        seen.append((step.w[0].clone(), inner(step, *cut)[0])) or inner(step, *cut)
    )
    module = made.setup.module
    x = data[0].train_x.double()

    def logits(w):
        return torch.func.functional_call(
            module, {n: v[0] for n, v in made.setup.network.layout.views(w[None]).items()}, (x,)
        )

    play(made)
    for w, g in seen[1:]:
        leaf = w.clone().requires_grad_()
        with torch.no_grad():
            teacher = F.softmax(logits(received) / 3, -1)
        F.kl_div(F.log_softmax(logits(leaf) / 3, -1), teacher, reduction="batchmean").backward()
        assert far(g, leaf.grad) <= 1e-12
        assert far(g, 0 * g) > 1e-5
    assert len(seen) == 3


def test_kl_needs_class_labels():
    q = quadratics()
    with pytest.raises(
        FldiagError, match=r"kl proximal loss needs class labels.*method\.loss = 'l2'"
    ):
        federation(q.config("fedsol", FULL), q.data)


def test_a_part_needs_a_head():
    q = quadratics()
    with pytest.raises(FldiagError, match="the model has no head"):
        federation(q.config("fedsol", {"part": "head", "loss": "l2"}), q.data)


def test_the_head_mode_runs_the_body_once_a_step(monkeypatch):
    """The claimed cost: one forward of the body a step, and the received model's outputs once a round."""
    calls, features = [], Network.features

    def counted(self, x):
        calls.append(self._train)
        return features(self, x)

    monkeypatch.setattr(Network, "features", counted)
    made = federation(config("fedsol", total=1, model="small_cnn", model_options={}), images((16,)))
    calls.clear()
    play(made)
    assert calls.count(True) == 4  # 2 epochs of 2 minibatches
    assert calls.count(False) == 1


def test_cached_and_repeated_outputs_of_the_received_model_agree(monkeypatch):
    data = classification(UNEQUAL)
    ends = [final(config(m, stack="on"), data) for m in ("fedsol", "fedntd")]
    monkeypatch.setattr(Local, "received_logits", None)
    again = [final(config(m, stack="on"), data) for m in ("fedsol", "fedntd")]
    assert all(far(a, b) <= 1e-12 for a, b in zip(ends, again, strict=True))


def test_different_numbers_of_steps_do_not_mix_clients():
    """Perturbations of a stack: each client's length is its own, also when others have finished."""
    q = quadratics()
    made = federation(
        q.config("fedsol", {**FULL, "rho": 0.4, "loss": "l2"}, stack="on"),
        q.data,
        schedule=whole(q.data[1], 1, [1, 3, 5]),
    )
    spy = trace(made)
    play(made)
    assert [len(i) for i in spy.ids] == [3, 2, 2, 1, 1]
    assert all(far(one(e), 0.4) <= 1e-9 for e in spy.e[1:])
