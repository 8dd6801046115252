"""The second-order account: exact on quadratics, its parts add up, and it is what the dense Hessian says."""

import helpers
import numpy as np
import pytest
import torch
from histories import history, moved, one, stored, tanh_net
from torch import nn
from torch.nn import functional as F

from fldiag.diagnostics.account import account, draw
from fldiag.errors import FldiagError
from fldiag.params import Layout


@pytest.fixture
def quadratic():
    """Two clients with a Hessian and an optimum of their own; the aggregated weights are not their mean."""
    q = helpers.quadratics((12, 9))
    w = torch.tensor([0.5, -1, 2, 0.3]).double()
    clients = [
        w + torch.tensor([1.0, 0, -2, 0]).double(),
        w + torch.tensor([0, 0.5, 1, 1]).double(),
    ]
    item = stored(w, clients, w + torch.tensor([0.3, 0.1, 0, 0.2]).double())
    made = history(nn.Sequential(nn.Linear(4, 1, bias=False)), *q.data, item, dtype=torch.float64)
    return q, item, made


@pytest.fixture
def smooth():
    data, parts = helpers.classification((20, 13, 17))
    net = tanh_net()
    w, clients = moved(net)
    return net, data, parts, history(net, data, parts, stored(w, clients), dtype=torch.float64)


def loss(q, w):
    return float((12 * q.loss(0, w) + 9 * q.loss(1, w)) / 21)


def terms(frame, **where):
    return {
        m: float(one(frame, m, estimator="exact", **where).value)
        for m in ("change", "linear", "quadratic", "rest")
    }


def test_on_a_quadratic_nothing_is_left(quadratic):
    q, item, made = quadratic
    frame = account(made, k=4, tol=1e-9)
    A, g = (
        (12 * q.A[0] + 9 * q.A[1]) / 21,
        (12 * q.gradient(0, item.received) + 9 * q.gradient(1, item.received)) / 21,
    )
    for v, where in (
        (item.clients[0], {"client": 0}),
        (item.clients[1], {"client": 1}),
        (item.aggregated, {"moment": "aggregated"}),
    ):
        d, found = v - item.received, terms(frame, **where)
        assert found["change"] == pytest.approx(loss(q, v) - loss(q, item.received), abs=1e-10)
        assert found["linear"] == pytest.approx(float(g @ d), rel=1e-6)
        assert found["quadratic"] == pytest.approx(float(d @ A @ d) / 2, rel=1e-6)
        assert found["rest"] == pytest.approx(0, abs=1e-6)  # data are float32
    lam, vectors = torch.linalg.eigh(A)
    along = 0.5 * lam[-1] * (vectors[:, -1] @ (item.clients[0] - item.received)) ** 2
    assert one(frame, "quadratic", estimator="eigen", index=1, client=0).value == pytest.approx(
        float(along), rel=1e-5
    )
    assert one(frame, "quadratic", estimator="eigen", index=0, client=0).value == pytest.approx(
        0, abs=1e-8
    )  # k is all


def test_parts_add_up_to_the_whole(smooth):
    frame = account(smooth[-1], k=3)
    for where in (
        {"client": 0, "moment": "trained"},
        {"client": 2, "moment": "trained"},
        {"client": None, "moment": "aggregated"},
    ):
        whole = terms(frame, **where)
        assert whole["change"] == pytest.approx(
            whole["linear"] + whole["quadratic"] + whole["rest"]
        )
        for estimator in ("eigen",):
            for metric in ("linear", "quadratic"):
                rows = frame[(frame.metric == metric) & (frame.estimator == estimator)]
                rows = (
                    rows[rows.client.isna()]
                    if where["client"] is None
                    else rows[rows.client == where["client"]]
                )
                assert float(rows.value.sum()) == pytest.approx(
                    whole[metric], rel=1e-9, abs=1e-12
                ) and len(rows)
    shares = frame[frame.estimator == "client"].groupby("metric").value.sum()
    whole = terms(frame, moment="aggregated")
    assert shares["linear"] == pytest.approx(whole["linear"]) and shares[
        "quadratic"
    ] == pytest.approx(whole["quadratic"])


def test_on_the_test_split(smooth):
    _, data, _, made = smooth
    frame = account(made, slice="test", k=0)
    assert set(frame[frame.estimator == "client"].metric) == {"linear", "quadratic"}
    assert set(frame.estimator) == {"exact", "client"} and set(frame["slice"]) == {"test"}
    assert one(frame, "change", client=0).n_examples == len(data.test_y)


