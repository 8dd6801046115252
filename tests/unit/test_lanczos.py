"""Lanczos against dense eigensolvers: planted spectra, measured residuals, honesty about what is missing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fldiag.curvature import iteration
from fldiag.curvature.basis import Basis
from fldiag.curvature.lanczos import Unseen, innocent, krylov, lanczos
from fldiag.errors import FldiagError


def planted(spectrum, seed=0):
    """A dense symmetric matrix with this spectrum."""
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.standard_normal((len(spectrum), len(spectrum))))
    a = torch.from_numpy(q @ np.diag(np.asarray(spectrum, dtype=float)) @ q.T)
    return (a + a.T) / 2


def measured(a, found):
    """||A v - theta v|| of every pair, by multiplying once more."""
    difference = found.vectors @ a.T - torch.from_numpy(found.values)[:, None] * found.vectors
    return torch.linalg.vector_norm(difference, dim=1).numpy()


def top(a, k, which="largest", **options):
    options.setdefault("noise", 1e-12)
    return lanczos(lambda v: a @ v, len(a), k, which=which, **options)


@pytest.mark.parametrize(
    "which, key",
    [("largest", lambda v: -v), ("smallest", lambda v: v), ("magnitude", lambda v: -abs(v))],
)
@pytest.mark.parametrize(
    "spectrum",
    [
        [5, 4, 3, 2, 1, 0.5, 0.1, -3.5],
        [5, 5, 3, 3, 3, 1],  # repeated
        [-1, -2, -3, -4.5, -5],  # all negative
        [2, 0, 0, 0, 0, 0, 0],  # rank one
        [1] * 6,  # the identity: every vector is an invariant subspace
        [3, 3 - 1e-5, 1, 0.2],  # nearly equal
    ],
    ids=str,
)
def test_all_eigenvalues_of_a_planted_spectrum_with_k_at_least_the_size(spectrum, which, key):
    a = planted(spectrum)
    found = top(a, len(spectrum) + 3, which)
    expected = np.array(sorted(spectrum, key=lambda v: key(np.float64(v))), dtype=float)
    assert found.values == pytest.approx(expected, abs=1e-9)
    assert found.converged.all() and found.products <= len(spectrum)
    assert torch.allclose(
        found.vectors @ found.vectors.T, torch.eye(len(spectrum)).double(), atol=1e-9
    )
    assert measured(a, found) == pytest.approx(np.zeros(len(spectrum)), abs=1e-8)


def test_the_smallest_converge_where_they_lie_near_zero_and_no_relative_error_is_ever_reached():
    rng = np.random.default_rng(0)
    spectrum = np.concatenate([1e-7 * rng.standard_normal(280), np.linspace(0.5, 1, 20)])
    a = planted(spectrum)
    found = top(a, 2, "smallest", noise=1e-9, max_products=150)
    assert found.converged.all() and np.abs(found.values - np.sort(spectrum)[:2]).max() <= 1e-3
    away = planted(np.concatenate([spectrum, [-0.5, -0.49]]))
    found = top(away, 2, "smallest", noise=1e-9, max_products=150)
    assert found.converged.all() and found.values == pytest.approx([-0.5, -0.49], rel=1e-3)


def test_zero_operator_has_zero_eigenvalues():
    found = lanczos(torch.zeros_like, 50, 3)
    assert found.values.tolist() == [0, 0, 0] and found.converged.all() and found.products < 10


def test_one_dimension():
    found = lanczos(lambda v: -7 * v, 1, 1)
    assert found.values == pytest.approx([-7]) and found.vectors.tolist() == [[1.0]]


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(2, 40),
    k=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    budget=st.integers(1, 40),
    which=st.sampled_from(["largest", "smallest", "magnitude"]),
)
def test_an_eigenvalue_lies_within_every_residual_even_before_convergence(
    size, k, seed, budget, which
):
    b = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    a = (b + b.T) / 2
    true = torch.linalg.eigvalsh(a).numpy()
    found = top(a, k, which, max_products=budget, seed=seed)
    assert found.products <= budget
    assert found.residuals == pytest.approx(measured(a, found), abs=1e-9)
    for value, residual in zip(found.values, found.residuals, strict=True):
        assert np.abs(true - value).min() <= residual + 1e-9
    if found.converged.all() and len(found.values) == k and found.overlooked == 0:
        order = {"largest": -true, "smallest": true, "magnitude": -abs(true)}[which]
        assert found.values == pytest.approx(true[np.argsort(order)][:k], rel=1e-3, abs=1e-8)


def test_the_residual_counts_what_an_asymmetric_operator_breaks():
    a = planted([5, 3, 1, 0.5])
    a[0, 1] += 0.5  # no longer symmetric: the textbook estimate would not notice
    found = top(a, 2)
    assert (
        found.residuals == pytest.approx(measured(a, found), abs=1e-9)
        and found.residuals.max() > 1e-3
    )


def outliers(size=400, head=(10.0, 8.0, 6.5, 5.0, 4.2, 3.0)):
    """A spectrum like a trained network's: a few outliers over a bulk near zero."""
    bulk = np.linspace(-0.3, 1.5, size - len(head))
    return torch.tensor([*head, *bulk], dtype=torch.float64)


