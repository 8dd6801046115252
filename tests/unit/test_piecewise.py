"""Where the Hessian is the Gauss-Newton matrix within a layer: who is recognised, and what spectra make of it."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fldiag.diagnostics.spectrum import spectrum
from fldiag.models.layers import LAYERS
from fldiag.models.layers.linear import LINEAR
from fldiag.problem.diagonal import diagonal_of
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.problem.exact_curvature import inexact, within_a_layer
from fldiag.problem.problem import Problem
from fldiag.results.table import check


def problem(bend=nn.ReLU, scale=1.0, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), bend(), nn.Flatten(), nn.Linear(12, 5), bend(), nn.Linear(5, 3))
    nn.init.normal_(net[1].running_mean), nn.init.uniform_(net[1].running_var, 0.5, 2)
    data = torch.randn(20, 1, 4, 4), torch.arange(20) % 3
    return Problem(net, lambda z, y: scale * F.cross_entropy(z, y), data, **options)


def dense(p):
    x, y = p.read(0, p.n)
    return torch.func.jacrev(torch.func.jacrev(lambda w: p.criterion(p.call(w, x), y)))(p.w)


def eigenvalues(frame):
    return frame[frame.metric == "eigenvalue"].reset_index(drop=True)


@pytest.mark.parametrize("which", ["largest", "smallest"])
def test_blocks_of_layers_are_those_of_the_dense_hessian_and_said_to_be_gauss_newton(which):
    p = problem(dtype=torch.float64)
    h, slices = dense(p), p.layout.slices()
    found = eigenvalues(check(spectrum(p, k=2, tol=1e-9, which=which, per_layer=True)))
    assert found[found.layer.isna()].estimator.tolist() == ["lanczos"] * 2 and set(found.matrix) == {"hessian"}
    end = -1 if which == "largest" else 0
    for layer, names in p.layout.layers.items():
        index = torch.cat([torch.arange(slices[n].start, slices[n].stop) for n in names])
        row = found[(found.layer == layer).fillna(False)].iloc[0]
        assert row.estimator == "lanczos-ggn"
        assert row.value == pytest.approx(float(torch.linalg.eigvalsh(h[index][:, index])[end]), rel=1e-8, abs=1e-12)
    for params, estimator in (("4.weight", "lanczos-ggn"), ("4.*", "lanczos-ggn"), ("[04].weight", "lanczos"), ("*", "lanczos")):
        frame = eigenvalues(spectrum(p, k=2, tol=1e-9, which=which, params=params))
        assert set(frame.estimator) == {estimator}, params


def test_a_layers_block_of_the_whole_hessian_is_not_its_gauss_newton_block_where_the_net_bends():
    p = problem(nn.Tanh, dtype=torch.float64)
    h, where = dense(p), p.layout.slices()["4.weight"]
    frame = eigenvalues(spectrum(p, k=2, tol=1e-9, params="4.weight", which="smallest"))
    assert set(frame.estimator) == {"lanczos"} and frame.value[0] < 0
    assert frame.value.tolist() == pytest.approx(torch.linalg.eigvalsh(h[where, where])[:2].tolist(), rel=1e-8)
    assert not within_a_layer(p, ["4.weight"]) and within_a_layer(problem(), ["4.weight", "4.bias"])
    assert not within_a_layer(problem(), ["4.weight", "6.bias"])


def test_in_single_precision_no_layer_has_negative_curvature_beyond_rounding():
    p = problem()
    for label, names in p.layout.layers.items():
        lowest, top = (eigenpairs(p, 1, which=end, params=list(names)).values[0] for end in ("smallest", "largest"))
        assert lowest >= -1e-7 * top, label


# -- the comparison with products has no unit

@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-8, 1e-20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_rule_is_found_out_however_small_the_loss(scale, dtype, monkeypatch):
    assert inexact(problem(scale=scale, dtype=dtype)) is None
    right = diagonal_of(problem(dtype=dtype)).trace
    assert diagonal_of(problem(scale=scale, dtype=dtype)).trace == pytest.approx(scale * right, rel=1e-5)
    monkeypatch.setitem(LAYERS, nn.Linear, dataclasses.replace(LINEAR, squares=lambda m, a, g, total: {
        k: 1.01 * v for k, v in LINEAR.squares(m, a, g, total).items()}))
    assert "disagrees with a Hessian-vector product" in inexact(problem(scale=scale, dtype=dtype))


def test_an_input_changed_in_place_is_a_reason_to_estimate():
    class Spoils(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            a = self.a(x)
            with torch.no_grad():  # nothing of b's derivative is needed, so products exist
                b = self.b(a)
            return self.c(b + a.relu_())

    torch.manual_seed(0)
    p = Problem(Spoils(), F.cross_entropy, (torch.randn(9, 4), torch.arange(9) % 3), dtype=torch.float64)
    d = diagonal_of(p, max_products=400, deflate=60)
    assert d.estimator == "hutchinson-deflated" and "changes the input of a layer in place" in d.why
    assert d.trace == pytest.approx(float(dense(p).trace()), rel=1e-6)
