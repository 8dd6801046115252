"""Sharpness: the trust-region value on quadratics, what rescaling leaves alone, and the released procedure as a lower bound."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import brentq
from torch import nn
from torch.nn.functional import cross_entropy

from fldiag.diagnostics.sharpness import (
    adaptive_scale,
    average_case,
    climb,
    draw,
    sharpness,
    summary,
    worst_case,
)
from fldiag.problem.problem import Problem
from fldiag.results.table import number


class Weights(nn.Module):
    """The weights themselves, for each example."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.as_tensor(w, dtype=torch.float64))

    def forward(self, x):
        return self.w.expand(len(x), -1)


def of_weights(w, loss, n=3):
    """A problem whose loss is the mean of ``loss(z)`` over rows z [n, P] of the weights."""
    data = torch.zeros(n, 1), torch.zeros(n)
    return Problem(Weights(w), lambda z, y: loss(z).mean(), data, dtype=torch.float64)


def quadratic(w, hessian, b=0.0):
    """F(w') = (w' - w)'H(w' - w)/2 + b'(w' - w)."""
    w, hessian, b = (torch.as_tensor(v, dtype=torch.float64) for v in (w, hessian, b))
    b = b.expand(len(w))
    return of_weights(w, lambda z: 0.5 * (((z - w) @ hessian) * (z - w)).sum(1) + (z - w) @ b)


def trust_region(hessian, b, rho):
    """max over ||u|| <= rho of u'Hu/2 + b'u: the secular equation on the eigenvalues of H, the largest of which is positive."""
    values, vectors = np.linalg.eigh(hessian)
    beta = vectors.T @ b
    low = values[-1] + 1e-12
    mu = brentq(lambda mu: np.linalg.norm(beta / (mu - values)) - rho, low, values[-1] + 1e4)
    u = vectors @ (beta / (mu - values))
    return float(u @ hessian @ u / 2 + b @ u)


def symmetric(n, seed):
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))
    return q @ np.diag(np.linspace(-2.0, 3.0, n)) @ q.T


@pytest.mark.parametrize("rho", [0.1, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_worst_case_of_a_quadratic_is_the_trust_region_value(seed, rho, monkeypatch):
    """At a stationary point rho^2 / 2 times the largest eigenvalue of T H T."""
    rng = np.random.default_rng(seed)
    w, b, hessian = rng.normal(size=5), rng.normal(size=5), symmetric(5, seed)
    options = {"steps": 400, "seed": seed}
    monkeypatch.setattr("fldiag.diagnostics.sharpness.TOL", 1e-10)
    for problem_scale, scale in ((np.abs(w), adaptive_scale), (np.ones(5), torch.ones_like)):
        matrix = np.diag(problem_scale) @ hessian @ np.diag(problem_scale)
        for slope, expected in (
            (0.0, rho**2 / 2 * np.linalg.eigvalsh(matrix)[-1]),
            (b, trust_region(matrix, problem_scale * b, rho)),
        ):
            problem = quadratic(w, hessian, slope)
            at = scale(problem if scale is adaptive_scale else problem.w)
            row = worst_case(problem, at, rho, **options)
            assert row["value"] == pytest.approx(expected, rel=1e-5) and row["converged"]


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_the_higher_side_counts(side):
    """F(2 + d) - F(2) = d^2/2 + side d^3/10 rises on both sides, and from a start on one none leads to the other."""
    problem = of_weights([2.0], lambda z: ((z - 2) ** 2 / 2 + side * (z - 2) ** 3 / 10).sum(1))
    frame = sharpness(problem, rho=0.5, plain_rho=1.0)
    for metric in ("adaptive_sharpness", "plain_sharpness"):  # both of them: |d| <= 1
        assert number(frame, metric) == pytest.approx(1 / 2 + 1 / 10)


def test_a_maximum_does_not_rise_and_a_flat_function_ends_at_once():
    frame = sharpness(quadratic([1.0, 2.0], -np.eye(2)), steps=50)
    assert number(frame, "adaptive_sharpness") == number(frame, "plain_sharpness") == 0.0
    assert number(frame, "adaptive_average") < 0
    rise, u, converged = climb(
        lambda u: 0.0, torch.zeros_like, 1.0, torch.ones(3), steps=5, tol=1e-3
    )
    assert (rise, u.tolist(), converged) == (0.0, [0.0] * 3, True)


def test_the_average_case_is_half_the_trace_in_the_scale_of_the_weights():
    """A weight of exactly 0 stays in the scale of the weights."""
    w, hessian, s = np.array([1.0, -2.0, 0.0]), np.diag([3.0, 1.0, -2.0]), 0.2
    frame = sharpness(quadratic(w, hessian), deviation=s, plain_deviation=s, draws=2000)
    for metric, scale in (("adaptive_average", np.abs(w)), ("plain_average", np.ones(3))):
        value, stderr = (number(frame, metric, column=c) for c in ("value", "stderr"))
        assert abs(value - s**2 / 2 * (np.diag(hessian) * scale**2).sum()) < 4 * stderr
        assert stderr < 0.2 * abs(value)


def test_standard_errors_are_of_the_rise_over_examples_and_of_the_mean_over_draws(monkeypatch):
    x, y = torch.zeros(3, 1), torch.tensor([1.0, 2.0, 3.0])

    def bowl(z, y):
        return (y * (1 + 0.5 * z.square().sum(1))).mean()

    p = Problem(Weights([0.0, 0.0]), bowl, (x, y), dtype=torch.float64)
    row = worst_case(p, torch.ones(2), 1.0, steps=50, seed=0)
    # the examples rise by y / 2
    assert (row["value"], row["stderr"]) == (pytest.approx(1), pytest.approx(0.5 / 3**0.5))
    losses = iter([(3.0, None), (6.0, None)])
    monkeypatch.setattr(p, "loss", lambda w: next(losses))
    row = average_case(p, torch.ones(2), 1.0, 2, 0)
    assert (row["value"], row["stderr"]) == (2.5, pytest.approx(1.5))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False))