def test_outliers_to_the_tolerance_in_few_products():
    d = outliers()
    found = lanczos(lambda v: d * v, len(d), 5, tol=1e-3)
    assert found.converged.all() and found.products <= 20
    assert found.values == pytest.approx(d[:5].numpy(), rel=1e-3)


def test_float32_products_keep_the_tolerance_and_the_residual_bound():
    d = outliers()
    found = lanczos(lambda v: d.float() * v.float(), len(d), 5, tol=1e-5)
    assert found.converged.all() and found.values == pytest.approx(d[:5].numpy(), rel=1e-5)
    assert found.vectors.dtype == torch.float64


def test_a_huge_eigenvalue_does_not_drown_the_residuals_of_the_others():
    d = outliers(head=(1e9, 9.0, 6.5, 5.0, 4.2, 3.0))
    found = lanczos(lambda v: d * v, len(d), 5, tol=1e-8, noise=1e-15)
    assert found.values == pytest.approx(d[:5].numpy(), rel=1e-6)
    assert found.residuals == pytest.approx(measured(torch.diag(d), found), rel=1e-9, abs=1e-7)


def test_nearly_equal_pair_is_told_apart():
    d = outliers(head=(10.0, 9.99, 6.5, 5.0, 4.2, 3.0))
    found = lanczos(lambda v: d * v, len(d), 5, tol=1e-4)
    assert found.values == pytest.approx(d[:5].numpy(), rel=1e-4)


def test_the_check_finds_a_second_copy_that_one_krylov_space_cannot_hold():
    d = outliers(head=(10.0, 10.0, 6.5, 5.0, 4.2, 3.0))
    without = lanczos(lambda v: d * v, len(d), 3, miss=0, noise=1e-12)
    assert without.values == pytest.approx([10, 6.5, 5], rel=1e-3)  # what the check is for
    found = lanczos(lambda v: d * v, len(d), 3, noise=1e-12)
    assert found.values == pytest.approx([10, 10, 6.5], rel=1e-3) and found.converged.all()
    assert torch.allclose(found.vectors @ found.vectors.T, torch.eye(3).double(), atol=1e-9)


def test_copies_are_found_from_every_start():
    d = outliers(2000, head=(10.0, 10.0, 6.5, 5.0, 4.2, 3.0))
    for seed in range(30):
        found = lanczos(lambda v: d * v, len(d), 5, seed=seed)
        assert (
            found.values == pytest.approx([10, 10, 6.5, 5, 4.2], rel=1e-3) and found.converged.all()
        )
        assert found.overlooked <= 0.05


@pytest.mark.parametrize(
    "which, sign", [("largest", 1), ("smallest", -1), ("magnitude", 1), ("magnitude", -1)]
)
def test_copies_are_found_at_either_end(which, sign):
    d = sign * outliers(1000, head=(10.0, 10.0, 6.5, 5.0, 4.2, 3.0))
    for seed in range(5):
        found = lanczos(lambda v: d * v, len(d), 3, which=which, seed=seed)
        assert sign * found.values == pytest.approx([10, 10, 6.5], rel=1e-3)


