"""Lines: parabolas that touch, barriers that are what they are called, resuming, and which buffers were used."""

import copy
import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fldiag.diagnostics.profile import profile
from fldiag.errors import FldiagError
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.problem.problem import Problem
from fldiag.results.table import check


class Weights(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values))

    def forward(self, x):
        return self.w.expand(len(x), -1) + 0 * x


def of_weights(function, values=(1.0, 2.0, 0.5)):
    """A problem whose loss is a function of the weights: ``function(z)`` for rows z [n, P]."""
    return Problem(
        Weights(values),
        lambda z, y: (function(z) * (1 + y)).mean(),
        (torch.zeros(4, 1), torch.tensor([-0.5, 0, 0, 0.5])),
        dtype=torch.float64,
        name="a",
    )


def network(norm=False, seed=0, **options):
    torch.manual_seed(seed)
    x, y = torch.randn(24, 2, 5, 5), torch.arange(24) % 3
    body = [nn.BatchNorm2d(4)] if norm else []
    net = nn.Sequential(nn.Conv2d(2, 4, 3), *body, nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))
    return Problem(net, cross_entropy, (x, y), name="a", **options)


def values(frame, metric, index=1):
    part = frame[(frame.metric == metric) & (frame["index"] == index)].sort_values("x")
    return part.value.to_numpy(dtype=float)


def test_on_a_quadratic_the_parabola_is_the_loss():
    h = torch.tensor([5.0, 3.0, -1.0], dtype=torch.float64)
    frame = check(
        profile(
            of_weights(lambda z: 0.5 * (h * z * z).sum(1)), lines=2, points=9, span=2.0, tol=1e-8
        )
    )
    for i in (1, 2):
        np.testing.assert_allclose(
            values(frame, "loss", i), values(frame, "parabola", i), rtol=1e-9
        )
        assert values(frame, "curvature", i)[0] == pytest.approx([5.0, 3.0][i - 1])
        assert abs(values(frame, "slope", i)[0]) == pytest.approx(
            abs([5.0 * 1.0, 3.0 * 2.0][i - 1])
        )
    assert (
        frame[frame.metric == "loss"].x.min() == -2.0 and (frame.metric == "eigenvalue").sum() == 3
    )


@pytest.mark.parametrize("directions", ["eigen", "random"])
def test_the_parabola_touches_the_loss_at_the_weights(directions):
    p = network(dtype=torch.float64)
    frame = profile(p, directions=directions, points=5, span=1e-3, lines=2, tol=1e-8)
    for i in (1, 2):
        loss, bowl = values(frame, "loss", i), values(frame, "parabola", i)
        assert loss[2] == bowl[2] == p.loss()[0]
        assert (
            np.abs(loss - bowl).max() < 1e-6 < np.abs(loss - loss[2]).max()
        )  # third order against first
        assert (
            np.abs(loss - bowl).max() < 0.01 * abs(values(frame, "curvature", i)[0]) * 1e-6 + 1e-8
        )
    if directions == "eigen":
        assert values(frame, "curvature", 1)[0] == eigenpairs(p, 5, tol=1e-8).values[0]


def test_a_double_well_has_a_barrier_of_its_height_and_a_valley_none():
    wells = of_weights(lambda z: (z[:, 0] ** 2 - 1) ** 2 + 0.3 * (z[:, 0] + 1))
    frame = check(
        profile(wells, directions="through", through={7: torch.tensor([-1.0, 2.0, 0.5])}, points=41)
    )
    row = frame[frame.metric == "barrier"].iloc[0]
    assert (row.value, row.x, row.client) == (
        pytest.approx(1.0),
        pytest.approx(0.5),
        7,
    )  # the tilt is no barrier
    each = np.array([0.5, 1.0, 1.0, 1.5])  # the weights of the examples: so much barrier each has
    assert row.stderr == pytest.approx(each.std(ddof=1) / 2)
    losses = frame[frame.metric == "loss"]
    assert (
        losses.x.min() == 0
        and losses.x.max() == 1
        and (losses.client == 7).all()
        and losses.value.iloc[0] == wells.loss()[0]
    )
    assert frame[frame.metric == "distance"].value.item() == pytest.approx(2.0)
    bowl = profile(
        of_weights(lambda z: (z * z).sum(1)),
        directions="through",
        through=[torch.tensor([-1.0, 3.0, 0.0])],
    )
    row = bowl[bowl.metric == "barrier"].iloc[0]
    assert (
        row.value == 0 and pd.isna(row.x) and pd.isna(row.client) and "buffers" not in bowl.columns
    )


def test_the_end_of_a_path_is_the_other_model():
    p, other = network(dtype=torch.float64), network(seed=5, dtype=torch.float64)
    frame = profile(p, directions="through", through=[p.w + 1.0, other.w], points=5)
    assert values(frame, "loss", 2)[-1] == pytest.approx(p.loss(other.w)[0], rel=1e-12)
    middle = p.loss(p.w + 0.5 * (other.w - p.w))[0]
    assert (
        values(frame, "loss", 2)[2] == pytest.approx(middle, rel=1e-12)
        and values(frame, "loss", 1)[0] == p.loss()[0]
    )


def test_overflow_between_sound_ends_is_an_infinite_barrier():
    spike = of_weights(lambda z: torch.where((z[:, 0]).abs() < 0.3, math.inf, z[:, 0] ** 2))
    frame = profile(spike, directions="through", through=[torch.tensor([-1.0, 2.0, 0.5])])
    assert frame[frame.metric == "barrier"].value.item() == math.inf


def test_batch_norm_statistics_go_along_when_the_end_brings_them():
    p, other = (
        network(norm=True, dtype=torch.float64),
        network(norm=True, seed=3, dtype=torch.float64),
    )
    there = {n: b + 0.7 if b.is_floating_point() else b for n, b in other.buffers.items()}
    named = {**other.layout.views(other.w), **there}
    both = profile(p, directions="through", through={1: named, 2: other.w}, points=3)
    assert both[both["index"] == 1].buffers.unique() == ["interpolated"] and both[
        both["index"] == 2
    ].buffers.unique() == ["fixed"]
    x, y = p.read(0, p.n)

    def loss(share, moving):
        net = copy.deepcopy(p.module)
        mixed = {
            n: torch.lerp(b, there[n], share) if moving and b.is_floating_point() else b
            for n, b in p.buffers.items()
        }
        net.load_state_dict({**p.layout.views(torch.lerp(p.w, other.w, share)), **mixed})
        with torch.no_grad():
            return float(cross_entropy(net(x), y))

    for i, moving in ((1, True), (2, False)):
        np.testing.assert_allclose(
            values(both, "loss", i), [loss(t, moving) for t in (0.0, 0.5, 1.0)], rtol=1e-10
        )


def test_wrong_use_is_explained():
    with pytest.raises(FldiagError, match="odd number"):
        profile(network(), points=4)
    for through in (None, [], "abc"):
        with pytest.raises(FldiagError, match="at least 1 weight set besides"):
            profile(network(), directions="through", through=through)
    with pytest.raises(FldiagError, match="needs a vector of 187"):
        profile(network(), directions="through", through=[torch.ones(3)])
    with pytest.raises(FldiagError, match="4 lines need as many eigenvectors"):
        profile(of_weights(lambda z: (z * z).sum(1)), lines=4)
