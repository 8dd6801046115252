"""Strategies A0 to A6: which gradient is taken where."""

import pytest
import torch
from helpers import StartAt, classification, config, federation, final, play, trace
from torch.func import functional_call
from torch.nn import functional as F

from fldiag.errors import FldiagError
from fldiag.method import Method

IDS = ["A0", "A1", "A2", "A3", "A4", "A5", "A6"]
DATA = classification((20, 13, 7))
losses = pytest.mark.parametrize("loss", ["kl", "l2"])
parts = pytest.mark.parametrize("part", ["full", "body", "head"])


def far(a, b):
    return float((a - b).abs().max())


def end(id, **options):
    return final(config("strategy", {"id": id, **options}), DATA)


@losses
@parts
def test_T_A_1_without_proximal_loss_only_its_perturbation_is_left(loss, part):
    weights = {id: end(id, beta_prox=0.0, loss=loss, part=part) for id in IDS}
    assert all(torch.equal(weights["A0"], weights[id]) for id in ("A2", "A5"))
    assert all(torch.equal(weights["A1"], weights[id]) for id in ("A3", "A6"))
    assert far(weights["A0"], weights["A1"]) > 1e-6
    assert torch.equal(weights["A0"], final(config(), DATA))
    sol = {"loss": loss, "part": part}
    assert torch.equal(weights["A1"], final(config("fedsol", sol), DATA))


@losses
@parts
def test_T_A_2_without_a_radius_the_points_are_one(loss, part):
    weights = {id: end(id, rho=0.0, loss=loss, part=part) for id in IDS}
    assert torch.equal(weights["A1"], weights["A0"])
    assert all(far(weights["A5"], weights[id]) <= 1e-12 for id in ("A2", "A3", "A4", "A6"))
    assert far(weights["A5"], weights["A0"]) > 1e-6


@pytest.mark.parametrize("clip", [{}, {"clip": 0.05, "clip_before_quadratic": True}])
def test_T_A_3_the_proximal_restriction_with_l2_is_fedprox(clip):
    prox = final(config("fedprox", {"mu": 0.7}, **clip), DATA)
    ours = final(config("strategy", {"id": "A5", "loss": "l2", "beta_prox": 0.7}, **clip), DATA)
    assert torch.equal(ours, prox)


@losses
@parts
@pytest.mark.parametrize("strength", ["fixed", "adaptive"])
@pytest.mark.parametrize("id", IDS)
def test_the_gradient_is_that_of_the_table(id, strength, part, loss):
    """Written out with autograd from a start away from the received weights."""
    beta, rho, tau = 0.6, 0.9, 3.0
    options = {
        "id": id,
        "beta_prox": beta,
        "rho": rho,
        "loss": loss,
        "tau": tau,
        "part": part,
        "strength": strength,
    }
    made = federation(
        config("strategy", options, epochs=1, batch_size=100, per_round=1, total=1),
        classification((20,)),
    )
    layout, module, received = made.setup.network.layout, made.setup.module, made.w.clone()
    w = received + 0.2 * torch.randn(
        len(received), generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    made.setup.method = Method(StartAt(w), *made.setup.method.parts)
    spy = trace(made)
    play(made)

    data = classification((20,))[0]
    x, y = data.train_x.double(), data.train_y
    cut = layout.size - layout.head_size
    inside = {"full": slice(None), "body": slice(cut), "head": slice(cut, None)}[part]

    def logits(v):
        return functional_call(module, {n: u[0] for n, u in layout.views(v[None]).items()}, (x,))

    def local(v):
        return F.cross_entropy(logits(v), y)

    def proximal(v):
        if loss == "l2":
            return 0.5 * (v - received).square().sum()
        return F.kl_div(
            F.log_softmax(logits(v) / tau, -1),
            F.softmax(logits(received) / tau, -1),
            reduction="batchmean",
        )

    def gradient(of, v):
        leaf = v.detach().clone().requires_grad_()
        return torch.autograd.grad(of(leaf), leaf)[0]

    def eps(g):
        cutout = torch.zeros_like(g)
        cutout[inside] = g[inside]
        scale = torch.ones_like(g)
        if strength == "adaptive":
            for names in layout.layers.values():
                where = torch.cat([torch.arange(len(g))[layout.slices()[n]] for n in names])
                scale[where] = (w - received)[where].abs() / (w - received)[where].norm()
        return rho * scale * cutout / cutout.norm()

    p = eps(gradient(proximal, w))
    c = eps(gradient(proximal, w) + gradient(local, w))
    expected = {
        "A0": gradient(local, w),
        "A1": gradient(local, w + p),
        "A2": gradient(local, w) + beta * gradient(proximal, w + p),
        "A3": gradient(local, w + p) + beta * gradient(proximal, w + p),
        "A4": gradient(local, w + c) + beta * gradient(proximal, w + c),
        "A5": gradient(local, w) + beta * gradient(proximal, w),
        "A6": gradient(local, w + p) + beta * gradient(proximal, w),
    }
    assert far(spy.g[0][0], expected[id]) <= 1e-9
    assert all(far(expected[id], other) > 1e-5 for name, other in expected.items() if name != id)


@pytest.mark.parametrize("stack", ["off", "on"])
def test_the_combined_loss_of_a_client_that_has_not_moved_is_its_own(stack):
    """A4 at the first step of a round: g_p = 0, so eps_c is SAM's."""
    made = federation(
        config(
            "strategy", {"id": "A4", "rho": 0.3, "part": "full", "strength": "fixed"}, stack=stack
        ),
        DATA,
    )
    sam = federation(config("fedsam", {"rho": 0.3}, stack=stack), DATA)
    ours, theirs = trace(made), trace(sam)
    play(made)
    play(sam)
    assert far(ours.e[0], theirs.e[0]) <= 1e-9
    assert far(ours.e[1], theirs.e[1]) > 1e-6


def test_kl_needs_class_labels():
    from helpers import quadratics

    q = quadratics()
    with pytest.raises(
        FldiagError, match=r"kl proximal loss needs class labels.*method\.loss = 'l2'"
    ):
        federation(q.config("strategy", {"part": "full"}), q.data)