@pytest.mark.parametrize("sign", [1, -1])
def test_magnitude_looks_at_the_end_where_the_bulk_is_close(sign):
    d = sign * torch.cat([torch.tensor([10.0, 8.0, 8.0]), torch.linspace(-0.5, 7.3, 3000)]).double()
    for seed in range(8):
        found = lanczos(lambda v: d * v, len(d), 3, which="magnitude", seed=seed, max_products=300)
        assert sign * found.values == pytest.approx([10, 8, 8], rel=1e-3)


def test_the_search_is_short_where_eigenvalues_stand_out_and_grows_with_the_certainty():
    d = outliers(5000)
    products = [
        lanczos(lambda v: d * v, len(d), 5, miss=miss).products for miss in (0, 0.3, 0.05, 1e-4)
    ]
    extra = np.array(products[1:]) - products[0]
    assert 1 <= extra[0] <= extra[1] <= 5 and extra[1] < extra[2] <= 9


def test_a_search_cut_short_is_admitted():
    d = outliers()
    enough = lanczos(lambda v: d * v, len(d), 5, miss=0)
    assert enough.converged.all() and enough.overlooked == 1.0
    cut = lanczos(lambda v: d * v, len(d), 5, max_products=enough.products + 1)
    assert (
        cut.values == pytest.approx(enough.values, rel=1e-3)
        and not cut.converged.any()
        and cut.overlooked > 0.05
    )


def test_the_bound_on_the_unseen_share_is_a_bound_and_nearly_reached():
    """Plant a share of the start vector on an eigenvalue and compare with 1 / sum p_i^2 at it."""
    rng = np.random.default_rng(0)
    bulk, point = rng.uniform(-1, 1, 60), 1.6
    for share in (1e-3, 1e-9):
        values = np.append(bulk, point)
        start = np.sqrt(np.append(np.full(60, (1 - share) / 60), share))
        seen, q, before, beta = Unseen(point, 1), start, np.zeros(61), 0.0
        for _ in range(12):
            u = values * q - beta * before
            alpha = u @ q
            u -= alpha * q
            before, q, beta = q, u / np.linalg.norm(u), np.linalg.norm(u)
            seen.extend(alpha, beta)
            assert share <= 1 / seen.total * (1 + 1e-6)
        assert 1 / seen.total < 1.1 * share + 1e-12
        assert seen.probability == pytest.approx(min(1, np.sqrt(2 / np.pi / seen.total)))


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
def test_restarts_keep_residuals_and_results(which):
    d = torch.cat(
        [torch.linspace(5, 12, 15), torch.linspace(-1, 1, 400), torch.linspace(-9, -4, 14)]
    ).double()
    key = {"largest": -d, "smallest": d, "magnitude": -d.abs()}[which]
    expected = d[key.argsort()][:12].numpy()
    free = lanczos(lambda v: d * v, len(d), 12, which=which, tol=1e-6, max_products=400)
    tight = lanczos(
        lambda v: d * v, len(d), 12, which=which, tol=1e-6, max_products=400, limit=22, noise=1e-12
    )
    for found in (free, tight):
        assert found.converged.all() and found.values == pytest.approx(expected, rel=1e-6)
        assert found.residuals == pytest.approx(measured(torch.diag(d), found), abs=1e-8)
    assert free.products <= tight.products <= 4 * free.products
    assert torch.allclose(tight.vectors @ tight.vectors.T, torch.eye(12).double(), atol=1e-9)


@pytest.mark.parametrize("limit", [None, 14])
def test_a_basis_in_float32_keeps_the_residuals_true_and_its_rows_orthogonal(limit):
    """Also through restarts: what rounding took from a row is in the residual, and does not add up."""
    head = 10.0 ** np.linspace(3, 0, 6)
    a = planted([*head, *np.random.default_rng(0).standard_normal(300) * 0.3])
    found = lanczos(
        lambda v: a @ v.double(),
        306,
        5,
        tol=1e-5,
        dtype=torch.float32,
        limit=limit,
        max_products=300,
    )
    assert found.converged.all()
    assert (
        np.abs(found.values - head[:5]).max() <= 6e-8 * np.sqrt(limit or found.products) * head[0]
    )
    assert (measured(a, found) <= found.residuals + 6e-8 * head[0]).all()
    rows = Basis(300, torch.device("cpu"), torch.float32)
    for v in torch.randn(120, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)):
        for _ in range(2):
            rows.remove_from(v)
        assert rows.append(v / v.norm()) <= 2**-24
    kept = torch.stack([rows[i] for i in range(len(rows))]).double()
    assert (kept @ kept.T - torch.eye(120).double()).abs().max() <= 2**-23


