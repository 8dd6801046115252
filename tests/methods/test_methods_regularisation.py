"""Mixup, FedRCL and MOON's projection head against their definitions."""

import math

import pytest
import torch
from helpers import config, local_of
from test_algorithms import relaxed
from torch.nn import functional as F

from fldiag import models
from fldiag.models.network import Network
from fldiag.params import flatten
from fldiag.parts.augmentation import MixedExamples
from fldiag.parts.contrast import ModelContrast
from fldiag.parts.relaxation import RelaxedContrast
from fldiag.seeding import numpy_rng
from fldiag.step import Step


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step_of(module, x, y, weight=None, maps=False, ids=(0,)):
    """A local step of clients ``ids`` at the module's weights, on x [k, B, ...] and y [k, B]."""
    net = Network(module.double(), precision="fp64")
    w = flatten(module).detach().expand(len(ids), -1).clone()
    buffers = {n: b[None].clone() for n, b in net.buffers.items()}
    about = {"seed": 5, "t": 3, "ids": list(ids), "buffers": buffers}
    local = local_of(net, config().train, w, [1] * len(ids), **about)

    def loss(step, out):
        return step.mean(step.label_loss(out.logits))

    return Step(local, loss, x, y, weight, torch.zeros_like(y), maps)


# --- Mixup


def mlp(features=6, classes=3):
    return models.build("mlp", (features,), classes, {"hidden": (5,)}, seed=2)


def naive_mixup(module, x, y, generator, g):
    """Loss of one client's minibatch."""
    a, pi = generator.beta(g, g), generator.permutation(len(y))
    logits = module(a * x + (1 - a) * x[pi])
    return a * F.cross_entropy(logits, y) + (1 - a) * F.cross_entropy(logits, y[pi])


def test_the_mixed_loss_is_its_definition_for_every_client_of_a_stack_and_padding_stays_out():
    module, part = mlp().double(), MixedExamples(0.7)
    x, y = normal(2, 6, 6), torch.tensor([[0, 1, 2, 0, 1, 2], [2, 2, 0, 1, 0, 0]])
    x[1, 4:] = 1e6  # client 9 has four examples, the rest is padding
    weight = torch.tensor([[1 / 6] * 6, [1 / 4] * 4 + [0.0] * 2], dtype=torch.float64)
    step = step_of(module, x, y, weight, ids=(4, 9))
    part.begin(step.local)
    generators = [numpy_rng(5, "mixup", 3, i) for i in (4, 9)]
    for _ in range(2):  # every minibatch draws anew
        now = step_of(module, x, y, weight, ids=(4, 9))
        now.local.memo = step.local.memo
        part.batch(now)
        values, g = now.local_gradient()
        assert float(now.x[1, :4].abs().max()) < 10
        for k, n in enumerate((6, 4)):
            loss = naive_mixup(module, x[k, :n], y[k, :n], generators[k], 0.7)
            exact = torch.autograd.grad(loss, list(module.parameters()))
            assert float(values[k]) == pytest.approx(loss.item(), rel=1e-12)
            exact = torch.cat([v.flatten() for v in exact])
            torch.testing.assert_close(g[k], exact, rtol=1e-10, atol=1e-13)


# --- FedRCL


def test_the_levels_of_a_residual_net_are_its_maps_before_relu():
    x, y = normal(1, 6, 1, 8, 8), torch.tensor([[0, 0, 1, 1, 2, 0]])
    module = models.build("small_resnet", (1, 8, 8), 4, seed=1)
    step = step_of(module, x, y, maps=True)
    ours = RelaxedContrast(1.0, 1.0, 0.05, 0.7).loss(step, step.forward())
    maps = module.train().stages(x[0])
    assert len(maps) == 4
    before, after = (
        sum(relaxed(m.mean((2, 3)), y[0], 1.0, 1.0, 0.05, 0.7) for m in levels) / 4
        for levels in (maps, [F.relu(m) for m in maps])
    )
    torch.testing.assert_close(ours, before[None], rtol=1e-8, atol=1e-12)
    assert not torch.allclose(before, after, rtol=1e-2)


# --- MOON's projection head


def test_moon_contrasts_the_projected_vector_of_a_model_that_has_one():
    module = models.build("resnet56", (1, 8, 8), 4, {"projection": True}, seed=1)
    x, y = normal(1, 4, 1, 8, 8), torch.tensor([[0, 1, 2, 3]])
    step = step_of(module, x, y)
    first, _, second = module.projection
    pooled = F.relu(module.train().stages(x[0])[-1]).mean((2, 3))
    out = step.forward()
    torch.testing.assert_close(
        out.features[0], second(F.relu(first(pooled))), rtol=1e-8, atol=1e-10
    )
    step.local.state |= {
        "w_prev": step.w.clone(),
        **{f"prev.{n}": b.clone() for n, b in step.local.received_buffers.items()},
    }
    assert ModelContrast(1.0, 0.5).loss(step, out).item() == pytest.approx(math.log(2), rel=1e-10)
    step.local.state["w_prev"] = step.w + 0.01 * normal(*step.w.shape)
    assert ModelContrast(1.0, 0.5).loss(step, out).item() != pytest.approx(math.log(2), rel=1e-3)
