"""Drift: closed forms of distances, cosines and consensus, and what training recorded."""

import helpers
import numpy as np
import pandas as pd
import pytest
import torch
from histories import history, linear, one, separable, stored
from torch import nn
from torch.nn.functional import cosine_similarity

from fldiag.diagnostics import drift as module
from fldiag.diagnostics.drift import cka, drift

PARTS = [np.arange(0, 60), np.arange(60, 90), np.arange(90, 120)]
WEIGHTS = {"gradients": False, "representation": False, "rho": ()}


def moved(*places):
    """Drift of clients whose updates have one entry each (place, size)."""
    clients = torch.zeros(len(places), 20)
    for row, (place, size) in zip(clients, places, strict=True):
        row[place] = size
    run = history(linear(), separable(), PARTS, stored(torch.zeros(20), clients))
    return drift(run, **WEIGHTS)


def test_distances_of_known_updates():
    table = moved((0, 3.0), (17, 4.0))  # a weight of the only layer, and its bias
    at = {"layer": None}
    for k, size in enumerate((3, 4)):
        assert one(table, "global_local_divergence", client=k, **at).value == size
        assert one(table, "squared_divergence", client=k).value == 6.25
    assert one(table, "global_local_divergence", scope="global", **at).value == 3.5
    assert one(table, "local_local_divergence", client=0, client_b=1).value == 5
    assert one(table, "update_cosine", scope="pair").value == 0
    assert one(table, "server_cosine", client=0).value == pytest.approx(0.6)
    assert one(table, "update_norm", moment="aggregated").value == 2.5


def test_consensus_weighs_clients_by_their_examples():
    length = (1.5**2 + 1 + 0.25**2) ** 0.5  # of a/2 + b/4 + c/4
    row = one(moved((0, 3.0), (1, 4.0), (17, 1.0)), "update_consensus", layer=None)
    assert row.value == pytest.approx(length / (1.5 + 1 + 0.25)) and row.n_clients == 3
    assert one(moved((0, 2.0), (0, 9.0)), "update_consensus", layer=None).value == 1
    row = one(moved((0, 0.0), (1, 0.0)), "update_consensus", layer=None)
    assert row.masked  # no client moved


def test_gradients_of_quadratics():
    """The global one is that of all examples, also of clients that were not sampled."""
    q, w = helpers.quadratics((12, 9, 15)), torch.tensor([0.5, -1, 2, 0.3]).double()
    net, round_ = nn.Sequential(nn.Linear(4, 1, bias=False)), stored(w, [w + 1, w - 1], ids=[0, 2])
    table = drift(history(net, *q.data, round_, dtype=torch.float64))
    g = torch.stack([q.gradient(k, w) for k in range(3)])
    total = torch.tensor([12, 9, 15]).double() @ g / 36
    for k in (0, 2):
        row = one(table, "gradient_cosine", client=k)
        assert row.value == pytest.approx(float(cosine_similarity(g[k], total, 0)))
    # of regression the proximal loss is l2, whose gradient is the displacement
    angle = float(cosine_similarity(q.gradient(0, w + 1), torch.ones(4).double(), 0))
    assert one(table, "cos_gu_gp", client=0, rho=0.0).value == pytest.approx(angle)
    row = one(table, "lambda_mean", client=0)
    assert (row.value, row.scaled) == (pytest.approx(0.5), pytest.approx(1))


def test_pieces_of_the_examples_change_nothing(monkeypatch):
    w, clients = torch.zeros(20), 0.3 * torch.randn(2, 20)
    run = history(linear(), separable(), PARTS, stored(w, clients), dtype=torch.float64)
    whole = drift(run, rho=(0.5,), representation=False)
    monkeypatch.setattr(module, "CHUNK", 7)
    pieces = drift(run, rho=(0.5,), representation=False)
    assert np.allclose(pieces.value.astype(float), whole.value.astype(float), equal_nan=True)


def test_a_proximal_gradient_that_is_rounding_noise_has_no_cosine():
    w = torch.randn(20)
    run = history(linear(), separable(), PARTS, stored(w, [w, w + torch.arange(20) / 20]))
    table = drift(run, rho=(0.5,), representation=False)
    assert one(table, "cos_gu_gp", client=0, layer=None).masked
    assert abs(one(table, "cos_gu_gp", client=1, layer=None).value) > 0


def test_steps_that_training_recorded_are_means():
    columns = ["client", "metric", "index", "value"]
    steps = [(0, "cos_gu_gp", 1, None), (0, "cos_gu_gp", 2, 0.5), (0, "cos_gu_gp", 3, 0.1)]
    steps += [(2, "cos_gu_gp", 2, -0.5), (2, "loss", 2, 9.0)]
    run = history(linear(), separable(), PARTS, stored(torch.zeros(20), torch.ones(3, 20)))
    run.run.steps = lambda r: pd.DataFrame(steps, columns=columns)
    table = drift(run, **WEIGHTS)
    row = one(table, "cos_gu_gp", estimator="steps", client=0)
    assert (row.value, row.n_steps, row["round"]) == (pytest.approx(0.3), 2, 1)
    mean = one(table, "cos_gu_gp", estimator="steps", scope="global")
    assert (mean.value, mean.n_clients, mean.n_steps) == (pytest.approx(-0.1), 2, 3)


@pytest.mark.parametrize("n", [40, 5])  # more examples than features, and fewer
def test_cka_knows_rotations_shifts_and_scales(n):
    a = torch.randn(n, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    assert cka(a, 3 * a @ turn + 1) == pytest.approx(1)
    b = torch.eye(n, dtype=torch.float64)[:, :1]
    x, y = a - a.mean(0), b - b.mean(0)
    expected = ((x.T @ y) ** 2).sum() / ((x.T @ x).norm() * (y.T @ y).norm())
    assert cka(a, b) == pytest.approx(float(expected))
    assert cka(a, torch.ones(n, 3)) is None
