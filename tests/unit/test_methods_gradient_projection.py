"""Projection of the local gradient off the proximal gradient."""

import pytest
import torch
from helpers import classification, config, federation, play, quadratics, trace
from test_methods_server import run, same
from torch.func import functional_call
from torch.nn import functional as F

from fldiag.errors import FldiagError
from fldiag.parts.projection import project

DATA = classification((20, 13, 7))


def rows():
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(200, 30, generator=generator, dtype=torch.float64) for _ in range(2))


def test_the_projection_is_its_definition():
    g, h = rows()
    out, inner = project(g, h), (g * h).sum(1)
    assert torch.equal(out[inner >= 0], g[inner >= 0]) and 20 < (inner < 0).sum() < 180
    assert same(
        out[inner < 0], (g - inner[:, None] / h.square().sum(1, keepdim=True) * h)[inner < 0]
    )
    assert torch.equal(project(g, 0 * h), g)


def test_T_PGP_1_what_is_left_does_not_oppose_the_proximal_gradient():
    g, h = rows()
    out = project(g, h)
    assert ((out * h).sum(1) >= -1e-6 * out.norm(dim=1) * h.norm(dim=1)).all()
    assert ((g * h).sum(1) < -1e-2).any()


def test_T_PGP_2_the_first_step_is_fedavgs():
    one = {"epochs": 1, "batch_size": 100, "rounds": 1}
    for loss in ("l2", "kl"):
        assert same(
            run("gradient_projection", {"loss": loss}, **one)[0].w, run("fedavg", **one)[0].w
        )
        assert not same(run("gradient_projection", {"loss": loss})[0].w, run("fedavg")[0].w, 1e-9)


def test_T_PGP_3_the_scale_of_the_proximal_loss_is_of_no_consequence():
    g, h = rows()
    assert same(project(g, 7 * h), project(g, h))
    ends = []
    for scale in (1.0, 5.0):
        made = federation(config("gradient_projection"), DATA)
        [part] = made.setup.method.parts
        part.loss_p.term = lambda step, out, inner=part.loss_p.term, scale=scale: (
            scale * inner(step, out)
        )
        play(made)
        ends.append(made.w)
    assert same(*ends, 1e-10)


def test_T_PGP_4_the_gradient_does_not_grow():
    g, h = rows()
    out = project(g, h)
    assert (out.norm(dim=1) <= g.norm(dim=1) + 1e-12).all()
    assert (out.norm(dim=1) < 0.99 * g.norm(dim=1)).any()


@pytest.mark.parametrize("loss", ["kl", "l2"])
def test_steps_are_projected_off_the_gradient_of_the_proximal_loss(loss):
    """The gradient of L_p by autograd on the module, at every step."""
    made = federation(config("gradient_projection", {"loss": loss, "tau": 2.0}, epochs=4), DATA)
    play(made, 2)
    raw, used = trace(made, raw=True), trace(made)
    module, layout, start = made.setup.module, made.setup.network.layout, made.w.clone()
    batches = [made.setup.schedule.batches(2, k, len(DATA[1][k])) for k in range(3)]
    play(made)
    place, changed = [0, 0, 0], 0
    for w, g, g_u, [k] in zip(raw.w, raw.g, used.g, raw.ids, strict=True):
        x = DATA[0].train_x[DATA[1][k][batches[k][place[k]]]].double()
        place[k] += 1

        def logits(v, x=x):
            return (
                functional_call(module, {n: u[0] for n, u in layout.views(v[None]).items()}, (x,))
                / 2.0
            )

        leaf = w[0].clone().requires_grad_()
        if loss == "l2":
            value = 0.5 * (leaf - start).square().sum()
        else:
            value = F.kl_div(
                F.log_softmax(logits(leaf), -1), F.softmax(logits(start), -1), reduction="batchmean"
            )
        (h,) = torch.autograd.grad(value, leaf)
        inner = float(g[0] @ h)
        expected = g[0] - inner / float(h @ h) * h if inner < 0 and h.norm() > 1e-12 else g[0]
        assert same(g_u[0], expected, 1e-10)
        changed += not same(expected, g[0], 1e-5)
    assert changed > 3


def test_kl_needs_class_labels():
    q = quadratics()
    with pytest.raises(
        FldiagError, match=r"kl proximal loss needs class labels.*method\.loss = 'l2'"
    ):
        federation(q.config("gradient_projection"), q.data)
