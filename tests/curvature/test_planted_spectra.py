"""Planted spectra: no multiple eigenvalue is overlooked, residuals and standard errors are true, directions are what they say."""

import numpy as np
import pandas as pd
import pytest
import reference
import torch
import torch.nn.functional as F
from cases import Case, N, features
from reference import check_pairs, check_residuals, of_case, problem, rows, spectrum, value
from torch import nn

import fldiag
from fldiag.curvature.lanczos import lanczos

SPECTRA = {
    "double": [5.0, 5.0, 3.0, 2.0, 2.0, 1.0] + [0.1] * 54,
    "triple and negative": [4.0, 4.0, 4.0, -3.0, 1.0] + [0.01] * 30 + [-0.5] * 25,
    "negative": [-1.0 - i for i in range(60)],
    "close": [1 + 1e-4 * i for i in range(8)] + [0.2] * 52,
    "powers": [10.0 ** (-i / 4) for i in range(60)],
    "flat top": [2.0] * 20 + [1.0] * 40,
    "one hidden": [1.0] * 59 + [1.5],
    "nearly a multiple of one": [1 + 3e-4 * i for i in range(60)],
    "equal within rounding": [1 + 4e-13 * (i / 30 - 1) for i in range(60)],
}


def planted(lam, seed):
    """The loss mean(y (w x)^2), y a sign, has the Hessian H = Q diag(lam) Q'; and H."""
    lam = torch.tensor(lam, dtype=torch.float64)
    n = len(lam)
    q = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed)).double()).Q
    data = (n * lam.abs() / 2).sqrt()[:, None] * q, lam.sign()[:, None]
    net = nn.Linear(n, 1, bias=False).double()
    p = fldiag.Problem(net, lambda z, y: (y * z.square()).mean(), data, dtype=lam.dtype)
    return p, q.T @ (lam[:, None] * q)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SPECTRA)
def test_the_largest_eigenvalues(name, seed):
    p, h = planted(SPECTRA[name], seed)
    check_pairs(spectrum(p, 5, seed=seed), h)


@pytest.mark.parametrize("which", ["smallest", "magnitude"])
@pytest.mark.parametrize("name", ["triple and negative", "negative", "one hidden"])
def test_the_other_ends(name, which):
    p, h = planted(SPECTRA[name], 0)
    check_pairs(spectrum(p, 3, which), h, which)


def test_the_smallest_converge_near_zero_where_no_relative_error_is_ever_reached():
    bulk = 1e-7 * torch.randn(280, generator=torch.Generator().manual_seed(0))
    p, h = planted([*bulk.tolist(), *np.linspace(0.5, 1, 20)], 0)
    check_pairs(spectrum(p, 2, "smallest", 1e-3, products=40), h, "smallest", tol=1e-3)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_as_many_products_as_weights_are_enough(size):
    p, h = planted([(i + 1.0) ** 2 for i in range(size)], 0)
    check_pairs(spectrum(p, 1, tol=1e-9, products=size), h, tol=1e-9)


@pytest.mark.parametrize("products", [2, 12])
def test_a_search_that_ends_too_early_says_so(products):
    p, h = planted(np.linspace(0, 1, 60).tolist(), 0)
    pairs = spectrum(p, 5, tol=1e-6, products=products)
    assert not pairs.converged and len(pairs.values) == min(5, products)
    check_residuals(pairs, h)


def test_the_error_of_a_ratio_is_of_first_order_in_those_of_its_eigenvalues():
    p, _ = planted(np.linspace(0.5, 3, 60).tolist(), 0)
    pairs = fldiag.diagnose(p, "spectrum", k=3, max_products=8)
    (top, *_, low), (ratio,) = (
        rows(pairs, metric)[["value", "residual"]].to_numpy(float)
        for metric in ("eigenvalue", "eigenvalue_ratio")
    )
    assert low[1] > 0.01 and ratio[0] == pytest.approx(top[0] / low[0])
    assert ratio[1] == pytest.approx((top[1] + ratio[0] * low[1]) / low[0])


