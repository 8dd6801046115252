"""Matching against closed forms: Hessians of least squares, spaces without curvature, noise of known size."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from histories import history, one, stored
from torch import nn

import fldiag
from fldiag.data import Dataset
from fldiag.diagnostics.matching import cosine, direction, norm_difference
from fldiag.errors import FldiagError
from fldiag.problem.hessian import norm

RNG = np.random.default_rng(3)
FULL, OTHER, FLAT = RNG.normal(size=(9, 4)), RNG.normal(size=(7, 4)), np.zeros((5, 4))
LINE = np.outer(np.ones(6), FULL[0])  # of rank one


def matching(*inputs, **options):
    """Of least squares without bias, where H_k = X_k'X_k / n_k for each of two outputs, whatever the weights."""
    x = torch.from_numpy(np.concatenate(inputs)).float()
    parts = [np.arange(a, b) for a, b in pairwise(np.cumsum([0, *map(len, inputs)]))]
    data = Dataset("squares", x, torch.zeros(len(x), 2), x[:3], torch.zeros(3, 2), 2)
    net = nn.Sequential(nn.Linear(4, 2, bias=False))
    w = torch.full((8,), 0.3, dtype=torch.float64)
    cohort = stored(w, [w + k for k in range(len(inputs))])
    run = history(net, data, parts, cohort, dtype=torch.float64)
    return fldiag.diagnose(run, "matching", **options)


def pair(table, metric, a, b, form="diag", data="client"):
    return one(table, metric, client=a, client_b=b, diag_mode=form, data=data)


def test_least_squares():
    table, blocks = matching(FULL, OTHER, k=2), [x.T @ x / len(x) for x in (FULL, OTHER)]
    for k, block in enumerate(blocks):
        own = {"client": k, "slice": f"client:{k}/train"}
        assert one(table, "trace", **own).value == pytest.approx(2 * np.trace(block))
        for i in (1, 2):  # one for each output
            top = one(table, "eigenvalue", index=i, **own)
            assert top.converged and top.value == pytest.approx(np.linalg.eigvalsh(block)[-1])
    a, b = (np.tile(np.diag(block), 2) for block in blocks)
    lengths = [np.linalg.norm(v) for v in (a, b)]
    h_d = a @ b / np.prod(lengths)
    assert pair(table, "H_N", 0, 1).value == pytest.approx((lengths[0] - lengths[1]) ** 2)
    assert pair(table, "H_D", 0, 1).value == pytest.approx(h_d)
    traces = pair(table, "H_N", 0, 1, "tensor_trace").value
    assert traces == pytest.approx((a.sum() - b.sum()) ** 2)
    # on the same data these Hessians do not depend on the weights
    assert pair(table, "H_N", 0, 1, data="global").value == pytest.approx(0, abs=1e-20)
    assert pair(table, "H_D", 0, 1, data="global").value == pytest.approx(1)
    assert {pair(table, "H_D", 0, 1, data=data).n_examples for data in ("client", "global")} == {16}
    of = {"scope": "global", "diag_mode": "diag", "data": "client"}
    for metric, own in (("H_N", 0), ("H_D", 1)):
        value = pair(table, metric, 0, 1).value
        assert one(table, metric, self_pairs=False, **of).value == pytest.approx(value)
        mean = one(table, metric, self_pairs=True, **of).value
        assert mean == pytest.approx((value + own) / 2)


def test_a_space_of_zero_eigenvalues_and_a_zero_diagonal_have_no_direction():
    table = matching(FULL, OTHER, FLAT, LINE, on="client", k=3)
    overlaps = table[table["metric"] == "eigenspace_overlap"].dropna(subset="value")
    assert overlaps[["client", "client_b"]].dropna().to_numpy().tolist() == [[0, 1]]
    assert overlaps["value"].nunique() == 1 and 0 < overlaps["value"].iloc[0] < 1
    for k in (0, 1, 3):
        row = pair(table, "H_D", *sorted((k, 2)))
        assert pd.isna(row.value) and row.masked
        length = one(table, "diagonal_norm", client=k).value
        assert pair(table, "H_N", *sorted((k, 2))).value == pytest.approx(length**2)
    mean = one(table, "H_D", scope="global", diag_mode="diag", self_pairs=True).value
    values = [pair(table, "H_D", *ks).value for ks in ((0, 1), (0, 3), (1, 3))]
    assert mean == pytest.approx((2 * sum(values) + 3) / 9)


def test_what_rests_on_a_rough_diagonal_is_not_converged(monkeypatch):
    assert pair(matching(FULL, OTHER, k=0), "H_N", 0, 1).converged
    monkeypatch.setattr("fldiag.problem.hessian.exact_layers", lambda problem: {})
    table = matching(FULL, OTHER, k=0, rtol=1e-3, max_products=4)
    for form in ("diag", "tensor_trace"):
        row = pair(table, "H_N", 0, 1, form)
        assert row.stderr > 0 and not row.converged
        assert not one(table, "H_N", diag_mode=form, data="client", self_pairs=True).converged


def test_the_overlap_is_the_mean_squared_cosine():
    a, b = np.diag([3.0, 2, 0.1, 0.1]), np.diag([3.0, 2, 0.1, 0.1])
    turn = np.eye(4)
    turn[1:3, 1:3] = [[0.8, -0.6], [0.6, 0.8]]
    table = matching(2 * a, 2 * b @ turn, on="client", k=4)  # each eigenvalue twice
    assert one(table, "eigenspace_overlap", scope="pair").value == pytest.approx((1 + 0.64) / 2)


def test_noise_neither_lengthens_nor_turns_and_errors_are_its_scatter():
    a, b = RNG.normal(size=(2, 3000))
    b, errors = torch.from_numpy(a + b), torch.full((3000,), 0.7, dtype=torch.float64)
    a = torch.from_numpy(a)
    clean = direction(a, 0 * a), direction(b, 0 * b)
    for compare in (norm_difference, cosine):
        draws = []
        for _ in range(200):
            noisy = (v + errors * torch.from_numpy(RNG.normal(size=3000)) for v in (a, b))
            draws.append(compare(*(direction(v, errors) for v in noisy)))
        values, stderrs = np.array(draws).T
        assert values.mean() == pytest.approx(compare(*clean)[0], rel=0.02)
        assert stderrs.mean() == pytest.approx(values.std(), rel=0.2)
    assert np.isnan(cosine(direction(0 * a, errors), clean[1])[0])
    # of equal norms, of which the errors are 0.2 and 0.4, the second order is the error
    eye = torch.eye(2).double()
    equal = [(eye[0], 0.1 * eye[0], 2.0), (eye[1], 0.2 * eye[1], 2.0)]
    assert norm_difference(*equal) == (0, pytest.approx(2**0.5 * (0.2**2 + 0.4**2)))
    # below the noise: of the square of the norm, 2 |v s| is the error
    assert norm(*torch.tensor([[1.0, 0.0], [2.0, 0.0]])) == (0, 2)


def test_one_client_has_no_pairs_and_a_picture_is_of_one_run():
    table = matching(FULL, k=1)
    assert one(table, "H_D", diag_mode="diag", data="client", self_pairs=False).masked
    with pytest.raises(FldiagError, match="no picture"):
        fldiag.draw(table)
    both = pd.concat([table, table.assign(run="B")])
    both.attrs = table.attrs
    with pytest.raises(FldiagError, match="one run"):
        fldiag.draw(both)
