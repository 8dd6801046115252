"""Gradients by hand are those of autograd, for one row and for several side by side."""

import pytest
import torch
from torch import nn

from fldiag import losses
from fldiag.models import kernels
from fldiag.models.layers import rules
from fldiag.models.network import BodyPass, Network
from fldiag.params import flatten

EPS = torch.finfo(torch.float64).eps


def mlp():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(72, 6),
        nn.ReLU(),
        nn.Linear(6, 5, bias=False),
        nn.ReLU(),
        nn.Linear(5, 3),
    )


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(2, 1)),
        nn.MaxPool2d(3, 1, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )


def as_large():
    """Convolutions whose outputs are as large as their inputs, of few channels and of more."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 4, (3, 1), padding=(1, 0)),
        nn.ReLU(),
        nn.Conv2d(4, 5, (5, 3), padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(45, 3),
    )


def unusual():
    """Groups, dilation, and a rectified head that also holds layers without weights."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2, bias=False),
        nn.ReLU(),
        nn.Conv2d(4, 3, 2, dilation=2),
        nn.AvgPool2d(2),
        nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(3, 3)),
    )


def affine():
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 3))


def case(build, rows):
    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = Network(build().double(), precision="fp64")
    w = flatten(net.module) + 0.1 * torch.randn(
        rows, net.size, generator=generator, dtype=torch.float64
    )
    x = torch.randn(rows, 7, 2, 6, 6, generator=generator, dtype=torch.float64)
    return net, w, x, torch.randint(0, 3, (rows, 7), generator=generator)


def term(logits, features, y):
    """Of logits and features, as distillation and contrast have it."""
    loss = losses.per_example(logits, y).mean(1)
    return loss if features is None else loss + features.flatten(2).square().mean((1, 2))


def by_autograd(net, w, x, y):
    leaf = w.clone().requires_grad_()
    bound = net.bind(leaf)
    features = bound.features(x) if net.has_split else None
    logits = bound(x) if features is None else bound.head(features)
    if features is not None and features.dim() == 4:  # models as channels side by side
        features = features.unflatten(1, (len(w), -1)).transpose(0, 1)
    values = term(logits, features, y)
    return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]


def near(found, expected, terms):
    assert (found - expected).abs().max() <= 10 * terms * EPS * expected.abs().max()


@pytest.mark.parametrize("most", [kernels.LARGEST_PATCHES, 0], ids=["patches", "one by one"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("build", [mlp, convolutions, as_large, unusual, affine])
def test_gradients(monkeypatch, build, rows, most):
    monkeypatch.setattr(kernels, "LARGEST_PATCHES", most)
    net, w, x, y = case(build, rows)
    values, g = by_autograd(net, w, x, y)
    for alone in {rows == 1, False}:
        out = BodyPass(net, w, x, alone).output()
        found = term(out.logits, out.features, y)
        near(found.detach(), values, 1000)
        near(out.gradient(found), g, 1000)


@pytest.mark.parametrize("rows", [1, 3])
def test_another_head_on_the_same_features(rows):
    net, w, x, y = case(convolutions, rows)
    moved = w.clone()
    moved[:, -net.layout.head_size :] *= 1.5
    run = BodyPass(net, w, x, rows == 1)
    for head, at in ((moved[:, -net.layout.head_size :], moved), (None, w)):  # in any order
        _, g = by_autograd(net, at, x, y)
        out = run.output(head)
        near(out.gradient(term(out.logits, out.features, y)), g, 1000)
        out = run.output(head)
        near(out.head_gradient(term(out.logits, None, y)), g[:, -net.layout.head_size :], 1000)


def test_values_that_depend_on_no_output_have_no_slope():
    net, w, x, _ = case(mlp, 2)
    out = BodyPass(net, w, x, False).output()
    assert not out.gradient(torch.zeros(2)).any()
    near(out.gradient(0.5 * out.leaf.square().sum(1)), w, 10)  # of the weights themselves


def test_the_slope_of_the_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    z = 10 * torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (2, 5), generator=generator)
    weight = torch.rand(2, 5, generator=generator, dtype=torch.float64)
    leaf = z.clone().requires_grad_()
    expected = losses.per_example(leaf, y)
    loss, slope = losses.cross_entropy_and_slope(z, y, weight)
    assert torch.equal(loss, expected.detach())
    assert torch.equal(slope, torch.autograd.grad((expected * weight).sum(), leaf)[0])


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(1, 4), nn.Linear(4, 3)),
    ],
)
def test_other_networks_keep_autograd(build):
    assert Network(build()).pieces is None


@pytest.mark.numeric
def test_large_linear_products_are_those_of_float64():
    """Sizes from which another library multiplies; operands as they lie and transposed."""
    generator = torch.Generator().manual_seed(0)
    a, weight = (torch.randn(n, 700, generator=generator) for n in (50, 300))
    bias, g = torch.randn(300, generator=generator), torch.randn(50, 300, generator=generator)
    assert min(len(a) * weight.numel(), len(g) * weight.numel()) >= kernels.LARGE_PRODUCT
    with torch.no_grad():
        sparse = bias.repeat_interleave(2)[::2]
        for left, right, added in (
            (a, weight, bias),
            (a, weight, sparse),
            (g, weight.T, None),
            (g.T, a.T, None),
        ):
            found = kernels.product(left, right, added)
            exact = left.double() @ right.double().T + (0 if added is None else added.double())
            bound = (
                torch.finfo(torch.float32).eps
                * (left.double().abs() @ right.double().abs().T + 1)
                * left.shape[1]
            )
            assert ((found.double() - exact).abs() <= bound).all()
            apart = [
                None if t is None else torch.stack([t, 2 * t, -t]) for t in (left, right, added)
            ]
            for one, scale in zip(
                kernels.products(*apart), (1, 2, -1), strict=True
            ):  # of several models
                assert torch.equal(
                    one,
                    kernels.product(
                        *(None if t is None else scale * t for t in (left, right, added))
                    ),
                )


def test_a_product_with_a_graph_is_differentiated():
    a, weight = torch.randn(50, 700), torch.randn(300, 700, requires_grad=True)
    kernels.product(a, weight).sum().backward()
    assert torch.allclose(weight.grad, a.sum(0).expand(300, -1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_images_lies_as_they_lie(form):
    layer = nn.Conv2d(3, 8, 3, padding=1)
    images = torch.randn(4, 3, 6, 6).to(memory_format=form)
    (link,) = rules(layer).links(layer, "", {})
    slope = torch.randn(4, 8, 6, 6).to(memory_format=form)
    found = link.back(slope, layer.weight.detach(), images)
    images.requires_grad_()
    (wanted,) = torch.autograd.grad(layer(images), images, slope)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert found.is_contiguous(memory_format=form)
