"""The shared maths against torch and the definitions; one spelling for a vector and for a stack of rows."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fldiag import losses
from fldiag.params import Layout

RULES = ("layer", "tensor", "dim0")


def net():
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    module.gain = nn.ParameterDict({"t": nn.Parameter(torch.tensor(1.0))})  # a scalar parameter
    return Layout.of(module)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", [(6,), (2, 6), (3, 2, 6)])
def test_losses_of_examples_are_torchs(shape):
    outputs, y = normal(*shape, 4), torch.arange(6).expand(shape) % 4
    each = losses.per_example(outputs, y)
    assert each.shape == shape
    assert torch.allclose(
        each.mean(), F.cross_entropy(outputs.flatten(0, -2), y.flatten()), rtol=1e-14
    )
    assert losses.criterion(False) is F.cross_entropy
    target = normal(*shape, 4, seed=1)
    assert torch.allclose(
        losses.per_example(outputs, target),
        2 * F.mse_loss(outputs, target, reduction="none").mean(-1),
        rtol=1e-14,
    )
    half = losses.criterion(True)
    assert torch.equal(half(outputs, target), losses.per_example(outputs, target).mean())
    assert torch.equal(half(outputs, target, reduction="none"), losses.per_example(outputs, target))


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_the_divergence_and_its_gradient_are_torchs(tau):
    teacher, student = normal(5, 4), normal(5, 4, seed=1).requires_grad_()
    ours = losses.kl(teacher, student, tau)
    theirs = F.kl_div(
        F.log_softmax(student / tau, -1),
        F.log_softmax(teacher / tau, -1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    assert torch.allclose(ours, theirs, rtol=1e-12)
    (g,) = torch.autograd.grad(ours.sum(), student)
    assert torch.allclose(
        g, (F.softmax(student / tau, -1) - F.softmax(teacher / tau, -1)) / tau, atol=1e-15
    )
    assert not losses.kl(teacher, teacher, tau).any()


def test_the_gradient_of_l2_is_the_displacement():
    d = normal(3, 7).requires_grad_()
    assert torch.allclose(losses.l2(d), 0.5 * d.norm(dim=-1) ** 2)
    assert torch.equal(torch.autograd.grad(losses.l2(d).sum(), d)[0], d)


@pytest.mark.parametrize("rule", RULES)
def test_a_stack_is_its_rows(rule):
    layout = net()
    d, g = normal(3, layout.size), normal(3, layout.size, seed=1)
    Lambda = losses.strengths(d, layout, rule)
    e = losses.perturbation(g, 0.7, Lambda)
    means = losses.mean_strengths(Lambda, layout, rule)
    for k in range(3):
        alone = losses.strengths(d[k], layout, rule)
        assert torch.equal(alone, Lambda[k])
        assert torch.equal(losses.perturbation(g[k], 0.7, alone), e[k])
        for name, (mean, size) in losses.mean_strengths(alone, layout, rule).items():
            assert torch.equal(mean, means[name][0][k]) and size == means[name][1]


@pytest.mark.parametrize("rule", RULES)
def test_means_of_strengths_count_every_entry_once(rule):
    layout = net()
    Lambda = losses.strengths(normal(2, layout.size), layout, rule)
    means = losses.mean_strengths(Lambda, layout, rule).values()
    assert sum(size for _, size in means) == layout.size
    assert torch.allclose(sum(mean * size for mean, size in means), Lambda.sum(-1), rtol=1e-12)
    alike = losses.mean_strengths(losses.strengths(torch.full((layout.size,), 0.3), layout), layout)
    assert all(float(mean) * size**0.5 == pytest.approx(1) for mean, size in alike.values())


@pytest.mark.parametrize(("dtype", "floor"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_rounding_noise_does_not_perturb(dtype, floor):
    g = (
        F.normalize(normal(2, 9, dtype=dtype), dim=-1)
        * torch.tensor([[2.0], [0.5]], dtype=dtype)
        * floor
    )
    e = losses.perturbation(g, 1.5, floor=losses.noise_floor(dtype))
    assert float(e[0].norm()) == pytest.approx(
        1.5, rel=0.6
    )  # the guard 1e-12 is half of the norm in float64
    assert not e[1].any()
    assert losses.perturbation(g, 1.5)[1].any()
    assert losses.noise_floor(dtype) == floor


def test_the_length_of_the_perturbation():
    layout = net()
    g = 100 * normal(2, layout.size)
    assert losses.perturbation(g, 1.3).norm(dim=-1).tolist() == pytest.approx([1.3, 1.3], rel=1e-12)
    Lambda = losses.strengths(normal(2, layout.size, seed=1), layout)
    assert torch.equal(losses.perturbation(g, 1.3, Lambda), losses.perturbation(g, 1.3) * Lambda)
