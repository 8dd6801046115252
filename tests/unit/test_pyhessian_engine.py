"""PyHessian as an engine: the very numbers of that package, with honest residuals beside them."""

import random
import sys

import helpers
import numpy as np
import pyhessian
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fldiag.diagnostics.spectrum import pyhessian_engine as reference
from fldiag.diagnostics.spectrum.pyhessian_engine import Batching, iterations
from fldiag.errors import FldiagError
from fldiag.execution.workspace import Workspace
from fldiag.problem.problem import Problem
from fldiag.results.table import check, table
from fldiag.seeding import seed_for


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 3)
    )


def problem(n=40, net=None, **options):
    data, _ = helpers.classification((n,))
    return Problem(net or network(), cross_entropy, (data.train_x, data.train_y), **options)


def values(rows):
    return [r for r in rows if r["metric"] == "eigenvalue"]


class Weights(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(1, 2, size))

    def forward(self, x):
        return self.w.expand(len(x), -1)


def quadratic(a):
    a = torch.as_tensor(a, dtype=torch.float32)
    return Problem(
        Weights(len(a)),
        lambda z, y: 0.5 * ((z @ a) * z).sum(1).mean(),
        (torch.zeros(3, 1), torch.zeros(3)),
    )


def dense(p):
    x, y = p.batch(0)

    def loss(w):
        return p.user_loss(p.call(w, x), y)

    return torch.func.hessian(loss)(p.w).double()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_the_numbers_are_those_of_the_package():
    p = problem()
    rows = values(reference.eigenvalues(p, 3, seed=5))
    net = network().eval()
    engine = pyhessian.hessian(net, cross_entropy, dataloader=[p.batch(0)], cuda=False)
    torch.manual_seed(seed_for(5, "pyhessian eigenvalues"))
    expected, _ = engine.eigenvalues(maxIter=100, tol=1e-3, top_n=3)
    assert [r["value"] for r in rows] == expected
    torch.manual_seed(seed_for(5, "pyhessian trace"))
    samples = engine.trace(maxIter=100, tol=1e-3)
    (row,) = reference.trace(p, seed=5)
    assert row["value"] == pytest.approx(np.mean(samples), rel=1e-12) and row["products"] == len(
        samples
    )
    assert row["estimator"] == "pyhessian" and all(r["estimator"] == "pyhessian" for r in rows)


def test_residuals_hold_against_the_dense_hessian():
    p = problem()
    true = torch.linalg.eigvalsh(dense(p))
    for row in values(reference.eigenvalues(p, 5)):
        assert float((true - row["value"]).abs().min()) <= row["residual"] + 1e-5
    first = values(reference.eigenvalues(p, 1, tol=1e-7, most=400))[0]
    assert first["value"] == pytest.approx(float(true[-1]), rel=1e-4) and first["residual"] < 0.02


def test_largest_magnitude_comes_first_and_convergence_is_its_own():
    rows = values(reference.eigenvalues(quadratic(np.diag([5.0, 2.0, 0.5, -9.0])), 3, tol=1e-6))
    assert [r["value"] for r in rows] == pytest.approx([-9, 5, 2], rel=1e-3) and all(
        r["converged"] for r in rows
    )
    close = values(reference.eigenvalues(quadratic(np.diag([1.0, -1.0, 0.2])), 1, most=20))[0]
    assert close["residual"] > 0.05  # it never settles between 1 and -1, whatever it says
    cut = values(reference.eigenvalues(quadratic(np.diag([1.0, 0.9, 0.2])), 1, tol=1e-9, most=4))[0]
    assert not cut["converged"] and cut["products"] == 4


def test_a_zero_hessian_and_k_beyond_the_weights():
    rows = reference.eigenvalues(quadratic(np.zeros((3, 3))), 7)
    assert (
        [r["value"] for r in values(rows)] == [0, 0, 0]
        and rows[-1]["metric"] == "eigenvalue_ratio"
        and rows[-1]["value"] is None
    )


def test_replay_of_the_stopping_rule():
    # 1st: 2.0 -> 2.001 stops; 2nd: reaches the limit of 4; 3rd: stops at its second product
    quotients = [1.0, 2.0, 2.001, 5.0, 4.0, 3.0, 2.0, 0.5, 0.5]
    assert iterations(quotients, 3, 1e-2, 4) == [(3, True), (4, False), (2, True)]


