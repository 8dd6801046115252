"""Clients' Hessians against each other where they are noisy, zero or not converged."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from histories import history, moved, one, stored, tanh_net
from torch import nn

import fldiag
from fldiag.data import Dataset
from fldiag.diagnostics.matching.comparison import Space, norms_and_directions, overlap_rows
from fldiag.problem.diagonal import diagonal


def regression(*inputs, out=1):
    """Least squares without bias: H_k = X_k'X_k / n_k for each of ``out`` outputs, whatever the weights."""
    x = torch.cat([torch.as_tensor(i, dtype=torch.float32) for i in inputs])
    ends = np.cumsum([0, *map(len, inputs)])
    parts = [np.arange(a, b) for a, b in pairwise(ends)]
    net = nn.Sequential(nn.Linear(x.shape[1], out, bias=False))
    w = torch.full((x.shape[1] * out,), 0.3, dtype=torch.float64)
    data = Dataset("squares", x, torch.zeros(len(x), out), x[:3], torch.zeros(3, out), out)
    return history(
        net, data, parts, stored(w, [w + k for k in range(len(inputs))]), dtype=torch.float64
    )


def test_spaces_of_zero_eigenvalues_are_masked_and_not_in_the_mean():
    rng = np.random.default_rng(0)
    full, other, flat = rng.normal(size=(9, 4)), rng.normal(size=(7, 4)), np.zeros((5, 4))
    single = np.outer(np.ones(6), rng.normal(size=4))  # of rank one
    frame = fldiag.diagnose(regression(full, other, flat, single), "matching", on="client", k=2)
    known = one(frame, "eigenspace_overlap", client=0, client_b=1)
    assert 0 < known.value < 1 and known.converged and not known.masked
    for a, b in ((0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        hit = one(frame, "eigenspace_overlap", client=a, client_b=b)
        assert pd.isna(hit.value) and hit.masked
    assert one(frame, "eigenspace_overlap", scope="global").value == pytest.approx(known.value)
    shown = frame[(frame.metric == "global_overlap") & (frame.scope == "client")]
    assert shown.value.isna().tolist() == [False, False, True, True]
    first = fldiag.diagnose(
        regression(full, single), "matching", on="client", k=1
    )  # one eigenvector is known of both
    assert one(first, "eigenspace_overlap", client=0, client_b=1).value > 0


def test_what_has_not_converged_is_said_to_be_in_the_overlap_and_its_mean():
    e = torch.eye(4, dtype=torch.float64)
    spaces = {
        0: Space(e[:2], True, True),
        1: Space(e[1:3], True, True),
        2: Space(e[2:], False, True),
    }
    rows = {
        (r["metric"], r.get("client"), r.get("client_b")): r
        for r in overlap_rows(spaces, Space(e[:2], True, True), "train")
        if "angle" not in r["metric"]
    }
    assert [
        rows["eigenspace_overlap", *pair]["converged"] for pair in ((0, 1), (0, 2), (1, 2))
    ] == [True, False, False]
    assert (
        not rows["eigenspace_overlap", None, None]["converged"]
        and not rows["global_overlap", None, None]["converged"]
    )
    assert rows["eigenspace_overlap", None, None]["value"] == pytest.approx((0.5 + 0 + 0.5) / 3)
    del spaces[2]
    assert all(r["converged"] for r in overlap_rows(spaces, None, "train"))


def test_cosines_of_noisy_vectors_are_freed_of_the_noise_in_their_norms():
    rng = np.random.default_rng(1)
    true = torch.from_numpy(rng.normal(size=(2, 3000)))
    true[1] += true[0]
    errors = torch.full_like(true, 0.7)
    clean, noisy = norms_and_directions(true), []
    for _ in range(20):
        noisy.append(
            norms_and_directions(
                true + errors * torch.from_numpy(rng.normal(size=true.shape)), errors
            )
        )
    assert np.mean([float(d[0, 1]) for _, d in noisy]) == pytest.approx(
        float(clean[1][0, 1]), rel=0.01
    )
    assert np.mean([float(n[0, 1]) for n, _ in noisy]) == pytest.approx(
        float(clean[0][0, 1]), rel=0.05
    )
    nothing = norms_and_directions(
        torch.stack([true[0], 0.1 * true[1]]), torch.stack([0 * true[0], errors[1]])
    )
    assert torch.isnan(nothing[1][0, 1]) and nothing[1][0, 0] == 1  # the second one is noise alone
    assert float(nothing[0][0, 1]) == pytest.approx(float(true[0].square().sum()))


def test_the_norm_of_a_diagonal_is_the_same_in_matching_and_alone():
    data, net = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), tanh_net()
    given = Dataset("noise", data, torch.arange(20) % 3, data[:3], torch.arange(3), 3)
    w, others = moved(net)
    made = history(
        net, given, [np.arange(11), np.arange(11, 20)], stored(w, others[:2]), dtype=torch.float64
    )
    frame = fldiag.diagnose(made, "matching", k=0, on="client", max_products=30, seed=4)
    for k in (0, 1):
        p = made.problem((others[k], {}), made.pool.train_slice(k), "one")
        alone = diagonal(p, max_products=30, entries=True, seed=4)
        for metric, same in (("diagonal_norm", alone.norm()), ("trace", alone.trace())):
            mine = one(frame, metric, client=k)
            assert (mine.value, mine.stderr) == same
    sizes = [one(frame, "diagonal_norm", client=k).value for k in (0, 1)]
    assert one(frame, "H_N", scope="pair", diag_mode="diag").value == pytest.approx(
        (sizes[0] - sizes[1]) ** 2
    )
