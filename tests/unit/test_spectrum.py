"""The spectrum diagnostic: closed forms, dense Hessians of small nets, and an honest table."""

from fnmatch import fnmatch
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag
from fldiag.curvature.lanczos import lanczos
from fldiag.diagnostics.spectrum import spectrum
from fldiag.diagnostics.spectrum.picture import vectors_if_any
from fldiag.errors import FldiagError
from fldiag.execution import Workspace
from fldiag.problem import eigenpairs as module
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.problem.problem import Problem
from fldiag.results.table import check


class Weights(nn.Module):
    """Hands the weights themselves to the loss, once an example."""

    def __init__(self, size):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, size))

    def forward(self, x):
        return self.w.expand(len(x), -1)


def quadratic(eigenvalues, n=3, **options):
    """L(w) = 1/2 w^T A w with these eigenvalues of A."""
    size = len(eigenvalues)
    q, _ = np.linalg.qr(np.random.default_rng(4).standard_normal((size, size)))
    a = torch.from_numpy(q @ np.diag(np.asarray(eigenvalues, dtype=float)) @ q.T)
    options.setdefault("dtype", torch.float64)

    def loss(z, y):
        return 0.5 * ((z @ a.to(z)) * z).sum(1).mean()

    return Problem(Weights(size), loss, (torch.zeros(n, 1), torch.zeros(n)), **options), a


def rows(frame, metric):
    return frame[frame.metric == metric].reset_index(drop=True)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 2e-6)])
@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
@pytest.mark.parametrize(
    "values", [[9, 4, 4, 1, 0.5, 0.1, 0, -6], [0.0] * 5, [-1, -2, -2]], ids=str
)
def test_T_H_1_closed_form_of_a_quadratic(values, which, dtype, tolerance):
    p, a = quadratic(values, dtype=dtype)
    frame = check(spectrum(p, k=10, which=which))
    found = rows(frame, "eigenvalue")
    key = {"largest": lambda v: -v, "smallest": lambda v: v, "magnitude": lambda v: (-abs(v), -v)}[
        which
    ]
    assert found.value.tolist() == pytest.approx(sorted(values, key=key), abs=10 * tolerance)
    assert found["index"].tolist() == list(range(1, len(values) + 1))
    assert found.converged.all() and (found.residual <= 100 * tolerance).all()
    w = p.w.double()
    assert rows(frame, "loss").value[0] == pytest.approx(float(0.5 * w @ a @ w), abs=10 * tolerance)
    assert rows(frame, "loss").stderr[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("k, index, ratio", [(3, 3, 8 / 4), (5, 5, 8 / 2), (7, 5, 8 / 2)])
def test_ratio_to_the_fifth_or_the_last_eigenvalue(k, index, ratio):
    p, _ = quadratic([8, 6, 4, 3, 2, 1, 0.5])
    row = rows(spectrum(p, k=k), "eigenvalue_ratio")
    assert (row["index"].tolist(), row.value.tolist()) == (
        [index],
        [pytest.approx(ratio, rel=1e-6)],
    )
    assert bool(row.converged[0])


def test_one_eigenvalue_has_no_ratio():
    assert rows(spectrum(quadratic([8, 6, 4])[0], k=1), "eigenvalue_ratio").empty


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_eigenvalue_has_no_ratio_rather_than_a_wrong_one(dtype):
    for values in ([3, 0, 0], [0, 0, 0]):
        row = rows(spectrum(quadratic(values, dtype=dtype)[0], k=2), "eigenvalue_ratio")
        assert pd.isna(row.value[0]) and pd.isna(row.residual[0])
    small = rows(
        spectrum(quadratic([3, 3e-4, 0], dtype=dtype)[0], k=2, tol=1e-6), "eigenvalue_ratio"
    )
    assert small.value[0] == pytest.approx(1e4, rel=1e-2)


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
@pytest.mark.parametrize("matrix", ["hessian", "ggn"])
def test_the_table_says_which_end_of_which_matrix(which, matrix):
    p, _ = quadratic([8, 6, 4, 3, 2, -1])
    frame = check(spectrum(p, k=2, which=which, matrix=matrix))
    assert set(rows(frame, "eigenvalue").which) == {which} and set(
        rows(frame, "eigenvalue").matrix
    ) == {matrix}
    ratio = rows(frame, "eigenvalue_ratio")  # of the smallest ones it would be no condition number
    assert ratio.which.tolist() == ([] if which == "smallest" else [which])


def net(seed=0):
    torch.manual_seed(seed)
    x = torch.randn(40, 1, 6, 6)
    y = (x.mean((1, 2, 3)) > 0).long() + (x[:, 0, 0, 0] > 0.5).long()
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
    )
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(60):
        optimiser.zero_grad()
        cross_entropy(model(x), y).backward()
        optimiser.step()
    return model, (x, y)


