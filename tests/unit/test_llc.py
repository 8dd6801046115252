"""The local learning coefficient: quadrature of normal crossings, exact quadratics, and reduced-rank regression."""

import math
from itertools import islice

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag
from fldiag.curvature.langevin import inflation, langevin, split_r_hat
from fldiag.diagnostics.llc import draw, llc, summary
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem


class Weights(nn.Module):
    """The weights themselves, for each example."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.as_tensor(w, dtype=torch.float64))

    def forward(self, x):
        return self.w.expand(len(x), -1)


def problem_of(loss, w, n=100, **options):
    """A loss of the weights [n, P] -> [n] on n examples that do not matter."""
    data = torch.zeros(n, 1, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    return Problem(Weights(w), lambda z, y: loss(z).mean(), data, dtype=torch.float64, **options)


def row(frame, metric):
    (part,) = frame[frame["metric"] == metric].itertuples()
    return part


def nbeta(n):
    return n / math.log(n)


def crossing(power, n, gamma):
    """n beta E[L] of L = w1^2 w2^power by quadrature, on a grid that is fine near the axes."""
    t = np.linspace(-18, 18, 2001)
    w, share = 1e-7 * np.sinh(t), np.cosh(t)
    x, y = w[:, None], w[None, :]
    energy = nbeta(n) * x**2 * y**power
    density = np.exp(-energy - gamma / 2 * (x**2 + y**2)) * share[:, None] * share[None, :]
    return float((energy * density).sum() / density.sum())


def mean_of_chains(energy, gradient, start, step, gamma, burn_in, steps):
    """The mean of an energy over chains that are the rows of ``start``, and its standard error over them."""
    rng = torch.Generator().manual_seed(0)
    states = langevin(gradient, start, step, gamma, rng)
    draws = torch.stack([energy(w) for w in islice(states, burn_in, burn_in + steps, 50)])
    means = draws.mean(0)
    return float(means.mean()), float(means.std()) / math.sqrt(len(means))


def sampled_crossing(power, n, gamma, step, burn_in, steps):
    factor = nbeta(n)

    def gradient(w):
        x, y = w[:, 0], w[:, 1]
        return factor * torch.stack([2 * x * y**power, power * x**2 * y ** (power - 1)], 1)

    def energy(w):
        return factor * w[:, 0] ** 2 * w[:, 1] ** power

    start = torch.zeros(100, 2, dtype=torch.float64)
    return mean_of_chains(energy, gradient, start, step, gamma, burn_in, steps)


@pytest.mark.parametrize("power", [2, 4, 6])
def test_normal_crossings_are_those_of_quadrature(power):
    value, stderr = sampled_crossing(power, 1e3, 10.0, 2e-4, burn_in=3000, steps=6000)
    expected = crossing(power, 1e3, 10.0)
    assert abs(value - expected) < 3 * stderr
    assert stderr < 0.15 * expected


@pytest.mark.slow
@pytest.mark.parametrize("power", [2, 4, 6])
def test_normal_crossings_at_more_examples_are_those_of_quadrature(power):
    value, stderr = sampled_crossing(power, 1e5, 10.0, 4e-6, burn_in=150_000, steps=250_000)
    expected = crossing(power, 1e5, 10.0)
    assert abs(value - expected) < 3 * stderr
    assert stderr < 0.15 * expected


@pytest.mark.parametrize("power, n, error", [(2, 1e3, 0.28), (4, 1e5, 0.1), (6, 1e5, 0.1)])
def test_quadrature_approaches_the_real_log_canonical_threshold(power, n, error):
    limit = 1 / power
    assert abs(crossing(power, n, 1.0) / limit - 1) < error + 0.005


def learning_coefficient(m, h, n, r):
    """Of an m -> h -> n linear network whose truth has rank r (Aoyagi and Watanabe 2005: their four cases)."""
    s = h + r
    if n + r <= m + h and m + r <= n + h and s <= m + n:
        total = -(s**2) - m**2 - n**2 + 2 * s * m + 2 * s * n + 2 * m * n
        return (total + (m + n + s) % 2) / 8
    if m + h < n + r:
        return (h * m - h * r + n * r) / 2
    if n + h < m + r:
        return (h * n - h * r + m * r) / 2
    return m * n / 2


@pytest.mark.slow
@pytest.mark.parametrize("m, h, n, r", [(4, 2, 4, 0), (3, 2, 6, 0), (4, 3, 4, 1)])
def test_reduced_rank_regression_within_a_tenth(m, h, n, r):
    """L = ||BA - B*A*||^2 / 2, the population loss of standard normal inputs, around its most singular minimum."""
    factor = nbeta(1e6)
    first, second = (torch.zeros(shape, dtype=torch.float64) for shape in ((h, m), (n, h)))
    for i in range(r):
        first[i, i] = second[i, i] = 1
    truth, start = second @ first, torch.cat([first.flatten(), second.flatten()])

    def layers(w):
        a, b = w[:, : h * m].view(-1, h, m), w[:, h * m :].view(-1, n, h)
        return a, b, b @ a - truth

    def gradient(w):
        a, b, error = layers(w)
        return factor * torch.cat([(b.mT @ error).flatten(1), (error @ a.mT).flatten(1)], 1)

    def energy(w):
        return factor * layers(w)[2].square().sum((1, 2)) / 2

    value, _ = mean_of_chains(energy, gradient, start.expand(20, -1), 1e-6, 10.0, 60_000, 60_000)
    assert value == pytest.approx(learning_coefficient(m, h, n, r), rel=0.1)


def test_known_learning_coefficients():
    assert learning_coefficient(1, 1, 1, 0) == 0.5  # w1 w2: a normal crossing
    assert learning_coefficient(1, 1, 1, 1) == 0.5  # w1 w2 = 1: a smooth curve
    assert learning_coefficient(2, 5, 2, 2) == 2  # all 2 x 2 matrices are reached


def quadratic(curvatures, slope=0.0, n=100):
    h = torch.tensor(curvatures, dtype=torch.float64)
    return problem_of(lambda z: (h / 2 * z**2 + slope * z).sum(1), torch.zeros(len(h)), n)


def test_of_a_quadratic_it_is_the_sum_over_its_directions():
    """Each direction of stationary variance v = (1 + bias) / (n beta h + gamma) adds n beta h v / 2."""
    curvatures, gamma, n, step = [0.5, 1.0, 4.0], 5.0, 100, 0.01
    frame = llc(quadratic(curvatures, n=n), gamma=gamma, step=step, chains=12, draws=40, thin=2)
    energies = [nbeta(n) * h for h in curvatures]
    expected = sum(e / 2 * (1 + inflation(e + gamma, step)) / (e + gamma) for e in energies)
    estimate = row(frame, "llc")
    assert abs(estimate.value - expected) < 3 * estimate.stderr
    assert estimate.converged and estimate.r_hat < 1.1
    assert estimate.nbeta == pytest.approx(nbeta(n))
    assert row(frame, "below").value == 0
    bias = inflation(nbeta(n) * 4 + gamma, step)
    assert row(frame, "step_bias").value == pytest.approx(bias, rel=1e-6)
    means = frame[frame["metric"] == "chain_mean"]["value"].astype(float)
    assert estimate.value == pytest.approx(means.mean())
    assert estimate.stderr == pytest.approx(means.std() / math.sqrt(12))


def test_the_bias_of_a_step_is_that_of_its_stationary_variance():
    curvature, step, noise = 3.0, 0.4, 2.0
    rng = torch.Generator().manual_seed(1)

    def gradient(w):
        return 2.0 * w + math.sqrt(noise) * torch.randn(w.shape, dtype=w.dtype, generator=rng)

    start = torch.zeros(20_000, 1, dtype=torch.float64)
    for s, estimate in ((0.0, lambda w: 2.0 * w), (noise, gradient)):
        states = langevin(estimate, start, step, curvature - 2.0, torch.Generator().manual_seed(0))
        variance = float(next(islice(states, 40, None)).var())
        expected = (1 + inflation(curvature, step, s)) / curvature
        assert abs(variance / expected - 1) < 4 * math.sqrt(2 / len(start))
    assert inflation(curvature, 4 / curvature) == math.inf


def test_split_r_hat_by_hand():
    chains = torch.tensor([[1.0, 3.0, 2.0, 4.0], [2.0, 4.0, 5.0, 3.0]])
    means, within, half = np.array([2.0, 3.0, 3.0, 4.0]), 2.0, 2
    expected = math.sqrt(((half - 1) / half * within + means.var(ddof=1)) / within)
    assert split_r_hat(chains) == pytest.approx(expected)
    noise = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    assert split_r_hat(noise) == pytest.approx(1, abs=0.01)
    assert split_r_hat(noise + torch.linspace(0, 3, 1000)) > 1.1  # a drift that all chains share
    assert split_r_hat(torch.zeros(2, 8)) == 1


def test_weights_that_are_no_minimum_are_masked():
    frame = llc(quadratic([1.0, 1.0], slope=3.0), gamma=1.0, draws=20)
    estimate = row(frame, "llc")
    assert estimate.masked and pd.isna(estimate.value) and "no minimum" in estimate.note
    assert row(frame, "below").value > 0.5


def test_chains_that_disagree_are_masked():
    frame = llc(quadratic([1e-3, 1e-3]), gamma=1e-3, step=1e-3, draws=20, thin=1)
    estimate = row(frame, "llc")
    assert estimate.masked and not estimate.converged and "chains disagree" in estimate.note


def test_chains_that_leave_are_masked_and_the_remedy_works():
    frame = llc(quadratic([10.0]), step=1.0, draws=40)
    estimate = row(frame, "llc")
    assert estimate.masked and "a chain left" in estimate.note
    step = float(estimate.note.split("--step ")[1])
    while pd.isna(row(frame, "llc").value):
        frame, step = llc(quadratic([10.0]), step=step, draws=20), step / 10
    assert step > 1e-5


def test_the_default_step_knows_the_curvature_where_chains_go():
    """A quartic has no curvature at its centre, but much where chains go."""
    frame = llc(problem_of(lambda z: z.pow(4).sum(1), [0.0] * 10), gamma=1.0, draws=16)
    assert row(frame, "llc").step < 0.1
    assert row(frame, "step_bias").value < 0.5


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def examples(n=24):
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, generator=g), torch.arange(n) % 2


SHORT = {"draws": 8, "thin": 2, "gamma": 1000.0}


def test_the_same_seed_gives_the_same_bits_and_the_model_is_untouched():
    net = network()
    before = [p.clone() for p in net.parameters()]
    frames = [llc(Problem(net, cross_entropy, examples()), m=6, seed=s, **SHORT) for s in (0, 0, 1)]
    excess = [f[f["metric"] == "excess"]["value"].astype(float).to_numpy() for f in frames]
    assert (excess[0] == excess[1]).all() and (excess[0] != excess[2]).any()
    assert all(map(torch.equal, before, net.parameters()))


def test_minibatches_of_all_examples_are_the_whole_and_smaller_ones_are_unbiased():
    from fldiag.diagnostics.llc import gradient_of_minibatches

    problem = Problem(network(), cross_entropy, examples(), dtype=torch.float64, weight_decay=0.1)
    whole, of_all = (llc(problem, m=m, **SHORT) for m in (None, 24))
    assert whole["value"].equals(of_all["value"])
    w = problem.w + 0.1
    for size, tolerance in ((24, 1e-9), (6, 0.1)):
        gradient = gradient_of_minibatches(problem, size, 0, 0)
        mean = torch.stack([gradient(w) for _ in range(400)]).mean(0)
        expected = problem.gradient(w)
        assert float((mean - expected).norm() / expected.norm()) < tolerance


def test_what_has_no_learning_coefficient_is_refused():
    one = examples(1)
    with pytest.raises(FldiagError, match="one example"):
        llc(Problem(network(), cross_entropy, one))
    total = Problem(network(), nn.CrossEntropyLoss(reduction="sum"), examples(), reduction="sum")
    with pytest.raises(FldiagError, match="sum"):
        llc(total)
    coupled = Problem(
        network(), lambda z, y: cross_entropy(z, y) ** 0.5, examples(), reduction="batch"
    )
    with pytest.raises(FldiagError, match="couples"):
        llc(coupled, m=4)


@pytest.mark.parametrize("options", [{"chains": 1}, {"gamma": 0}, {"step": 0}, {"m": 0}])
def test_wrong_options_are_refused(options):
    with pytest.raises(FldiagError, match="is not valid"):
        fldiag.diagnose(Problem(network(), cross_entropy, examples()), "llc", **options)


def test_the_picture_shows_the_numbers():
    frames = [
        llc(Problem(network(), cross_entropy, examples(), name=f"net {i}"), seed=i, **SHORT)
        for i in range(2)
    ]
    for frame in frames:  # whatever so short chains say
        place = frame["metric"] == "llc"
        frame.loc[place, ["value", "stderr"]] = [1.5, 0.25]
    frame = pd.concat(frames)
    fig = draw(frame)
    assert [ax.get_title() for ax in fig.axes] == ["net 0", "net 1"]
    for ax, part in zip(fig.axes, frames, strict=True):
        chains = part[part["metric"] == "excess"].groupby("chain")
        assert len(ax.lines) == len(chains) + 1
        for shown, (_, chain) in zip(ax.lines, chains, strict=False):
            assert np.allclose(shown.get_ydata(), chain["value"].astype(float))
            assert np.allclose(shown.get_xdata(), chain["index"].astype(float))
        assert set(ax.lines[-1].get_ydata()) == {1.5}
    small = next(iter(summary(frame, {})))
    assert [r["value"] for r in small.rows] == [1.5, 1.5]
