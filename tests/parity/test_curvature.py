"""Curvature against independent engines: scipy's eigsh in float64 and PyHessian where it is right."""

import numpy as np
import pyhessian
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from fldiag.problem.hessian import diagonal, eigenpairs
from fldiag.problem.problem import Problem


@pytest.fixture(scope="module")
def trained():
    digits = load_digits()
    x, y = (
        torch.tensor(digits.images[:600] / 16, dtype=torch.float32)[:, None],
        torch.tensor(digits.target[:600]),
    )
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 10),
    )
    optimiser = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    for epoch in range(8):
        order = torch.randperm(600, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(50):
            optimiser.zero_grad()
            cross_entropy(net(x[batch]), y[batch]).backward()
            optimiser.step()
    return net.eval(), (x, y)


@pytest.mark.parametrize(
    "which, scipy_which", [("largest", "LA"), ("smallest", "SA"), ("magnitude", "LM")]
)
@pytest.mark.slow
def test_eigsh_in_double_precision(trained, which, scipy_which):
    net, given = trained
    p = Problem(net, cross_entropy, given, dtype=torch.float64)
    h, size = p.hessian(), p.layout.size
    operator = LinearOperator(
        (size, size), lambda v: h(torch.from_numpy(v.reshape(-1))).numpy(), dtype=np.float64
    )
    values = eigsh(operator, k=5, which=scipy_which, tol=1e-8, ncv=40, return_eigenvectors=False)
    values = values[np.argsort({"LA": -values, "SA": values, "LM": -abs(values)}[scipy_which])]
    assert eigenpairs(p, 5, which=which, tol=1e-8).values == pytest.approx(values, rel=1e-7)
    single = eigenpairs(Problem(net, cross_entropy, given), 5, which=which)
    assert single.converged.all() and single.values == pytest.approx(values, rel=1e-3)
    assert (np.abs(single.values - values) <= single.residuals + 1e-5 * abs(values[0])).all()


def test_top_five_of_a_trained_network_take_few_products(trained):
    net, given = trained
    counts = [eigenpairs(Problem(net, cross_entropy, given), 5, seed=s).products for s in range(5)]
    assert max(counts) <= 24 and np.mean(counts) <= 20


def test_pyhessian_products_eigenvalue_and_trace_samples(trained):
    net, (x, y) = trained
    p = Problem(net, cross_entropy, (x, y))
    engine = pyhessian.hessian(net, nn.CrossEntropyLoss(), data=(x, y), cuda=False)
    torch.manual_seed(1)
    for w in net.parameters():
        w.grad = None  # the engine left its own there
    v = [torch.randn_like(w) for w in net.parameters()]
    theirs = pyhessian.utils.hessian_vector_product(engine.gradsH, engine.params, v)
    flat = torch.cat([t.reshape(-1) for t in theirs])
    ours = p.hvp(torch.cat([t.reshape(-1) for t in v])).float()
    assert torch.allclose(ours, flat, rtol=1e-3, atol=1e-5 * float(flat.abs().max()))
    # the first eigenvalue only: the engine's stopping rule leaves later ones off where they lie close
    top, _ = engine.eigenvalues(maxIter=300, tol=1e-6, top_n=1)
    assert eigenpairs(p, 1).values[0] == pytest.approx(top[0], rel=2e-3)


@pytest.mark.slow
def test_exact_trace_and_diagonal_within_the_scatter_of_pyhessian(trained):
    net, (x, y) = trained
    ours = diagonal(Problem(net, cross_entropy, (x, y)))
    double = diagonal(Problem(net, cross_entropy, (x, y), dtype=torch.float64))
    assert ours.is_exact() and ours.trace()[0] == pytest.approx(double.trace()[0], rel=1e-5)
    values = double.vectors()[0]
    assert torch.allclose(ours.vectors()[0], values, rtol=1e-3, atol=1e-5 * float(values.max()))
    engine = pyhessian.hessian(net, nn.CrossEntropyLoss(), data=(x, y), cuda=False)
    torch.manual_seed(3)
    samples = np.array(engine.trace(maxIter=60, tol=0.0))
    assert abs(samples.mean() - ours.trace()[0]) <= 4 * samples.std() / np.sqrt(len(samples))


def test_the_diagonal_is_that_of_unit_vectors(trained):
    net, given = trained
    p = Problem(net, cross_entropy, given, dtype=torch.float64)
    values, h = diagonal(p).vectors()[0], p.hessian()
    for at in np.linspace(0, p.layout.size - 1, 12).astype(int):
        e = torch.zeros_like(p.w)
        e[at] = 1.0
        assert float(values[at]) == pytest.approx(float(h(e)[at]), rel=1e-9, abs=1e-12)
