"""The spectral density: Gauss rules against exact moments, planted spectra, and its scatter over probes."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fldiag.curvature.lanczos import lanczos
from fldiag.diagnostics.density import density, quadrature
from fldiag.diagnostics.spectrum import spectrum
from fldiag.errors import FldiagError
from fldiag.problem import eigenpairs as module
from fldiag.problem.problem import Problem
from fldiag.results.table import check


def test_the_rule_integrates_polynomials_of_its_degree_exactly():
    g = torch.Generator().manual_seed(0)
    a = torch.randn(30, 30, dtype=torch.float64, generator=g)
    a = (a + a.T) / 10
    z = torch.randn(30, dtype=torch.float64, generator=g)
    nodes, weights = quadrature(lambda v: a @ v, z, 6, 1e-12)
    assert len(nodes) == 6 and weights.sum() == pytest.approx(1) and (weights > 0).all()
    v = z.clone()
    for degree in range(12):
        assert weights @ nodes**degree == pytest.approx(float(z @ v / (z @ z)), rel=1e-8)
        v = a @ v
    # degree 12 is beyond it
    assert weights @ nodes**12 != pytest.approx(float(z @ v / (z @ z)), rel=1e-8)


class Weights(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, size))

    def forward(self, x):
        return self.w.expand(len(x), -1)


def planted(values):
    d = torch.as_tensor(values, dtype=torch.float64)
    return Problem(
        Weights(len(d)),
        lambda z, y: 0.5 * (z.square() @ d.to(z)).mean(),
        (torch.zeros(2, 1), torch.zeros(2)),
        dtype=torch.float64,
    )


def test_a_planted_spectrum_is_recovered():
    values = np.concatenate([[30, 22, 15], np.full(300, -1.0), np.full(700, 2.0)])
    frame = check(density(planted(values), k=3, steps=10, smoothing=0.3, probes=6, points=2001))
    curve = frame[frame.metric == "density"]
    x, value = curve.x.to_numpy(), curve.value.to_numpy(dtype=float)
    assert np.trapezoid(value, x) == pytest.approx(1, abs=1e-6)
    expected = np.exp(-0.5 * ((x[:, None] - values) / 0.3) ** 2).sum(1) / (
        len(values) * 0.3 * np.sqrt(2 * np.pi)
    )
    error = curve.stderr.to_numpy(dtype=float)
    assert (np.abs(value - expected) <= 6 * error + 1e-9).all()
    assert np.abs(value - expected).max() < 0.1 * expected.max()
    beyond = x > 10  # the outliers are put back exactly: no scatter there
    assert (
        value[beyond] == pytest.approx(expected[beyond], rel=1e-6, abs=1e-12)
        and error[beyond].max() < 1e-9
    )
    assert frame[frame.metric == "eigenvalue"].value.tolist() == pytest.approx([30, 22, 15])


def test_more_probes_scatter_less():
    values = np.concatenate([[30], np.linspace(-1, 3, 60)])
    few, many = (density(planted(values), k=1, steps=20, smoothing=0.4, probes=n) for n in (4, 64))
    assert float(many.stderr.max()) < 0.5 * float(few.stderr.max())
    alone = density(planted(values), k=1, steps=5, probes=1)
    assert alone[alone.metric == "density"].stderr.isna().all()


def net():
    torch.manual_seed(0)
    return Problem(
        nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)),
        cross_entropy,
        (torch.randn(30, 5), torch.arange(30) % 3),
        dtype=torch.float64,
    )


@pytest.mark.slow
def test_the_mean_of_the_density_is_the_trace_of_a_network():
    p = net()
    x, y = p.read(0, 30)
    values = torch.linalg.eigvalsh(
        torch.func.hessian(lambda w: cross_entropy(p.call(w, x), y))(p.w)
    )
    curve = density(p, probes=100, steps=25, points=2001).query("metric == 'density'")
    grid, value = curve.x.to_numpy(), curve.value.to_numpy(dtype=float)
    assert np.trapezoid(value * grid, grid) == pytest.approx(
        float(values.mean()), abs=0.1 * float(values.std())
    )


def test_the_pairs_of_a_strict_spectrum_are_reused_and_none_are_needed(monkeypatch):
    p, calls = net(), []
    monkeypatch.setattr(module, "lanczos", lambda *a, **o: calls.append(o) or lanczos(*a, **o))
    before = spectrum(p, k=4, strict=True)
    reused = density(p, k=4, probes=2)
    assert len(calls) == 1 and calls[0]["strict"]
    assert (
        reused[reused.metric == "eigenvalue"].value.tolist()
        == before[before.metric == "eigenvalue"].value.tolist()
    )
    alone = density(net(), k=4, probes=2)
    assert (
        len(calls) == 2 and alone.value.tolist() == reused.value.tolist()
    )  # the order of asking changes nothing
    plain = density(p, k=0, probes=2)
    assert (plain.metric == "density").sum() == 501 and "eigenvalue" not in set(plain.metric)


@pytest.mark.parametrize("width", [3e-4, 1e-2, 1.0, None])
def test_the_grid_resolves_every_width(width):
    curve = density(net(), steps=8, probes=1, smoothing=width, points=11).query(
        "metric == 'density'"
    )
    assert np.trapezoid(curve.value.to_numpy(dtype=float), curve.x.to_numpy()) == pytest.approx(
        1, abs=1e-3
    )


def test_a_width_that_no_grid_resolves_is_refused_with_one_that_does():
    with pytest.raises(FldiagError, match="smoothing = 1e-09 is too narrow") as caught:
        density(net(), k=1, steps=4, probes=1, smoothing=1e-9)
    enough = float(caught.value.remedy.rpartition(" ")[2])
    assert len(density(net(), k=1, steps=4, probes=1, smoothing=enough)) > 50_000


def test_vectors_beyond_the_memory_are_refused_before_any_work():
    big, calls = nn.Linear(400, 400), []
    p = Problem(
        big,
        lambda z, y: calls.append(1) or z.square().mean(),
        (torch.randn(5, 400), torch.zeros(5)),
        memory=40 * 2**20,
    )
    with pytest.raises(
        FldiagError,
        match=r"30 steps of the density keep 30 vectors of 1\.2 MiB.*of the 40 MiB.*allow 74 MiB",
    ):
        density(p)
    assert not calls
    assert len(density(p, k=0, steps=16, probes=1)) > 500  # 16 of them fit half of it
    with pytest.raises(FldiagError, match="take steps = 16"):
        density(p, k=0, steps=17)


def test_all_eigenvalues_known_leaves_nothing_to_sample():
    frame = density(planted([3.0, 1.0, -1.0]), k=3, points=301)
    curve = frame[frame.metric == "density"]
    assert (curve.stderr == 0).all() and curve.x.min() < -1 < 3 < curve.x.max()
    assert np.trapezoid(curve.value.to_numpy(dtype=float), curve.x.to_numpy()) == pytest.approx(
        1, abs=1e-5
    )
