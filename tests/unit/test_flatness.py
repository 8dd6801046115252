"""Flatness of the whole and its parts: closed forms on quadratics, what convexity demands, and the signs of the gaps."""

import helpers
import numpy as np
import pandas as pd
import pytest
import torch
from histories import history, identity, linear, moved, one, separable, stored
from torch import nn

from fldiag.diagnostics.flatness import flatness
from fldiag.diagnostics.flatness.picture import draw
from fldiag.errors import FldiagError

SIZES, RHO = (12, 9, 14), 0.05
P = np.array(SIZES) / sum(SIZES)
MEASURES = ("sharpness", "eigenvalue", "trace")


@pytest.fixture
def quadratic():
    """Three clients with a Hessian and an optimum of their own, two of which train; aggregated is not their mean."""
    q = helpers.quadratics(SIZES)
    g = torch.Generator().manual_seed(3)
    w, a, b, new = torch.randn(4, 4, generator=g, dtype=torch.float64)
    item = stored(w, [w + a, w + b], new, ids=[0, 2])
    return (
        q,
        item,
        history(nn.Sequential(nn.Linear(4, 1, bias=False)), *q.data, item, dtype=torch.float64),
    )


def relu_federation(w=None, seed=0, **options):
    """Everybody's weights are w, and everybody takes part."""
    data, parts = helpers.classification((20, 13, 17), seed=seed)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    w = moved(net, seed=seed)[1][0] if w is None else w
    return history(net, data, parts, stored(w, [w, w, w], w), dtype=torch.float64, **options)


def sharp(A, b, w, rho=RHO):
    """F(w + rho g / |g|) - F(w) of w'Aw/2 - b'w."""
    g = A @ w - b
    u = g / g.norm()
    return float(rho * g.norm() + rho**2 / 2 * (u @ A @ u))


def test_closed_forms_on_quadratics(quadratic):
    q, item, made = quadratic
    frame = flatness(made, tol=1e-9)
    p = torch.from_numpy(P)
    A, b, w = torch.einsum("k,kij->ij", p, q.A), p @ q.b, item.aggregated

    def measures(A, b, w):
        return sharp(A, b, w), float(torch.linalg.eigvalsh(A)[-1]), float(A.trace())

    whole = measures(A, b, w)
    point = [measures(q.A[k], q.b[k], w) for k in range(3)]
    trained = {k: measures(q.A[k], q.b[k], v) for k, v in zip((0, 2), item.clients, strict=True)}
    for i, metric in enumerate(MEASURES):
        assert one(frame, metric, scope="global").value == pytest.approx(whole[i], rel=1e-6)
        for k in range(3):
            assert one(frame, metric, client=k, moment="aggregated").value == pytest.approx(
                point[k][i], rel=1e-6
            )
        for k in (0, 2):
            assert one(frame, metric, client=k, moment="trained").value == pytest.approx(
                trained[k][i], rel=1e-6
            )
        parts = (P[0] * trained[0][i] + P[2] * trained[2][i]) / (P[0] + P[2])
        assert one(frame, f"{metric}_parts", moment="trained").value == pytest.approx(
            parts, rel=1e-6
        )
        assert one(frame, f"{metric}_gap", moment="trained").value == pytest.approx(
            whole[i] - parts, rel=1e-5, abs=1e-7
        )
        parts = sum(P[k] * point[k][i] for k in range(3))
        assert one(frame, f"{metric}_gap", moment="aggregated").value == pytest.approx(
            whole[i] - parts, rel=1e-5, abs=1e-7
        )


def test_adaptive_sharpness_of_the_whole_and_of_each_client(quadratic):
    """At small radii the linear term decides: rho ||w g||."""
    q, item, made = quadratic
    rho = 1e-6
    frame = flatness(made, adaptive_rho=rho)
    whole = sum(P[k] * q.gradient(k, item.aggregated) for k in range(3))
    expected = float(rho * (item.aggregated * whole).norm())
    row = one(frame, "adaptive_sharpness", scope="global")
    assert row.value == pytest.approx(expected, rel=1e-4)
    for k, w in zip((0, 2), item.clients, strict=True):
        row = one(frame, "adaptive_sharpness", client=k, moment="trained")
        assert row.value == pytest.approx(float(rho * (w * q.gradient(k, w)).norm()), rel=1e-4)
    assert not one(frame, "adaptive_sharpness_gap", moment="trained").masked


@pytest.mark.parametrize("seed", range(3))
def test_at_one_point_traces_add_up_and_the_eigenvalue_is_convex(seed):
    frame = flatness(relu_federation(seed=seed), tol=1e-6)
    size = abs(float(one(frame, "trace", scope="global").value))
    for moment in ("trained", "aggregated"):  # everybody is at w, so both are the one point
        assert abs(one(frame, "trace_gap", moment=moment).value) <= 1e-12 * size
        assert one(frame, "eigenvalue_gap", moment=moment).value <= 0
    assert pd.isna(
        one(frame, "trace_gap", moment="aggregated").stderr
    )  # other clients would move whole and parts alike
    assert one(frame, "trace_parts", moment="aggregated").stderr > 0
    distances = frame[frame.metric == "flatness_distance"].value
    assert ((distances >= 0) & (distances <= 4)).all()


