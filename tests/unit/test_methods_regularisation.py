"""Mixup, FedRCL and stochastic depth against their definitions, written out example by example."""

import math

import numpy as np
import pytest
import torch
from helpers import config
from torch.nn import functional as F

from fldiag import models
from fldiag.local import Local
from fldiag.models.network import Network
from fldiag.params import flatten
from fldiag.parts.augmentation import MixedExamples
from fldiag.parts.contrast import ModelContrast
from fldiag.parts.relaxation import RelaxedContrast
from fldiag.seeding import numpy_rng
from fldiag.step import Step

UNEQUAL = (20, 13, 7)
RESNET = {"model": "small_resnet", "model_options": {}}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step_of(module, x, y, weight=None, maps=False, ids=(0,)):
    """A local step of clients ``ids`` at the module's weights, on x [k, B, ...] and y [k, B]."""
    net = Network(module.double(), precision="fp64")
    k = len(ids)
    w = flatten(module).detach()
    counts = torch.ones(k, dtype=torch.long)
    local = Local(
        network=net,
        train=config().train,
        seed=5,
        t=3,
        lr=0.1,
        ids=list(ids),
        w_g=w,
        w=w.expand(k, -1).clone(),
        n=counts,
        steps=counts,
        state={},
        sent={},
        buffers={n: b[None].clone() for n, b in net.buffers.items()},
    )
    return Step(
        local,
        lambda s, out: s.mean(s.label_loss(out.logits)),
        x,
        y,
        weight,
        torch.zeros_like(y),
        maps,
    )


# --- Mixup


def mlp(features=6, classes=3):
    return models.build("mlp", (features,), classes, {"hidden": (5,)}, seed=2)


def naive_mixup(module, x, y, n, generator, g):
    """Loss of one client's minibatch, of which the first n examples are real, example by example."""
    a, pi = generator.beta(g, g), generator.permutation(n)
    total = 0.0
    for i in range(n):
        j = int(pi[i])
        logits = module((a * x[i] + (1 - a) * x[j])[None])
        total = (
            total
            + a * F.cross_entropy(logits, y[i : i + 1])
            + (1 - a) * F.cross_entropy(logits, y[j : j + 1])
        )
    return total / n


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
            module.zero_grad()
            loss = naive_mixup(module, x[k], y[k], n, generators[k], 0.7)
            loss.backward()
            assert float(values[k]) == pytest.approx(loss.item(), rel=1e-12)
            torch.testing.assert_close(
                g[k],
                torch.cat([p.grad.flatten() for p in module.parameters()]),
                rtol=1e-10,
                atol=1e-13,
            )


def test_the_share_has_the_moments_of_its_distribution():
    part, module = MixedExamples(0.1), mlp()
    first = step_of(module, normal(1, 2, 6), torch.tensor([[0, 1]]))
    part.begin(first.local)
    shares = []
    for _ in range(1500):
        first.x, first.y = normal(1, 2, 6), torch.tensor([[0, 1]])
        part.batch(first)
        shares.append(float(first.targets[0][1]))
        assert shares[-1] + float(first.targets[1][1]) == pytest.approx(1)
    assert np.mean(shares) == pytest.approx(0.5, abs=0.05)
    assert np.var(shares) == pytest.approx(1 / (4 * 1.2), abs=0.02)  # Beta(g, g): 1 / (4 (2 g + 1))


# --- FedRCL


def naive_rcl(z, y, attract, penalty, tau, threshold):
    """Mean over the anchors of one level's loss, from z [B, d]."""
    total = torch.zeros((), dtype=z.dtype)
    for i in range(len(z)):

        def s(j, i=i):
            return (
                torch.dot(z[i], z[j]) / (z[i].norm() * z[j].norm())
                if i != j
                else torch.ones((), dtype=z.dtype)
            )

        same = [s(j) for j in range(len(z)) if y[j] == y[i] and j != i]
        others = sorted((s(j) for j in range(len(z)) if y[j] != y[i]), key=torch.Tensor.item)[-2:]
        positive = min([*same, s(i)], key=torch.Tensor.item)
        e = torch.exp(positive / tau)
        total = total - attract * torch.log(e / (e + sum(torch.exp(o / tau) for o in others)))
        close = min(same, key=torch.Tensor.item, default=torch.tensor(-1.0, dtype=z.dtype))
        negative = close if close.item() >= threshold else torch.tensor(-1.0, dtype=z.dtype)
        e = math.exp(1 / tau)
        total = total - penalty * torch.log(e / (e + torch.exp(negative / tau)))
    return total / len(z)


def test_the_levels_of_a_residual_net_are_its_maps_before_relu():
    x, y = normal(1, 6, 1, 8, 8), torch.tensor([[0, 0, 1, 1, 2, 0]])
    module = models.build("small_resnet", (1, 8, 8), 4, seed=1)
    step = step_of(module, x, y, maps=True)
    ours = RelaxedContrast(1.0, 1.0, 0.05, 0.7).loss(step, step.forward())
    maps = module.train().stages(x[0])
    assert len(maps) == 4
    before, after = (
        sum(naive_rcl(m.mean((2, 3)), y[0], 1.0, 1.0, 0.05, 0.7) for m in levels) / 4
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