def test_small_updates_leave_a_rest_of_third_order(smooth):
    net, data, parts, made = smooth
    item, rests = next(made.each(every_round=False)), []
    for t in (0.02, 0.01):
        short = stored(
            item.received, [item.received + t * (c - item.received) for c in item.clients]
        )
        frame = account(history(net, data, parts, short, dtype=torch.float64), k=0)
        rests.append(np.array([terms(frame, client=k)["rest"] for k in range(3)]))
    assert np.log2(np.abs(rests[0] / rests[1])) == pytest.approx(3, abs=0.2)


def test_the_server_s_own_contribution_is_named(quadratic):
    q, item, made = quadratic
    frame = account(made, k=0)
    g = (12 * q.gradient(0, item.received) + 9 * q.gradient(1, item.received)) / 21
    mean = (12 * item.clients[0] + 9 * item.clients[1]) / 21
    assert one(frame, "linear", estimator="client", client=None).value == pytest.approx(
        float(g @ (item.aggregated - mean)), rel=1e-5
    )
    made.training = {"aggregate": "uniform"}
    mean = item.clients.mean(0)
    assert one(
        account(made, k=0), "linear", estimator="client", client=None
    ).value == pytest.approx(float(g @ (item.aggregated - mean)), rel=1e-5)


@pytest.mark.parametrize("slice", ["train", "test"])
def test_the_loss_without_each_client(smooth, slice):
    net, data, parts, made = smooth
    made.training, item = {"aggregate": "uniform"}, next(made.each(every_round=False))
    everything = np.concatenate(parts)
    x, y = (
        (data.train_x[everything], data.train_y[everything])
        if slice == "train"
        else (data.test_x, data.test_y)
    )

    def f(w):
        return F.cross_entropy(net_of(w)(x.double()), y)

    def net_of(w):
        return lambda x: torch.func.functional_call(net, Layout.of(net).views(w), (x,))

    frame = account(made, k=0, slice=slice)
    for k in range(3):
        others = item.clients[[j for j in range(3) if j != k]].mean(0)
        row = one(frame, "effect", client=k)
        assert row.value == pytest.approx(float(f(others) - f(item.aggregated)), rel=1e-9)
        assert row.stderr > 0 and row["slice"] == slice and row.moment == "aggregated"


def test_no_effect_where_the_server_does_more_than_the_mean_or_a_client_is_alone(quadratic, smooth):
    rows = account(quadratic[-1], k=0).query("metric == 'effect'")
    assert rows.masked.all() and "no average without" in rows.note.iloc[0]
    net, data, parts, made = smooth
    w = next(made.each(every_round=False)).received
    alone = history(net, data, parts, stored(w, [w + 0.1]), dtype=torch.float64)
    row = one(account(alone, k=0), "effect")
    assert row.masked and "of one alone" in row.note


def test_a_client_that_is_no_number_is_left_out_and_a_broken_start_refused(smooth):
    net, data, parts, made = smooth
    item = next(made.each(every_round=False))
    broken, others = item.clients[0] * float("nan"), list(item.clients[1:])

    def ask(start, clients):
        rounds = stored(start, clients, item.aggregated)
        return account(history(net, data, parts, rounds, dtype=torch.float64))

    frame = ask(item.received, [broken, *others])
    assert one(frame, "missing").client == 0
    assert set(frame[frame.metric != "missing"].client.dropna()) == {1, 2}
    with pytest.raises(FldiagError, match=r"NaN|nan|not finite"):
        ask(broken, others)


def test_the_picture_shows_the_table_s_numbers(smooth):
    smooth[-1].training = {"aggregate": "uniform"}
    frame = account(smooth[-1], k=2)
    fig = draw(frame)
    panels, exact = fig.axes, frame[frame.estimator == "exact"]
    heights = np.array([bar.get_height() for bar in panels[0].patches]).reshape(3, 4)
    for row, metric in zip(heights, ("linear", "quadratic", "rest"), strict=True):
        assert row == pytest.approx(exact[exact.metric == metric]["value"].astype(float).tolist())
    marks = next(line for line in panels[0].get_lines() if line.get_marker() == "D")
    change = exact[exact.metric == "change"]["value"].astype(float).tolist()
    assert marks.get_ydata() == pytest.approx(change)
    points = panels[1].containers[0].lines[0].get_ydata()
    assert points == pytest.approx(exact[exact.metric == "effect"]["value"].astype(float).tolist())