def test_the_limit_bounds_the_basis_also_when_the_budget_is_spent():
    d, longest = torch.linspace(0, 1, 500, dtype=torch.float64), []

    class Watched(Basis):
        def append(self, v):
            longest.append(self.count + 1)
            return super().append(v)

    before, iteration.Basis = iteration.Basis, Watched
    try:
        found = lanczos(lambda v: d * v, 500, 4, max_products=60, limit=16)
    finally:
        iteration.Basis = before
    assert found.products == 60 and max(longest) <= 17 and not found.converged.all()
    assert found.residuals == pytest.approx(measured(torch.diag(d), found), abs=1e-8)


def test_strict_convergence_means_accurate_vectors():
    d = outliers()
    loose, strict = (lanczos(lambda v: d * v, len(d), 3, tol=1e-5, strict=s) for s in (False, True))
    assert (strict.residuals <= 1e-5 * strict.values).all() and (
        loose.residuals > 1e-5 * loose.values
    ).any()
    assert torch.allclose(strict.vectors, torch.eye(400, dtype=torch.float64)[:3], atol=1e-4)


def test_what_lanczos_measured_splits_the_operator():
    a = planted([7, 4, -3, 2, 1, 0.5, 0.1, -0.2])
    known = krylov(lambda v: a @ v, 8, 3, noise=1e-12)
    assert known.dimension == 3
    p = torch.stack([known.project(e) for e in torch.eye(8, dtype=torch.float64)])
    assert torch.allclose(p @ p, p, atol=1e-12) and float(p.trace()) == pytest.approx(5)
    assert torch.allclose(known.diagonal(), (a - p @ a @ p).diagonal(), atol=1e-10)
    everything = krylov(lambda v: a @ v, 8, 20, noise=1e-12)
    assert everything.dimension == 8 and torch.allclose(
        everything.diagonal(), a.diagonal(), atol=1e-10
    )


def test_a_spent_budget_is_admitted():
    d = torch.linspace(0, 1, 500, dtype=torch.float64)  # no gaps: hard
    found = lanczos(lambda v: d * v, len(d), 5, max_products=12)
    assert found.products == 12 and not found.converged.all() and len(found.values) == 5
    few = lanczos(lambda v: d * v, len(d), 5, max_products=2)
    assert len(few.values) == 2 and not few.converged.any() and few.vectors.shape == (2, 500)


def test_same_seed_same_bits_other_seed_same_answer_and_signs():
    d = outliers()
    runs = [lanczos(lambda v: d * v, len(d), 3, tol=1e-6, seed=s) for s in (1, 1, 2)]
    assert (
        torch.equal(runs[0].vectors, runs[1].vectors) and (runs[0].values == runs[1].values).all()
    )
    assert torch.allclose(runs[0].vectors, runs[2].vectors, atol=1e-2)  # equal also in sign
    assert not torch.equal(runs[0].vectors, runs[2].vectors)
    for run in runs:
        largest = run.vectors.gather(1, run.vectors.abs().argmax(1, keepdim=True))
        assert (largest > 0).all()


def test_progress_counts_products():
    d, seen = outliers(), []
    found = lanczos(lambda v: d * v, len(d), 2, max_products=60, progress=lambda *a: seen.append(a))
    assert [done for done, _, _ in seen] == list(range(1, found.products + 1))
    assert {total for _, total, _ in seen} == {60} and seen[-1][2] == "2 of 2 eigenvalues converged"


def test_global_randomness_is_not_touched():
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    lanczos(lambda v: 2 * v, 10, 2)
    assert (
        torch.equal(state[0], torch.get_rng_state())
        and (state[1] == np.random.get_state()[1]).all()
    )


