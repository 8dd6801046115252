"""The second-order account: exact on quadratics, its parts add up, and it is what the dense Hessian says."""

import helpers
import numpy as np
import pytest
import torch
from histories import always, history, linear, moved, one, separable, stored, tanh_net
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


def test_who_hurts_whom(quadratic):
    q, item, made = quadratic
    frame = account(made)
    for a in (0, 1):
        for b in (0, 1):
            row = one(frame, "harm", client=a, client_b=b)
            expected = q.loss(b, item.clients[a]) - q.loss(b, item.received)
            assert (
                row.value == pytest.approx(float(expected), rel=1e-5)
                and row["slice"] == f"client:{b}/train"
            )


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
    frame = account(made, slice="test", k=0, layers=False, path=0)
    assert set(frame[frame.estimator == "client"].metric) == {
        "linear",
        "quadratic",
    } and "path" not in set(frame.estimator)
    assert set(frame[frame.metric == "class_harm"]["slice"]) == {
        f"test/class:{c}" for c in range(3)
    }
    assert set(frame.estimator) == {"exact", "client", "first-order"} and "eigen" not in set(
        frame.estimator
    )
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


# -- along the path


def test_the_path_is_the_change_and_its_parts_add_up(smooth):
    frame = account(smooth[-1], k=3)
    paths = frame[frame.estimator == "path"]
    for client in (0, 2, None):
        mine = paths[paths.client.isna()] if client is None else paths[paths.client == client]
        change = one(frame, "change", client=client, estimator="exact").value
        whole, rest = one(mine, "path", layer=None, index=None), one(mine, "rest").value
        assert whole.value == pytest.approx(change, rel=1e-6) and rest == pytest.approx(
            change - whole.value, abs=1e-15
        )
        assert whole.converged and whole.residual <= 0.05 * abs(change)
        for by in ("layer", "index"):
            assert float(
                mine[(mine.metric == "path") & mine[by].notna()].value.sum()
            ) == pytest.approx(whole.value, rel=1e-9)


def test_the_path_by_layer_against_its_own_integral(smooth):
    """An update of the head alone leaves nothing to the body, and a far one needs more than Taylor's terms."""
    net, data, parts, made = smooth
    item = made.last()
    d = torch.zeros_like(item.received)
    d[35:] = 4.0 * (item.clients[1] - item.received)[35:]
    far = stored(item.received, [item.received + d, item.clients[1]])
    frame = account(history(net, data, parts, far, dtype=torch.float64), k=0)
    paths = frame[(frame.estimator == "path") & (frame.client == 0)]
    change = one(frame, "change", client=0).value
    assert (
        one(paths, "path", layer="2").value == pytest.approx(change, rel=1e-6)
        and one(paths, "path", layer="0").value == 0
    )
    assert abs(one(frame, "rest", client=0, estimator="exact").value) > 10 * abs(
        one(paths, "rest").value
    )


def test_points_are_added_where_the_error_is_and_only_as_many_as_allowed():
    from fldiag.diagnostics.account.path import integral

    def spike(t):
        seen.append(t)
        return np.array([1 / (1e-4 + (t - 0.3) ** 2), 1.0])

    true = 100 * (np.arctan(70) + np.arctan(30))
    for points, good in ((15, False), (600, True)):
        seen = []
        total, error = integral(spike, points, lambda total, error: bool(error[0] < 1e-6 * true))
        assert len(seen) <= points and bool(abs(total[0] - true) < 1e-6 * true) is good
        assert total[1] == pytest.approx(1)
    polynomial, error = integral(lambda t: np.array([23 * t**22]), 15, lambda *_: True)
    assert (
        polynomial[0] == pytest.approx(1, rel=1e-12) and error[0] > 1e-9
    )  # Kronrod's is exact to degree 22, Gauss's to 13


# -- who hurts which class


def test_class_harm_by_hand(smooth):
    net, data, parts, made = smooth
    frame, item, layout = account(made, k=0), made.last(), Layout.of(net)
    everything = np.concatenate(parts)
    x, y = data.train_x[everything].double(), data.train_y[everything]

    def f(w, where):
        return F.cross_entropy(
            torch.func.functional_call(net, layout.views(w), (x[where],)), y[where]
        )

    for c in range(3):
        g = torch.func.grad(f)(item.received, y == c)
        for k, w in enumerate(item.clients):
            row = one(frame, "class_harm", client=k, index=c)
            assert (
                row.value == pytest.approx(float(f(w, y == c) - f(item.received, y == c)))
                and row["slice"] == f"train/class:{c}"
            )
            assert one(frame, "linear_class_harm", client=k, index=c).value == pytest.approx(
                float(g @ (w - item.received))
            )
        assert one(frame, "class_harm", client=None, index=c).moment == "aggregated"
    for b, part in enumerate(parts):
        mine = torch.from_numpy(np.isin(everything, part))
        g = torch.func.grad(f)(item.received, mine)
        assert one(frame, "linear_harm", client=1, client_b=b).value == pytest.approx(
            float(g @ (item.clients[1] - item.received))
        )


def test_training_on_one_class_hurts_the_others():
    """A client that moved towards always answering class 1 helps that class, and to first order says so."""
    data = separable()
    item = stored(torch.zeros(20).double(), [0.1 * always(1).double(), 0.1 * always(2).double()])
    frame = account(
        history(
            linear(), data, [np.arange(0, 120, 2), np.arange(1, 120, 2)], item, dtype=torch.float64
        ),
        k=0,
    )
    for metric in ("class_harm", "linear_class_harm"):
        signs = [np.sign(one(frame, metric, client=0, index=c).value) for c in range(4)]
        assert signs == [1, -1, 1, 1]
