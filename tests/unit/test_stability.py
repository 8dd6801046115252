"""Stability: gradient descent on quadratics diverges exactly above 1, and what has no edge says why."""

import helpers
import numpy as np
import pandas as pd
import pytest
import torch
from histories import history, one, stored
from torch import nn

import fldiag
from fldiag.diagnostics.stability import draw, stability, summary
from fldiag.errors import FldiagError
from fldiag.runs.history import History

CURVATURES = [[4.0, 1.0, 0.5], [9.0, 2.0, 0.1]]
OPTIMA = [[1.0, -1.0, 2.0], [0.0, 3.0, 1.0]]


def federation(rounds=1, clients=None, **options):
    """Two clients with diagonal Hessians; client 0 moves along the first axis, client 1 along (1, 1, 0)."""
    q = helpers.diagonal(CURVATURES, OPTIMA)
    w = torch.tensor([3.0, 2.0, -1.0], dtype=torch.float64)
    moves = torch.tensor([[0.5, 0.0, 0.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    models = [w + move for move in moves] if clients is None else clients(w)
    items = [stored(w, models, round=r) for r in range(1, rounds + 1)]
    net = nn.Sequential(nn.Linear(3, 1, bias=False))
    return q, history(net, *q.data, *items, **{"dtype": torch.float64, **options})


def descend(hessian, lr, momentum, decay, steps=4000):
    """How far heavy-ball gradient descent gets from the optimum of a quadratic with decay, from beside it."""
    w, v = torch.ones(len(hessian), dtype=torch.float64), 0.0
    for _ in range(steps):
        v = momentum * v + hessian @ w + decay * w
        w = w - lr * v
    return float(w.norm())


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("client", [0, 1])
def test_gradient_descent_diverges_exactly_above_1(momentum, decay, client):
    q, made = federation()
    lr = 0.1
    frame = stability(made, lr=lr, momentum=momentum, weight_decay=decay, tol=1e-9)
    row = one(frame, "stability", client=client, moment="received")
    edge = lr / row.value  # the learning rate at which it is 1
    assert descend(q.A[client], 0.99 * edge, momentum, decay) < 1e-3
    assert descend(q.A[client], 1.01 * edge, momentum, decay) > 1e3


def test_closed_forms():
    q, made = federation()
    w = made.stored(1).received
    frame = stability(made, lr=0.2, tol=1e-9)
    for k in (0, 1):
        row = one(frame, "eigenvalue", client=k, moment="trained")
        assert row.value == pytest.approx(max(CURVATURES[k]), rel=1e-6) and row["index"] == 1
        assert one(frame, "stability", client=k, moment="received").value == pytest.approx(
            0.2 * max(CURVATURES[k]) / 2, rel=1e-6
        )
        g = q.gradient(k, w)
        row = one(frame, "gradient_alignment", client=k, moment="received")
        assert row.value == pytest.approx(abs(float(g[0] / g.norm())), rel=1e-5)
    for k, expected in ((0, 4.0), (1, (9.0 + 2.0) / 2)):
        row = one(frame, "update_curvature", client=k, moment="received")
        assert row.value == pytest.approx(expected, rel=1e-6)
    mean = one(frame, "stability", scope="global", moment="received")
    assert mean.value == pytest.approx(0.1 * (4 + 9) / 2, rel=1e-6) and mean.n_clients == 2
    assert mean.stderr == pytest.approx(0.1 * np.std([4, 9], ddof=1) / 2**0.5, rel=1e-6)


def test_the_learning_rate_is_that_of_the_round(tmp_path):
    config = fldiag.Config.load(
        "digits",
        rounds=3,
        model__name="mlp",
        clients__per_round=2,
        train__lr=0.2,
        train__lr_decay=0.5,
        train__momentum=0.5,
        checkpoint__clients="sampled",
        checkpoint__every=1,
    )
    run = fldiag.train(config, out=tmp_path / "run")
    frame = stability(History.of(run, samples=60), every=2)
    assert sorted(frame.dropna(subset=["client"])["round"].unique()) == [2, 3]
    for r in (2, 3):
        rows = frame[(frame["round"] == r) & (frame["moment"] == "received")]
        k = rows.dropna(subset=["client"])["client"].iloc[0]
        top = one(rows, "eigenvalue", client=k).value
        lr = 0.2 * 0.5 ** (r - 1)
        assert one(rows, "stability", client=k).value == pytest.approx(
            lr * (top + 1e-5) / (2 * 1.5), rel=1e-9
        )
    frame = stability(History.of(run, samples=60), every=2, lr=0.01, momentum=0)
    rows = frame[(frame["round"] == 3) & (frame["moment"] == "received")]
    k = rows.dropna(subset=["client"])["client"].iloc[0]
    top = one(rows, "eigenvalue", client=k).value
    assert one(rows, "stability", client=k).value == pytest.approx(0.01 * (top + 1e-5) / 2)


@pytest.mark.parametrize(
    ("training", "reason"),
    [
        ({}, "does not say its learning rate"),
        ({"lr": 0.1, "optimizer": "adam"}, "the optimizer is adam"),
        ({"lr": 0.1, "momentum": 0.9, "nesterov": True}, "Nesterov"),
    ],
)
def test_what_has_no_edge_says_why(training, reason):
    _, made = federation()
    made.training = training
    frame = stability(made)
    rows = frame[frame["metric"] == "stability"]
    assert rows["masked"].all() and rows["note"].str.contains(reason).all()
    assert one(frame, "eigenvalue", client=0, moment="received").value > 0


def test_no_move_no_slope_and_no_number():
    q, _ = federation()
    best = torch.linalg.solve(q.A[0], q.b[0])

    def clients(w):
        return [best, torch.full_like(w, torch.nan)]

    _, made = federation(clients=clients)
    frame = stability(made, lr=0.1)
    row = one(frame, "gradient_alignment", client=0, moment="trained")
    assert row.masked and "rounding noise" in row.note
    (note,) = frame[frame["metric"] == "missing"]["note"]
    assert "client 1 are not finite" in note
    mean = one(frame, "stability", scope="global", moment="trained")
    assert mean.n_clients == 1 and pd.isna(mean.stderr)
    _, made = federation(clients=lambda w: [w, w + 1])
    row = one(stability(made, lr=0.1), "update_curvature", client=0, moment="received")
    assert row.masked and row.note == "the client did not move"
    _, made = federation(clients=lambda w: [torch.full_like(w, torch.nan)] * 2)
    with pytest.raises(FldiagError, match="no client can be measured"):
        stability(made, lr=0.1)


def test_the_picture_and_the_summary_show_the_numbers():
    _, made = federation(rounds=3)
    frame = stability(made, lr=0.2, every=1)
    fig = draw(frame)
    drawn = np.concatenate(
        [np.asarray(line.get_ydata(), float) for ax in fig.axes for line in ax.lines]
    )
    for number in frame.dropna(subset=["round"])["value"].dropna().astype(float):
        assert np.nanmin(np.abs(drawn - number)) < 1e-9 or number in (
            frame[frame["metric"].isin(["loss", "accuracy"])]["value"].tolist()
        )
    small = next(iter(summary(frame, {})))
    assert len(small.rows) == 6 and small.rows[0]["largest"] == pytest.approx(0.9, rel=1e-2)


def test_the_summary_says_how_certain_the_numbers_are():
    frame = stability(federation()[1], lr=0.1, max_products=2, tol=1e-12)
    items = list(summary(frame, {}))
    row, *_ = items[0].rows
    expected = one(frame, "stability", scope="global", moment="received").stderr
    assert row["stderr"] == pytest.approx(expected) and expected > 0
    assert "4 of 4 largest eigenvalues are not within their tolerance" in items[2].text