def test_a_product_that_is_not_finite_and_impossible_options_are_refused():
    with pytest.raises(FldiagError, match="not finite"):
        lanczos(lambda v: v * float("nan"), 10, 2)
    for wrong in ({"k": 0}, {"tol": 0.0}, {"which": "middle"}, {"max_products": 0}):
        with pytest.raises(FldiagError, match="at least 1"):
            lanczos(lambda v: v, 10, **{"k": 2, **wrong})


@pytest.mark.parametrize("seed", range(4))
def test_a_single_ritz_value_is_not_taken_for_an_eigenvalue(seed):
    """With one value and no other to measure a gap to, only the residual bounds its error."""
    entries = torch.linspace(1, 5, 60, dtype=torch.float64)
    pairs = lanczos(lambda v: entries * v, 60, 1, tol=1e-3, miss=0.0, max_products=60, seed=seed)
    assert pairs.converged.all()
    assert float(pairs.values[0]) == pytest.approx(5, rel=1e-3)


BULK = np.linspace(-0.2, 0.5, 150)
CLOSE = {
    "second of one": ([5, 4.9, 3], 1),
    "fourth of four": ([5, 4, 3, 2.997, 2], 4),
    "third of three": ([5, 4, 3, 2.985, 2], 3),
    "sixth of five": ([8, 6, 5, 4, 3, 2.9], 5),
}


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
@pytest.mark.parametrize("name", CLOSE)
@pytest.mark.parametrize("dtype, noise", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.slow
def test_what_is_called_converged_is_right_also_with_a_close_neighbour(name, which, dtype, noise):
    """The neighbour mixes with a wanted eigenvector, and the sequence alone cannot tell: seeds of which at most the
    share ``miss`` may be wrong (0.05; three in forty are within its scatter)."""
    values, k = CLOSE[name]
    spectrum = torch.tensor([*values, *BULK], dtype=torch.float64) * (
        -1 if which == "smallest" else 1
    )
    true, wrong = np.array(values[:k]) * (-1 if which == "smallest" else 1), 0
    for seed in range(40):
        d = spectrum[torch.randperm(len(spectrum), generator=torch.Generator().manual_seed(seed))]
        found = lanczos(
            lambda v, d=d: d * v, len(d), k, which=which, noise=noise, dtype=dtype, seed=seed
        )
        assert found.converged.all() and found.products < 40
        wrong += bool((np.abs(found.values - true) > 1e-3 * np.abs(true)).any())
    assert wrong <= 3


def test_ritz_vectors_taken_out_of_the_search_hide_nothing():
    """An eigenvector beyond the edge keeps at least the promised quotient outside of vectors with those residuals."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = np.concatenate([[3.0], rng.uniform(-1, 2, 12)])
        h = np.diag(values)
        mixed = np.linalg.qr(np.eye(13)[:, 1:7] + 0.02 * rng.standard_normal((13, 6)))[0]
        theta, y = np.linalg.eigh(mixed.T @ h @ mixed)
        y, theta = (mixed @ y)[:, ::-1], theta[::-1]
        residuals = np.linalg.norm(h @ y - y * theta, axis=0)
        keep, fall = innocent(
            np.concatenate([[9.0], theta]), np.concatenate([[0.0], residuals]), 3.0, 1
        )
        out = y[:, : keep - 1]
        u = np.eye(13)[0] - out @ out.T[:, 0]
        assert u @ h @ u / (u @ u) >= 3.0 - fall - 1e-12
        assert keep == 1 or fall > 0
    assert (
        innocent(np.array([2.0, 1.0, 0.99]), np.array([0.0, 1e-3, 0.5]), 1.9, 1)[0] == 2
    )  # the last is too uncertain
    assert innocent(np.array([2.0]), np.array([0.0]), 1.9, 1) == (1, 0.0)


def test_a_sequence_that_ends_in_rounding_noise_proves_nothing():
    """All products look like multiples of the vector: the direction with the larger eigenvalue has a share below the noise."""
    x = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x /= torch.linalg.vector_norm(x)
    found = lanczos(
        lambda v: v + 2e-4 * (x @ v) * x, len(x), 1, tol=1e-4, noise=1e-6, max_products=30
    )
    assert not found.converged.any() or found.values == pytest.approx([1.0002], rel=1e-4)
