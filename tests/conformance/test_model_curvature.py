"""What holds for the curvature of every registered model, at its real size."""

import math

import pytest
import torch
from helpers import HERE, inputs
from torch.nn import functional as F

from fldiag import models
from fldiag.curvature.piecewise_linear import obstacle
from fldiag.errors import FldiagError
from fldiag.problem.diagonal import diagonal_of
from fldiag.problem.problem import Problem

SHAPES = [(3, 32, 32), (3, 28, 28), (1, 8, 8), (6,)]


def problem(name):
    """One example in double precision; running statistics of batch-norm as after some training."""
    for shape in SHAPES:
        try:
            module = models.build(name, shape, 10, seed=0)
            break
        except FldiagError:
            continue
    g = torch.Generator().manual_seed(0)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=g))
    x = inputs(module, 1, *shape, generator=g)
    return Problem(module, F.cross_entropy, (x, torch.tensor([7])), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_products_are_finite_differences_of_the_gradient(name):
    p = problem(name)
    # few activations change sign over a short way, and each that does shows in one entry only
    v = torch.randn(
        p.layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ) / math.sqrt(p.layout.size)
    step = 1e-7
    difference = (p.gradient(p.w + step * v) - p.gradient(p.w - step * v)) / (2 * step)
    product = p.hessian()(v)
    assert torch.linalg.vector_norm(product - difference) <= 1e-4 * torch.linalg.vector_norm(
        difference
    )


@pytest.mark.parametrize("name", ["mlp", "small_cnn", "small_resnet", "lenet"])
def test_an_exact_diagonal_is_that_of_products_with_unit_vectors(name):
    p = problem(name)
    found = diagonal_of(p)
    d, h = found.values, p.hessian()
    assert found.estimator == "exact", found.why
    for at in [
        *torch.randint(p.layout.size, (4,), generator=torch.Generator().manual_seed(2)).tolist(),
        int(d.argmax()),
    ]:
        e = torch.zeros(p.layout.size, dtype=torch.float64)
        e[at] = 1.0
        assert float(h(e)[at]) == pytest.approx(
            float(d[at]), rel=1e-9, abs=1e-12 * float(d.abs().max())
        )


@pytest.mark.slow
def test_which_models_are_piecewise_linear_in_each_layers_weights():
    """Group norm and attention are not."""
    known = {n for n in HERE if obstacle(problem(n).module.eval()) is None}
    assert {
        "mlp",
        "small_cnn",
        "fedavg_cifar",
        "fedavg_mnist",
        "lenet",
        "vgg11",
        "resnet56",
        "resnet18_p3",
    } <= known
    assert not {"resnet18_gn", "sl_vit"} & known