@pytest.mark.parametrize("seed", range(3))
def test_T_H_2_eigenpairs_of_a_trained_net_are_those_of_its_dense_hessian(seed):
    model, given = net(seed)
    p = Problem(model, cross_entropy, given)
    q = Problem(model, cross_entropy, given, dtype=torch.float64)
    x, y = q.read(0, q.n)
    dense = torch.func.hessian(lambda w: cross_entropy(q.call(w, x), y))(q.w)
    values, vectors = torch.linalg.eigh(dense)
    top = values.flip(0)[:5].numpy()
    found = eigenpairs(p, 5)
    assert found.converged.all() and found.values == pytest.approx(top, rel=1e-3)
    assert (np.abs(found.values - top) <= found.residuals + 1e-5 * top[0]).all()
    assert found.products <= 40
    exact = eigenpairs(q, 5, tol=1e-10)
    assert exact.values == pytest.approx(top, rel=1e-9)
    cosines = (exact.vectors * vectors.flip(1).T[:5]).sum(1).abs()
    assert torch.allclose(cosines, torch.ones(5).double(), atol=1e-3)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_table_and_memory_does_not_matter():
    model, given = net()
    a, b, c = (
        spectrum(Problem(model, cross_entropy, given, name="run", memory=m), k=3)
        for m in (2**31, 2**31, 1)
    )
    pd.testing.assert_frame_equal(a, b, check_exact=True)
    assert rows(a, "eigenvalue").value.tolist() == pytest.approx(
        rows(c, "eigenvalue").value.tolist(), rel=1e-4
    )


def test_the_table_says_what_its_numbers_are():
    model, given = net()
    labels = {"method": "fedavg", "round": 3, "moment": "aggregated", "scope": "global"}
    frame = check(spectrum(Problem(model, cross_entropy, given, name="ckpt", labels=labels), k=2))
    assert frame.metric.tolist() == [
        "loss",
        "accuracy",
        "eigenvalue",
        "eigenvalue",
        "eigenvalue_ratio",
    ]
    assert (
        set(frame.run) == {"ckpt"}
        and set(frame.slice) == {"data"}
        and set(frame.n_examples) == {40}
    )
    assert set(frame.method) == {"fedavg"} and set(frame["round"]) == {3}
    assert frame.estimator.tolist() == ["exact", "exact", "lanczos", "lanczos", "lanczos"]


def test_a_spent_budget_is_admitted_in_the_table():
    model, given = net()
    frame = spectrum(Problem(model, cross_entropy, given), k=5, max_products=6)
    assert (
        not rows(frame, "eigenvalue").converged.all()
        and not rows(frame, "eigenvalue_ratio").converged[0]
    )
    assert rows(frame, "eigenvalue").residual.max() > 1e-3


def test_a_loss_that_is_infinite_beyond_the_probed_examples_is_refused():
    x, y = torch.ones(100, 2), torch.zeros(100, dtype=torch.int64)
    x[20] = 3e38  # not among the probe's 32 examples
    with pytest.raises(FldiagError, match=r"loss on slice 'data' is (nan|inf)"):
        spectrum(Problem(nn.Linear(2, 2), lambda z, y: z.square().sum(1).mean(), (x, y)))