def examples(n=40):
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 5, generator=g), torch.arange(n) % 3


def scaled(net, factor):
    """The same function: the first layer times a factor, the last divided by it."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        for p in net[0].parameters():
            p *= factor
        net[-1].weight /= factor
    return net


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rescaling_that_leaves_the_function_alone_leaves_adaptive_numbers_alone(dtype):
    a, b = (
        sharpness(Problem(net, cross_entropy, examples(), dtype=dtype), draws=3)
        for net in (network(), scaled(network(), 5.0))
    )
    for case in ("sharpness", "average"):
        adaptive, plain = (
            [number(f, f"{k}_{case}") for f in (a, b)] for k in ("adaptive", "plain")
        )
        assert adaptive[1] == pytest.approx(adaptive[0], rel=1e-4)
        assert abs(plain[1] / plain[0] - 1) > 0.1


def released_procedure(problem, rho, steps=20):
    """The ascent of the released code of Andriushchenko et al. (2023): delta moves by 2 rho T g / ||g||, is projected on the
    ellipsoid (nearest point in delta, by bisection), and averaged with a momentum of 0.75; the largest loss counts."""
    scales, w = adaptive_scale(problem), problem.w.double()
    g = torch.Generator().manual_seed(0)
    delta = rho * scales * torch.randn(len(w), generator=g, dtype=torch.float64)
    before, centre, best = delta.clone(), problem.loss()[0], 0.0
    for _ in range(steps):
        gradient = problem.gradient(w + delta)
        ahead = delta + 2 * rho * scales * gradient / gradient.norm()
        if float((ahead / scales).norm()) > rho:

            def excess(mu, ahead=ahead):
                return float((ahead / (1 + 2 * mu / scales**2) / scales).norm()) - rho

            ahead = ahead / (1 + 2 * brentq(excess, 0, 1e6) / scales**2)
        delta, before = 0.75 * ahead + 0.25 * before, delta
        if float((delta / scales).norm()) <= rho * (
            1 + 1e-9
        ):  # an average with the start is outside
            best = max(best, problem.loss(w + delta)[0] - centre)
    return best


@pytest.mark.parametrize("rho", [0.05, 0.5])
def test_not_below_the_released_procedure_in_at_most_twenty_gradients(rho, monkeypatch):
    problem = Problem(network(), cross_entropy, examples(), dtype=torch.float64)
    theirs = released_procedure(problem, rho)
    ours = number(sharpness(problem, rho=rho, steps=20), "adaptive_sharpness")
    assert theirs > 0 and ours >= theirs * (1 - 1e-3)
    calls, gradient = [], Problem.gradient
    monkeypatch.setattr(Problem, "gradient", lambda *a: calls.append(1) or gradient(*a))
    sharpness(problem, draws=1)
    assert 2 <= len(calls) <= 20


@pytest.mark.parametrize("overflow", [torch.exp, lambda v: v + torch.log(50 - v)])
def test_an_overflow_within_the_radius_is_masked(overflow):
    """To infinity, and to what is no number: neither is a rise of 0."""
    problem = of_weights([1.0, 1.0], lambda z: overflow(z.square().sum(1)))
    frame = sharpness(problem, rho=100.0, deviation=100.0).set_index("metric")
    for metric in ("adaptive_sharpness", "adaptive_average"):
        assert frame.loc[metric, "masked"] and "not finite" in frame.loc[metric, "note"]
    assert any("not finite" in item.text for item in [*summary(frame.reset_index(), {})][1:])


def test_picture_and_summary_show_the_numbers():
    frame = pd.concat(
        sharpness(Problem(net, cross_entropy, examples(), name=f"net {i}"), draws=3)
        for i, net in enumerate((network(), scaled(network(), 2.0)))
    )
    fig = draw(frame)
    widths = sorted(patch.get_width() for ax in fig.axes for patch in ax.patches)
    numbers = frame[frame["metric"].str.contains("adaptive|plain")]["value"].astype(float)
    assert widths == pytest.approx(sorted(numbers))
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ["net 0", "net 1"]
    assert len(next(iter(summary(frame, {}))).rows) == 8
