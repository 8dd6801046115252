"""Curvature of a small network against curvlinops, which multiplies by forward over reverse."""

import numpy as np
import pytest
import torch
from curvlinops import HessianLinearOperator, hutchinson_diag, hutchinson_trace
from scipy.sparse.linalg import eigsh
from sklearn.datasets import load_iris
from torch import nn
from torch.nn.functional import cross_entropy

from fldiag.problem.hessian import diagonal, eigenpairs
from fldiag.problem.problem import Problem


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=["float32", "float64"])
def pair(request):
    """Our problem and their operator, which go different ways: batches of unequal size there."""
    iris, dtype = load_iris(), request.param
    x = torch.tensor((iris.data - iris.data.mean(0)) / iris.data.std(0), dtype=dtype)
    y = torch.tensor(iris.target)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    ).to(dtype)
    optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(60):
        optimiser.zero_grad()
        cross_entropy(net(x), y).backward()
        optimiser.step()
    batches = list(zip(x.split(64), y.split(64), strict=True))
    theirs = HessianLinearOperator(
        net.eval(), nn.CrossEntropyLoss(), list(net.parameters()), batches
    )
    return Problem(net, cross_entropy, (x, y), dtype=dtype), theirs


def tight(problem, single, double):
    return single if problem.dtype == torch.float32 else double


def test_products_and_dense_matrix(pair):
    p, theirs = pair
    dense = (theirs @ torch.eye(p.layout.size, dtype=p.dtype)).double()
    ours = torch.stack([p.hessian()(e) for e in torch.eye(p.layout.size)])
    assert torch.allclose(
        ours, dense, rtol=0, atol=tight(p, 1e-6, 1e-12) * float(dense.abs().max()) * 10
    )
    assert float(dense.abs().max()) > 0.1


@pytest.mark.parametrize(
    "which, theirs_which", [("largest", "LA"), ("smallest", "SA"), ("magnitude", "LM")]
)
@pytest.mark.slow
def test_eigenvalues(pair, which, theirs_which):
    p, theirs = pair
    values = eigsh(
        theirs.to_scipy(),
        k=5,
        which=theirs_which,
        tol=1e-6,
        v0=np.ones(p.layout.size),
        return_eigenvectors=False,
    )
    values = np.sort(values)[:: 1 if which == "smallest" else -1]
    found = eigenpairs(p, 5, which=which, tol=1e-6, max_products=300)
    order = np.argsort(found.values if which == "smallest" else -found.values)
    assert found.values[order] == pytest.approx(values, abs=1e-5 * abs(values).max())


def test_exact_trace_and_diagonal(pair):
    p, theirs = pair
    columns = (theirs @ torch.eye(p.layout.size, dtype=p.dtype)).double().diagonal()
    d = diagonal(p)
    assert d.is_exact()
    assert torch.allclose(
        d.vectors()[0], columns, rtol=0, atol=tight(p, 1e-5, 1e-12) * float(columns.max())
    )
    assert d.trace()[0] == pytest.approx(float(columns.sum()), rel=tight(p, 1e-5, 1e-12))


@pytest.mark.slow
def test_their_random_estimates_scatter_around_ours(pair):
    p, theirs = pair
    d = diagonal(p)
    torch.manual_seed(5)
    samples = np.array([float(hutchinson_trace(theirs, 1)) for _ in range(40)])
    assert abs(samples.mean() - d.trace()[0]) <= 4 * samples.std(ddof=1) / np.sqrt(len(samples))
    draws = torch.stack([hutchinson_diag(theirs, 1) for _ in range(40)]).double()
    spread = draws.std(0) / len(draws) ** 0.5
    assert (
        float(((draws.mean(0) - d.vectors()[0]).abs() > 4 * spread + 1e-6).double().mean()) < 0.02
    )
