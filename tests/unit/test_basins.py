"""Basins: closed forms along every direction, planted walls, and what is masked."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.results.select import number, only


class Point(nn.Module):
    """Its weights are its outputs."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.as_tensor(w, dtype=torch.float64))

    def forward(self, x):
        return self.w.expand(len(x), -1)


def around(loss, w=(3.0, 4.0), y=None, n=4):
    return Problem(Point(w), loss, (torch.zeros(n, 1), torch.zeros(n) if y is None else y), name="p", dtype=torch.float64)


CENTRE = torch.tensor([3.0, 4.0], dtype=torch.float64)  # of norm 5


def away(z):
    return (z - CENTRE).norm(dim=1)


def basins(problem, **options):
    return fldiag.diagnose(problem, "basins", **{"draws": 7, "rtol": 1e-4, **options})


def test_a_bowl_is_left_at_the_same_radius_in_every_direction():
    frame = basins(around(lambda z, y: (1 + away(z).square() / 2).mean()))
    exact = 0.2**0.5 / 5
    radii = only(frame, metric="radius", direction="random")
    assert radii.value.to_numpy(float) == pytest.approx(exact, rel=1e-4) and (radii.residual <= 1.001e-4 * radii.value).all()
    most = only(frame, metric="most_case", criterion="loss").iloc[0]
    assert (most.value, most.low, most.high) == pytest.approx((exact,) * 3, rel=1e-4) and most.crossed == 7 and most.stderr < 1e-4
    uphill = only(frame, metric="radius", direction="ascent").iloc[0]
    assert uphill.masked and "rounding noise" in uphill.note and number(frame, "worst_case") == pytest.approx(exact, rel=1e-4)
    accuracy = only(frame, criterion="accuracy")
    assert accuracy.masked.all() and set(accuracy.note) == {"the targets are not classes"}


def test_uphill_is_the_worst_way():
    frame = basins(around(lambda z, y: z.square().sum(1).mean() / 2), draws=30)
    assert number(frame, "radius", direction="ascent") == pytest.approx(1.1**0.5 - 1, rel=1e-4)  # (1 + r)^2 = 1.1
    rays = only(frame, metric="radius", direction="random")["value"].dropna()
    # along a direction at an angle c to the weights 1 + 2 r c + r^2 = 1.1
    assert rays.min() >= 1.1**0.5 - 1 and rays.max() <= 1 + 1.1**0.5 + 1e-3
    assert number(frame, "worst_case") == number(frame, "radius", direction="ascent") and number(frame, "most_case") == rays.quantile(
        0.5, interpolation="nearest")


def test_the_first_crossing_counts_not_a_later_one():
    frame = basins(around(lambda z, y: (1 + 0.2 * torch.sin(away(z)).square()).mean()))  # in and out, for ever
    assert number(frame, "most_case") == pytest.approx(np.arcsin(0.5**0.5) / 5, rel=1e-4)


def test_a_wall_of_accuracy_and_what_is_never_left():
    """Class 1 wins beyond a distance of 1 from the weights; the loss does not rise."""

    class Walled(Point):
        def forward(self, x):
            far = (self.w - CENTRE).norm() > 1
            return torch.stack([~far, far]).double().expand(len(x), -1) + 0 * self.w.sum()

    p = Problem(Walled((3.0, 4.0)), lambda z, y: cross_entropy(0 * z, y), (torch.zeros(5, 1), torch.zeros(5, dtype=torch.long)),
                name="p", dtype=torch.float64)
    frame = basins(p, most=2.0)
    assert number(frame, "most_case", criterion="accuracy") == pytest.approx(0.2, rel=1e-4) and number(frame, "accuracy") == 1
    loss = only(frame, criterion="loss", metric=("most_case", "worst_case"))
    assert loss.masked.all() and loss.value.isna().all() and set(loss.note) == {"not left within 2 ||w||"}
    narrow = basins(p, most=0.1)
    assert only(narrow, metric="radius", direction="random")["masked"].all() and number(narrow, "most_case") is None


def test_a_loss_that_overflows_has_left_and_one_below_zero_has_no_share():
    p = around(lambda z, y: torch.where(away(z) > 0.5, torch.inf, 1.0).mean() + 0 * z.sum())
    assert number(basins(p), "most_case", criterion="loss") == pytest.approx(0.1, rel=1e-3)
    below = basins(around(lambda z, y: -1 + away(z).mean()))
    assert set(only(below, criterion="loss").note) == {"the loss at the weights is not above 0"}


def test_wrong_use_and_the_picture():
    p = around(lambda z, y: (1 + away(z).square() / 2).mean())
    for options, complaint in (({"least": 2.0, "most": 1.0}, "not below"), ({"draws": 0}, "draws")):
        with pytest.raises(FldiagError, match=complaint):
            basins(p, **options)
    with pytest.raises(FldiagError, match="all zero"):
        basins(around(lambda z, y: (1 + z.square().sum(1)).mean(), w=(0.0, 0.0)))
    frame = basins(p)
    both = pd.concat([frame, frame.assign(run="other")])
    assert len(fldiag.draw(both, name="basins").axes) == 1
    with pytest.raises(FldiagError, match="no direction leaves"):
        fldiag.draw(basins(p, most=1e-3))
