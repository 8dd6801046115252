"""Surfaces one over the other in one frame, and the merge tree of a surface."""

import json
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag
from fldiag.diagnostics.landscape import axis, page
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.results.select import number, only
from fldiag.surface import directions as rules


def problem(seed, name):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    g = torch.Generator().manual_seed(9)
    return Problem(net, cross_entropy, (torch.randn(20, 4, generator=g), torch.arange(20) % 3), name=name, dtype=torch.float64)


@pytest.fixture(scope="module")
def pair():
    return problem(0, "first"), problem(1, "second")


@pytest.mark.parametrize("how", ["eigen", "random"])
def test_all_surfaces_lie_along_the_first_ones_directions(pair, how):
    frame = fldiag.diagnose(list(pair), "landscape", directions=how, overlay=True, points=3, span=0.8, k=2, tol=1e-8)
    first, _ = pair
    d = rules.random(first, seed=0) if how == "random" else rules.eigen(first, k=2, tol=1e-8, max_products=100, seed=0)
    for p in pair:
        losses = only(frame, metric="loss", run=p.name)
        expected = [p.loss(p.w + x * d.d1 + y * d.d2)[0] for x, y in zip(losses.x, losses.y, strict=True)]
        assert losses.value.to_numpy(float) == pytest.approx(expected, rel=1e-7)
    assert set(only(frame, run="second").metric) == {"loss", "accuracy"}  # the spectrum is the first one's
    alone = fldiag.diagnose(first, "landscape", directions=how, points=3, span=0.8, k=2, tol=1e-8)
    assert only(frame, run="first")["value"].tolist() == alone["value"].tolist()


def test_one_picture_and_one_scene_with_the_same_levels(pair):
    frame = fldiag.diagnose(list(pair), "landscape", directions="random", overlay=True, merge_tree=True, points=9)
    figure = fldiag.draw(frame)
    flat, = (ax for ax in figure.axes if ax.get_label() == "contours")
    one, other = (c for c in flat.collections if hasattr(c, "levels"))
    assert list(one.levels) == list(other.levels) and not np.array_equal(one.get_edgecolor(), other.get_edgecolor())
    assert one.get_linestyle() != other.get_linestyle()
    text = page(frame)
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.S).group(1))
    surfaces = [trace for trace in (*data["scenes"], *data["marks"][0]) if trace["type"] == "surface"]
    assert len(data["scenes"]) == len(data["marks"]) == text.count('class="scene"') == 1 and len(surfaces) == 2
    assert surfaces[0]["colorscale"] != surfaces[1]["colorscale"] and text.count('class="swatch"') == 2
    assert len({(s["cmin"], s["cmax"]) for s in surfaces}) == 1


def test_what_cannot_be_laid_over_another(pair):
    with pytest.raises(FldiagError, match="overlay of one checkpoint"):
        fldiag.diagnose(pair[0], "landscape", overlay=True)
    with pytest.raises(FldiagError, match="overlay of plane directions"):
        fldiag.diagnose(list(pair), "landscape", overlay=True, directions="plane")


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x):
        return self.w.expand(len(x), -1)


def wells(z, y):
    return ((z[:, 0] ** 2 - 1) ** 2 + 0.3 * z[:, 0] + z[:, 1] ** 2).mean()


def test_the_merge_tree_of_two_wells():
    p = Problem(Point(), wells, (torch.zeros(3, 1), torch.zeros(3)), name="wells", dtype=torch.float64)
    asked = {"points": 21, "span": 2.0, "merge_tree": True, "tol": 1e-10, "k": 2}
    whole, few = (fldiag.diagnose(p, "landscape", **asked, **more) for more in ({"full": True}, {"grid_rtol": 0.01}))
    x = axis(21, 2.0)
    valley = (x**2 - 1) ** 2 + 0.3 * x
    left, right = valley[:10].min(), valley[10:].min()
    top = valley[5:16].max()
    assert only(whole, metric="minimum")["value"].tolist() == pytest.approx([left, right])
    assert number(whole, "saddle") == pytest.approx(top) and only(whole, metric="saddle")["index"].tolist() == [2]
    assert number(whole, "smad") == pytest.approx(top - right) and number(whole, "smad", column="residual") is None
    assert only(few, metric="loss").estimator.eq("spline").any()
    assert abs(number(few, "smad") - (top - right)) <= number(few, "smad", column="residual")
    marks = [line.get_label() for line in fldiag.draw(whole).axes[1].lines]
    assert marks.count("minimum") == 2 and marks.count("saddle") == 1
    assert {"minimum", "saddle", "smad"}.isdisjoint(fldiag.diagnose(p, "landscape", points=3, k=2).metric)