def test_an_estimated_trace_gap_is_zero_within_its_error(monkeypatch):
    monkeypatch.setattr("fldiag.problem.exact.exact_layers", lambda problem: {})
    frame = flatness(relu_federation(), rtol=0.3, max_products=24)
    row = one(frame, "trace_gap", moment="aggregated")
    assert row.residual > 0 and abs(row.value) <= 4 * row.residual and "hutchinson" in row.estimator


@pytest.mark.parametrize(("whole", "parts", "sign"), [(1.0, 3.0, 1), (3.0, 1.0, -1)])
def test_the_gap_is_below_zero_where_the_whole_is_flatter(whole, parts, sign):
    """A classifier with larger margins has less curvature and smaller gradients."""
    data, deal = separable(), [np.arange(i, 120, 3) for i in range(3)]
    w = identity().double()
    made = history(linear(), data, deal, stored(w, [parts * w] * 3, whole * w), dtype=torch.float64)
    frame = flatness(made)
    for metric in MEASURES:
        assert np.sign(one(frame, f"{metric}_gap", moment="trained").value) == sign
    assert abs(one(frame, "trace_gap", moment="aggregated").value) < 1e-9


def test_a_direction_of_rounding_noise_is_masked_and_left_out(quadratic):
    q, item, _ = quadratic
    best = torch.linalg.solve(q.A[0], q.b[0])
    item = stored(item.received, [best, item.clients[1]], item.aggregated, ids=[0, 2])
    made = history(nn.Sequential(nn.Linear(4, 1, bias=False)), *q.data, item, dtype=torch.float64)
    frame = flatness(made)
    row = one(frame, "sharpness", client=0, moment="trained")
    assert pd.isna(row.value) and row.masked and "rounding noise" in row.note
    parts = one(frame, "sharpness_parts", moment="trained")
    assert parts.n_clients == 1 and parts.value == pytest.approx(
        sharp(q.A[2], q.b[2], item.clients[1])
    )
    assert (
        one(frame, "eigenvalue", client=0, moment="trained").value > 0
    )  # curvature needs no direction


def test_only_every_so_manieth_round_and_the_last():
    w = identity().double()
    items = [stored(w, [0.9 * w, 1.1 * w], w * (1 + r / 10), round=r) for r in range(1, 6)]
    made = history(
        linear(), separable(), [np.arange(0, 60), np.arange(60, 120)], *items, dtype=torch.float64
    )
    frame = flatness(made, every=2)
    assert sorted(frame[frame.metric == "trace_gap"]["round"].unique()) == [2, 4, 5]
    assert len(draw(frame).axes) == 4


def test_broken_and_single_clients():
    made = relu_federation()
    w = made.last().received
    data, parts, net = made.dataset, made.parts, made.network.module
    broken = stored(w, [w * float("nan"), w], w, ids=[0, 2])
    frame = flatness(history(net, data, parts, broken, dtype=torch.float64))
    assert (
        one(frame, "missing").client == 0
        and one(frame, "sharpness_parts", moment="trained").n_clients == 1
    )
    assert pd.isna(one(frame, "sharpness_parts", moment="trained").stderr)
    nobody = flatness(
        history(net, data, parts, stored(w, [w * float("nan")], w, ids=[1]), dtype=torch.float64)
    )
    row = one(nobody, "trace_gap", moment="trained")
    assert (
        row.masked
        and "no client of this round" in row.note
        and not one(nobody, "trace_gap", moment="aggregated").masked
    )
    assert draw(nobody) is not None
    frame = flatness(
        history(net, data, parts, stored(w, [w], w * float("nan"), ids=[1]), dtype=torch.float64)
    )
    assert (
        one(frame, "trace_gap", moment="trained").masked
        and one(frame, "trace_parts", moment="trained").value > 0
    )
    with pytest.raises(FldiagError, match="no round has a flatness"):
        flatness(
            history(
                net,
                data,
                parts,
                stored(w, [w * float("nan")], w * float("nan"), ids=[1]),
                dtype=torch.float64,
            )
        )
    with pytest.raises(FldiagError, match="client weights"):
        item = stored(w, [w], w)
        flatness(history(net, data, parts, item.__class__(1, w), dtype=torch.float64))


def test_stability_is_half_the_learning_rate_times_the_largest_eigenvalue(quadratic):
    q, item, made = quadratic
    assert flatness(made).query("metric == 'stability'").empty  # no learning rate is known
    made.training = {"lr": 0.4, "lr_decay": 0.5}
    frame = flatness(made, tol=1e-9)
    assert len(item.ids) == 2
    for k in item.ids:
        lambda_1 = float(torch.linalg.eigvalsh(q.A[k])[-1])
        assert one(frame, "stability", client=k).value == pytest.approx(0.4 / 2 * lambda_1)
    values = frame.query("metric == 'stability' and scope == 'client'")["value"]
    assert one(frame, "stability", scope="global").value == pytest.approx(values.mean())
