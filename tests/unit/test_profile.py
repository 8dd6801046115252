"""Lines: parabolas that touch, barriers that are what they are called, resuming, and which buffers were used."""

import numpy as np
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


def test_wrong_use_is_explained():
    with pytest.raises(FldiagError, match="odd number"):
        profile(network(), points=4)
    with pytest.raises(FldiagError, match="4 lines need as many eigenvectors"):
        profile(of_weights(lambda z: (z * z).sum(1)), lines=4)
