"""The second-order account: exact on quadratics, its parts add up, and it is what the dense Hessian says."""

import helpers
import numpy as np
import pytest
import torch
from histories import history, moved, one, stored, tanh_net
from torch import nn
from torch.nn import functional as F

from fldiag.diagnostics.account import account
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
        for estimator in ("eigen", "layer"):
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


def test_against_the_dense_hessian(smooth):
    net, data, parts, made = smooth
    frame, item = account(made, k=3, tol=1e-8), made.last()
    everything = np.concatenate(parts)
    x, y, layout = data.train_x[everything].double(), data.train_y[everything], Layout.of(net)

    def f(w):
        return F.cross_entropy(torch.func.functional_call(net, layout.views(w), (x,)), y)

    g, h = torch.func.grad(f)(item.received), torch.func.hessian(f)(item.received)
    d = item.clients[1] - item.received
    found = terms(frame, client=1)
    assert found["linear"] == pytest.approx(float(g @ d), rel=1e-9) and found[
        "quadratic"
    ] == pytest.approx(float(d @ h @ d) / 2, rel=1e-9)
    assert (
        found["change"] == pytest.approx(float(f(item.clients[1]) - f(item.received)), rel=1e-9)
        and abs(found["rest"]) > 1e-4
    )
    head = torch.zeros_like(d)
    head[35:] = d[35:]
    assert one(frame, "quadratic", client=1, layer="2").value == pytest.approx(
        float(head @ h @ head) / 2, rel=1e-8
    )
    assert one(frame, "linear", client=1, layer="2").value == pytest.approx(
        float(g @ head), rel=1e-8
    )
    lam, vectors = torch.linalg.eigh(h)
    row = one(frame, "linear", estimator="eigen", client=1, index=2)
    v = vectors[:, -2]
    assert row.value == pytest.approx(
        float((g @ v) * (d @ v)), rel=1e-4
    ) and row.eigenvalue == pytest.approx(float(lam[-2]), rel=1e-6)


def test_on_the_test_split(smooth):
    _, data, _, made = smooth
    frame = account(made, slice="test", k=0, layers=False)
    assert set(frame[frame.estimator == "client"].metric) == {"linear", "quadratic"}
    assert set(frame.estimator) == {"exact", "client"} and set(frame["slice"]) == {"test"}
    assert one(frame, "change", client=0).n_examples == len(data.test_y)


def test_small_updates_leave_a_rest_of_third_order(smooth):
    net, data, parts, made = smooth
    item, rests = made.last(), []
    for t in (0.02, 0.01):
        short = stored(
            item.received, [item.received + t * (c - item.received) for c in item.clients]
        )
        frame = account(history(net, data, parts, short, dtype=torch.float64), k=0, layers=False)
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
    made.shares = "uniform"
    mean = item.clients.mean(0)
    assert one(
        account(made, k=0), "linear", estimator="client", client=None
    ).value == pytest.approx(float(g @ (item.aggregated - mean)), rel=1e-5)


@pytest.mark.parametrize("slice", ["train", "test"])
def test_the_loss_without_each_client(smooth, slice):
    net, data, parts, made = smooth
    made.shares, item = "uniform", made.last()
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

    frame = account(made, k=0, layers=False, slice=slice)
    for k in range(3):
        others = item.clients[[j for j in range(3) if j != k]].mean(0)
        row = one(frame, "effect", client=k)
        assert row.value == pytest.approx(float(f(others) - f(item.aggregated)), rel=1e-9)
        assert row.stderr > 0 and row["slice"] == slice and row.moment == "aggregated"


def test_no_effect_where_the_server_does_more_than_the_mean_or_a_client_is_alone(quadratic, smooth):
    rows = account(quadratic[-1], k=0).query("metric == 'effect'")
    assert rows.masked.all() and "more than the weighted mean" in rows.note.iloc[0]
    net, data, parts, made = smooth
    w = made.last().received
    alone = history(net, data, parts, stored(w, [w + 0.1]), dtype=torch.float64)
    row = one(account(alone, k=0), "effect")
    assert row.masked and "all of the average" in row.note


def test_a_client_that_is_no_number_is_left_out_and_a_broken_start_refused(smooth):
    net, data, parts, made = smooth
    item = made.last()
    broken = item.clients[0] * float("nan")
    frame = account(
        history(
            net,
            data,
            parts,
            stored(item.received, [broken, *item.clients[1:]], item.aggregated),
            dtype=torch.float64,
        )
    )
    assert (
        0 not in set(frame[frame.metric != "missing"].client.dropna())
        and one(frame, "missing").client == 0
    )
    with pytest.raises(FldiagError, match=r"NaN|nan|not finite"):
        account(
            history(
                net,
                data,
                parts,
                stored(broken, list(item.clients), item.aggregated),
                dtype=torch.float64,
            )
        )


def test_the_last_round_or_every_round(smooth):
    net, data, parts, made = smooth
    item = made.last()
    first, second = (stored(item.received, list(item.clients), round=r) for r in (1, 2))
    damaged = FldiagError("round 3 is damaged", "")
    frame = account(history(net, data, parts, first, second, damaged, dtype=torch.float64), k=0)
    assert set(frame["round"]) == {2, 3} and one(frame, "missing").note == "round 3 is damaged"
    every = account(
        history(net, data, parts, first, second, dtype=torch.float64), k=0, every_round=True
    )
    assert set(every["round"]) == {1, 2}