def test_values_that_are_right_have_not_converged_before_the_search_for_others_is_over():
    lam = torch.cat([torch.tensor([10.0, 8.0]), torch.linspace(0, 1, 398)]).double()
    whole = lanczos(lambda v: lam * v, len(lam), 2)
    early = lanczos(lambda v: lam * v, len(lam), 2, max_products=whole.products - 1)
    assert whole.converged.all() and not early.converged.any()
    assert early.values == pytest.approx([10, 8], rel=1e-3)


def test_the_density_is_the_share_of_eigenvalues():
    """Within five standard deviations of what ``probes`` random vectors give."""
    shares, places, n, probes = np.array([0.1, 0.6, 0.3]), [1.0, 2.0, 4.0], 300, 4
    p, _ = planted(np.repeat(places, (n * shares).astype(int)).tolist(), 0)
    x, y = reference.density(p, probes)
    for share, place in zip(shares, places, strict=True):
        near = np.abs(x - place) < 0.4
        error = 5 * (2 * share * (1 - share) / n / probes) ** 0.5
        assert np.trapezoid(y[near], x[near]) == pytest.approx(share, abs=error)


def test_the_standard_errors_of_estimated_traces_are_those_of_their_errors():
    """Over seeds and layers, the mean square of the errors is that of the stated standard errors; of so few probes that it
    matters by what the scatter is divided."""
    torch.manual_seed(3)
    net = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(4, 4, bias=False), nn.Tanh())))
    case = Case("", lambda: net, F.mse_loss, lambda: (features(), features(8)[:, 4:]))
    p, ref = problem(case), of_case(case)
    ratios, true = [], ref.hessian.diagonal().view(6, -1).sum(1).tolist()
    tables = [rows(reference.layers(p, products=4, seed=seed), "trace") for seed in range(40)]
    layers = [name.removesuffix(".weight") for name in ref.names]
    for name, trace in zip([*layers, None], [*true, sum(true)], strict=True):
        layer = pd.concat([rows(t, "trace", layer=name) for t in tables])
        assert "exact" not in set(layer["estimator"])
        errors, stated = layer["value"].to_numpy(float) - trace, layer["stderr"].to_numpy(float)
        ratios.append(np.square(errors).mean() / np.square(stated).mean())
    *of_layers, of_whole = ratios
    assert 0.6 < np.mean(of_layers) < 1.6 and 0.5 < of_whole < 1.7


def test_random_directions_are_as_long_as_the_filters_and_leave_biases():
    """The loss of output j alone, of a linear map on unit inputs, is the squared length of row j of the direction; of inputs
    that are zero, it is that of the bias."""
    net = nn.Linear(4, 3).double()
    with torch.no_grad():
        net.weight *= torch.tensor([[1.0], [5.0], [20.0]])
    w = net.weight.detach()
    for j, scale in ((0, 1), (1, 1), (2, 1), (2, 0)):
        x = scale * torch.eye(4).double()
        p = fldiag.Problem(
            net,
            lambda z, y, j=j: (z - y)[:, j].square().mean(),
            (x, net(x).detach()),
            dtype=w.dtype,
        )
        points = reference.surface(p, "random")
        for axis in (points[points[:, 1] == 0], points[points[:, 0] == 0]):
            assert len(axis) >= 3
            length = scale * float(w[j].square().mean())
            true = np.square(axis[:, :2].sum(1)) * length
            np.testing.assert_allclose(axis[:, 2], true, rtol=1e-9, atol=1e-15)


def test_two_random_directions_are_not_one():
    net = nn.Linear(4, 3).double()
    x = features()
    p = fldiag.Problem(
        net, lambda z, y: (z - y).square().mean(), (x, net(x).detach()), dtype=x.dtype
    )
    points = {(x, y): loss for x, y, loss, _ in reference.surface(p, "random")}
    assert points[1, -1] > 1e-3 * points[1, 1] > 0
    assert value(reference.scores(p), "loss") == pytest.approx(0, abs=1e-15) and p.n == N