def test_a_negative_mean_stops_the_trace_at_once():
    """As the package does: it divides by the signed mean. The same matrix with the other sign takes more probes."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(12, 12))
    a = a @ a.T
    up, down = (
        reference.trace(quadratic(a), tol=1e-6)[0],
        reference.trace(quadratic(-a), tol=1e-6)[0],
    )
    assert down["products"] == 2 < up["products"] and down["stderr"] is None
    assert abs(up["value"] - np.trace(a)) < 6 * up["stderr"]


def test_nothing_of_the_callers_is_touched():
    net, seen = network().train(), []
    before = (
        torch.get_rng_state(),
        np.random.get_state()[1].copy(),
        random.getstate(),
        torch.is_grad_enabled(),
    )
    state = {n: t.clone() for n, t in net.state_dict().items()}
    p = problem(net=net)
    with Workspace(progress=lambda *a: seen.append(a)):
        reference.eigenvalues(p, 2)

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Workspace(progress=stop):
        reference.trace(p)
    assert all(torch.equal(state[n], t) for n, t in net.state_dict().items()) and net.training
    assert all(q.grad is None for q in [*net.parameters(), *p.module.parameters()])
    after = (
        torch.get_rng_state(),
        np.random.get_state()[1].copy(),
        random.getstate(),
        torch.is_grad_enabled(),
    )
    assert (
        torch.equal(before[0], after[0])
        and (before[1] == after[1]).all()
        and before[2:] == after[2:]
    )
    assert seen and all(0 < done <= total and text for done, total, text in seen)


def test_given_weights_and_buffers_are_those_diagnosed():
    p = problem()
    moved = {n: t + 0.3 for n, t in network().state_dict().items() if t.is_floating_point()}
    other = problem(
        params={n: t for n, t in moved.items() if "running" not in n},
        buffers={n: t for n, t in moved.items() if "running" in n},
    )
    a, b = (values(reference.eigenvalues(q, 1, tol=1e-6, most=300))[0]["value"] for q in (p, other))
    assert b == pytest.approx(float(torch.linalg.eigvalsh(dense(other))[-1]), rel=1e-3) and abs(
        a - b
    ) > 0.05 * abs(b)


@pytest.mark.slow
def test_batches_weigh_by_their_size():
    whole, cut = problem(41), problem(41, memory=1)
    assert len(cut.bounds) > 1 == len(whole.bounds)
    a, b = (values(reference.eigenvalues(p, 2, tol=1e-6, most=300)) for p in (whole, cut))
    assert [r["value"] for r in a] == pytest.approx([r["value"] for r in b], rel=1e-4)


def test_a_few_batches_drawn_once_or_for_every_product():
    p = problem(200)
    once = Batching(batches=2, size=64)
    a, b = (reference.eigenvalues(p, 1, sampling=once) for _ in range(2))
    assert (
        a == b
        and values(a)[0]["n_examples"] == 128
        and values(reference.eigenvalues(p, 1))[0]["n_examples"] == 200
    )
    assert (
        values(reference.eigenvalues(p, 1, sampling=once, seed=1))[0]["value"]
        != values(a)[0]["value"]
    )
    loader = reference._Loader(p, once, 0)
    first, second = ([x for x, _ in loader] for _ in range(2))
    assert [len(x) for x in first] == [64, 64] and all(
        torch.equal(s, t) for s, t in zip(first, second, strict=True)
    )
    fresh = reference._Loader(p, Batching(batches=2, size=64, resample=True), 0)
    first, second = (torch.cat([x for x, _ in fresh]) for _ in range(2))
    assert len(first.unique(dim=0)) == 128 and not torch.equal(first, second)
    assert (
        reference._Loader(p, Batching(batches=10, size=64), 0).n == 192
    )  # the incomplete last batch is dropped


@pytest.mark.parametrize("run", [lambda p, **o: reference.eigenvalues(p, 2, **o), reference.trace])
def test_refusals(run, monkeypatch):
    with pytest.raises(FldiagError, match="use precision fp32"):
        run(problem(dtype=torch.float64))
    with pytest.raises(FldiagError, match="has 40 examples, fewer than one batch of 64"):
        run(problem(), sampling=Batching(batches=1))
    with pytest.raises(FldiagError, match="0 < tol < 1"):
        run(problem(), tol=0.0)
    bad = network()
    with torch.no_grad():
        bad[0].weight.fill_(float("nan"))
    with pytest.raises(FldiagError):
        run(problem(net=bad))
    linear = Problem(Weights(3), lambda z, y: z.sum(1).mean(), (torch.zeros(3, 1), torch.zeros(3)))
    with pytest.raises(FldiagError, match="PyHessian cannot differentiate this model"):
        run(linear)
    monkeypatch.setitem(sys.modules, "pyhessian", None)
    with pytest.raises(FldiagError, match="PyHessian is not installed"):
        run(problem())


def test_rows_fit_the_schema():
    frame = check(
        table(
            reference.eigenvalues(problem(name="mine"), 2) + reference.trace(problem(name="mine"))
        )
    )
    assert set(frame.run) == {"mine"} and frame.estimator.notna().all()
    assert frame.metric.tolist() == [
        "loss",
        "accuracy",
        "eigenvalue",
        "eigenvalue",
        "eigenvalue_ratio",
        "trace",
    ]
