"""Flatness of the whole and its parts: what convexity demands, the signs of the gaps, and what is masked."""

import helpers
import numpy as np
import pandas as pd
import pytest
import torch
from histories import history, identity, linear, moved, one, separable, stored
from torch import nn

from fldiag.diagnostics.flatness import draw, flatness, mean_of_parts
from fldiag.errors import FldiagError

SIZES = (12, 9, 14)
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


def test_an_estimated_trace_gap_is_zero_within_its_error(monkeypatch):
    monkeypatch.setattr("fldiag.problem.hessian.exact_layers", lambda problem: {})
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
    A, w = q.A[2], item.clients[1]
    g = A @ w - q.b[2]
    u = g / g.norm()
    rise = float(0.05 * g.norm() + 0.05**2 / 2 * (u @ A @ u))  # of w'Aw/2 - b'w
    assert parts.n_clients == 1 and parts.value == pytest.approx(rise)
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
    axes = {ax.get_title(): ax for ax in draw(frame).axes}
    for i, (metric, where) in enumerate((("trace", {}), ("trace_parts", {"moment": "trained"}))):
        values = [one(frame, metric, round=r, scope="global", **where).value for r in (2, 4, 5)]
        line = axes["trace"].get_lines()[1 + i]  # after the dots of the clients
        assert line.get_ydata()[~np.isnan(line.get_ydata())] == pytest.approx(values)


def test_clients_and_models_that_are_no_numbers():
    whole = relu_federation()
    w = next(whole.each(every_round=False)).received
    nan = w * float("nan")

    def ask(clients, new, ids):
        item = stored(w, clients, new, ids=ids)
        return flatness(
            history(whole.network.module, whole.dataset, whole.parts, item, dtype=torch.float64)
        )

    frame = ask([nan, w], w, [0, 2])
    assert one(frame, "missing").client == 0
    row = one(frame, "sharpness_parts", moment="trained")
    assert row.n_clients == 1 and pd.isna(row.stderr)
    frame = ask([w], nan, [1])
    assert one(frame, "trace_gap", moment="trained").masked
    assert one(frame, "trace_parts", moment="trained").value > 0
    with pytest.raises(FldiagError, match="no round"):
        ask([nan], nan, [1])


def test_parts_count_by_their_examples_and_their_error_is_over_clients():
    values = [1.0, 2.0, 6.0]
    about = {"metric": "sharpness", "estimator": "exact", "n_examples": 10}
    rows = [{**about, "client": k, "value": v} for k, v in enumerate(values)]
    mean = mean_of_parts(rows)
    assert (mean["value"], mean["stderr"]) == pytest.approx((3.0, pd.Series(values).sem()))
    rows[2]["n_examples"] = 60
    assert mean_of_parts(rows)["value"] == pytest.approx(39 / 8)


def test_stability_is_half_the_learning_rate_times_the_largest_eigenvalue(quadratic):
    q, item, made = quadratic
    assert flatness(made).query("metric == 'stability'").empty  # no learning rate is known
    made.training = {"lr": 0.4, "lr_decay": 0.5}
    frame = flatness(made, tol=1e-9)
    assert len(item.ids) == 2
    for k in item.ids:
        lambda_1 = float(torch.linalg.eigvalsh(q.A[k])[-1])
        assert one(frame, "stability", client=k).value == pytest.approx(0.4 / 2 * lambda_1)


def test_the_largest_eigenvalue_is_that_of_the_hessian_and_bounds_are_weighed_as_values(quadratic):
    q, item, made = quadratic
    frame, bounds = flatness(made), []
    for k in item.ids:
        row = one(frame, "eigenvalue", client=k, moment="trained")
        lambda_1 = float(torch.linalg.eigvalsh(q.A[k])[-1])
        assert row.value == pytest.approx(lambda_1, rel=1e-3)
        assert row["index"] == 1 and row.converged and row.bound > 0
        bounds.append(row.bound)
    parts = one(frame, "eigenvalue_parts", moment="trained")
    p = np.array([SIZES[k] for k in item.ids]) / sum(SIZES[k] for k in item.ids)
    assert parts.residual == pytest.approx(float(p @ bounds), rel=1e-9, abs=0)