# -- blocks and the Gauss-Newton matrix


def matrices(model, given):
    q = Problem(model, cross_entropy, given, dtype=torch.float64)
    x, y = q.read(0, q.n)
    h = torch.func.hessian(lambda w: cross_entropy(q.call(w, x), y))(q.w)
    j = torch.func.jacrev(lambda w: q.call(w, x).reshape(-1))(q.w)
    z = q.call(q.w, x)
    inner = torch.func.hessian(lambda z: cross_entropy(z.reshape(len(y), -1), y))(z.reshape(-1))
    return q, h, j.T @ inner @ j


def leading(matrix, k):
    return torch.linalg.eigvalsh(matrix).flip(0)[:k].tolist()


@pytest.mark.parametrize("which", ["hessian", "ggn"])
def test_blocks_by_pattern_and_by_layer_are_those_of_the_dense_matrix(which):
    q, h, g = matrices(*net())
    m = h if which == "hessian" else g
    slices = q.layout.slices()
    frame = check(spectrum(q, k=4, tol=1e-9, matrix=which, per_layer=True))
    found = rows(frame, "eigenvalue")
    assert found[found.layer.isna()].value.tolist() == pytest.approx(leading(m, 4), rel=1e-8)
    for layer, names in q.layout.layers.items():
        index = torch.cat([torch.arange(slices[n].start, slices[n].stop) for n in names])
        mine = found[(found.layer == layer).fillna(False)]
        assert (
            mine.value.tolist() == pytest.approx(leading(m[index][:, index], 1), rel=1e-8)
            and mine.converged.all()
        )
    block = slices["4.weight"]
    frame = spectrum(q, k=3, tol=1e-9, matrix=which, params="4.w*")
    assert rows(frame, "eigenvalue").value.tolist() == pytest.approx(
        leading(m[block, block], 3), rel=1e-8
    )
    assert set(rows(frame, "eigenvalue").layer) == {"4.w*"}
    pairs = eigenpairs(q, 2, tol=1e-9, matrix=which, params=["4.weight", "0.bias"])
    assert pairs.vectors.shape == (
        2,
        q.layout.size
        - sum(
            slices[n].stop - slices[n].start
            for n in q.layout.names
            if n not in ("4.weight", "0.bias")
        ),
    )


def test_a_pattern_that_matches_nothing_is_refused():
    model, given = net()
    with pytest.raises(
        FldiagError, match=r"params = '4\.wieght' matches no parameter; did you mean '4\.weight'"
    ):
        spectrum(Problem(model, cross_entropy, given), params="4.wieght")


def test_many_eigenvalues_with_a_small_memory_restart_and_stay_right(monkeypatch):
    limits = []
    monkeypatch.setattr(
        module,
        "lanczos",
        lambda *a, limit, **o: limits.append(limit) or lanczos(*a, limit=limit, **o),
    )
    q, h, _ = matrices(*net())
    q.memory = 4 * 8 * q.layout.size * 30  # thirty vectors of the basis
    found = eigenpairs(q, 20, tol=1e-8, max_products=600, which="magnitude")
    values = torch.linalg.eigvalsh(h)
    expected = values[values.abs().argsort(descending=True)][:20].tolist()
    assert (
        limits == [30]
        and found.converged.all()
        and found.values == pytest.approx(expected, rel=1e-7)
    )


def test_progress_over_the_layers_ends_at_its_total():
    model, given, seen = *net(), []
    with Workspace(progress=lambda *a: seen.append(a)):
        spectrum(Problem(model, cross_entropy, given), k=2, per_layer=True)
    assert (
        all(b[0] >= a[0] for a, b in pairwise(seen)) and len({total for _, total, _ in seen}) == 1
    )
    assert seen[-1][2].startswith("eigenvalues, layer 4")


def test_dense_matrices_are_those_of_autograd():
    q, expected, gauss_newton = matrices(*net())
    slices = q.layout.slices()
    assert torch.allclose(q.dense(), expected, atol=1e-10 * float(expected.abs().max()))
    assert torch.allclose(q.dense(matrix="ggn"), gauss_newton, atol=1e-10)
    block = slice(slices["4.weight"].start, slices["4.bias"].stop)
    for layers in ("4", "4.*", ["4"], ["4.weight", "4.bias"]):
        assert torch.allclose(q.dense(layers), expected[block, block], atol=1e-10)
    with pytest.raises(FldiagError, match=r"layers = .* matches no parameter"):
        q.dense("5")
    q.memory = 100
    with pytest.raises(FldiagError, match="choose fewer layers"):
        q.dense()


# -- eigenvectors as output


@pytest.mark.parametrize("options", [{}, {"params": "4.*"}], ids=str)
def test_saved_vectors_are_the_dense_matrix_s(options):
    model, data = net()
    q = Problem(model, cross_entropy, data, dtype=torch.float64)
    table = fldiag.diagnose(q, "spectrum", k=3, save_vectors=True, **options)
    tensors = load(vectors_if_any(table))
    names = [n for n in q.layout.names if fnmatch(n, options.get("params", "*"))]
    assert sorted(tensors) == sorted(names) and "vector" not in table.columns
    shapes = dict(zip(q.layout.names, q.layout.shapes, strict=True))
    assert all(tensors[n].shape == (3, *shapes[n]) for n in names)
    flat = torch.cat([tensors[n].reshape(3, -1) for n in names], dim=1)
    values = torch.tensor(rows(table, "eigenvalue").value.tolist(), dtype=torch.float64)
    residuals = (flat @ q.dense(names) - values[:, None] * flat).norm(dim=1)
    stated = rows(table, "eigenvalue").residual.tolist()
    assert residuals.tolist() == pytest.approx(stated, rel=1e-6, abs=1e-10)
    assert torch.allclose(flat @ flat.T, torch.eye(3, dtype=torch.float64), atol=1e-8)
    without = fldiag.diagnose(q, "spectrum", k=3, **options)
    pd.testing.assert_frame_equal(pd.DataFrame(table), pd.DataFrame(without))
    assert vectors_if_any(without) is None


def test_a_table_with_vectors_can_be_written_and_read(tmp_path):
    """A parquet file and a copy hold the names of the tensors, not the tensors."""
    model, data = net()
    q = Problem(model, cross_entropy, data)
    table = fldiag.diagnose(q, "spectrum", k=2, save_vectors=True)
    table.to_parquet(tmp_path / "t.parquet")
    table.to_csv(tmp_path / "t.csv")
    again = pd.read_parquet(tmp_path / "t.parquet")
    assert again["value"].tolist() == table["value"].tolist()
    assert again.attrs["vectors"] == list(table.attrs["vectors"].keys())
    shapes = {name: len(tensor) for name, tensor in table.attrs["vectors"].items()}
    assert set(shapes.values()) == {2} and table.copy().attrs["vectors"] is table.attrs["vectors"]


def test_vectors_lie_in_one_place_and_a_cached_table_has_them_all_the_same(tmp_path):
    model, data = net()
    q = Problem(model, cross_entropy, data)
    first, second = (
        fldiag.diagnose(q, "spectrum", k=2, save_vectors=True, density=True, cache=tmp_path)
        for _ in range(2)
    )
    assert vectors_if_any(first) == vectors_if_any(second)
    stored = sum(file.stat().st_size for file in tmp_path.glob("spectrum-*.parquet"))
    plain = tmp_path / "plain"
    fldiag.diagnose(q, "spectrum", k=2, density=True, cache=plain)
    expected = sum(file.stat().st_size for file in plain.glob("spectrum-*.parquet"))
    assert abs(stored - expected) < 100


def test_vectors_that_cannot_be_saved():
    model, data = net()
    q = Problem(model, cross_entropy, data)
    with pytest.raises(FldiagError, match="one checkpoint at a time"):
        fldiag.diagnose([q, q], "spectrum", save_vectors=True)
    with pytest.raises(FldiagError, match="leave out --save-vectors"):
        fldiag.diagnose(q, "spectrum", engine="pyhessian", save_vectors=True)
