"""Landscapes: nested grids and their measured miss, planes and trajectories, and what the picture shows."""

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import fldiag
from fldiag.diagnostics import landscape as room

AXIS = np.linspace(-1, 1, 41)
EVIL = "</script><img src=x onerror=alert(1)>"


class Weights(nn.Module):
    """The weights themselves, for each example."""

    def __init__(self, w=(0.0, 0.0)):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w).double())

    def forward(self, x):
        return self.w.expand(len(x), -1)


def problem(height, w=(0.0, 0.0), **options):
    """The loss height(w1, w2), whose second eigenvector is that of the first weight."""
    x = torch.zeros(2, 1).double()
    return fldiag.Problem(
        Weights(w), lambda z, y: height(*z.T).mean(), (x, x), dtype=x.dtype, **options
    )


def bowl(a, b):
    return 2 + 3 * a.square() + 5 * b.square() + 0.5 * a**3


def waves(a, b):
    return bowl(a, b) + 0.5 * torch.sin(20 * a) * torch.sin(20 * b)


def ripples(a, b):
    return bowl(a, b) + 0.2 * torch.sin(7 * a)


def well(a, b):
    """As sharp at its bottom as the logarithm of a loss is."""
    return 0.1 * (1 + 1e2 * (a.square() + 2 * b.square())).sqrt() + 0.5 * a.square()


def points(table):
    return table[(table["metric"] == "loss")][["x", "y", "value"]].to_numpy(float)


@pytest.mark.parametrize(("height", "count"), [(bowl, 121), (ripples, 121), (waves, 1681)])
def test_the_grid_is_as_fine_as_the_surface_asks_for(height, count):
    table = fldiag.diagnose(problem(height), "landscape", k=2)
    rows = points(table)
    assert len(rows) == count == len(np.unique(rows[:, :2].round(9), axis=0))
    assert np.isin(rows[:, :2].round(9), AXIS.round(9)).all()
    if height is bowl:  # the first eigenvector is the axis of b
        values = height(*torch.from_numpy(rows[:, [1, 0]]).T).numpy()
        np.testing.assert_allclose(rows[:, 2], values, rtol=1e-6)
    misses = table[table["metric"] == "interpolation_error"]["value"]
    assert len(misses) == (count < 1681) and (misses <= room.RTOL).all()


@pytest.mark.parametrize("height", [ripples, well])
def test_the_stated_miss_is_nearly_the_largest_of_the_whole_grid(height):
    table = fldiag.diagnose(problem(height), "landscape", k=2)
    (grid,) = room.surfaces(table)
    b, a = (torch.from_numpy(c) for c in np.meshgrid(AXIS, AXIS))
    is_log = room.is_wide(grid.losses)
    drawn = room.spline(grid.axis, grid.losses, AXIS, is_log)
    true, of_grid = (room.height_of(z, is_log) for z in (height(a, b).numpy(), grid.losses))
    largest = np.abs(drawn - true).max() / np.ptp(of_grid)
    stated = float(table[table["metric"] == "interpolation_error"]["value"].iloc[0])
    assert largest / 2 <= stated <= largest * (1 + 1e-6) and 0 < largest < 0.005


def test_a_loss_that_overflows_is_evaluated_everywhere():
    table = fldiag.diagnose(
        problem(lambda a, b: bowl(a, b) + torch.exp(2000 * a - 1000)), "landscape", k=2
    )
    assert len(points(table)) == 1681 and not np.isfinite(points(table)).all()
    assert isinstance(fldiag.draw(table), Figure)


def test_the_plane_through_three_models():
    places = [(0.0, 0.0), (0.6, 0.0), (0.3, 0.4)]
    problems = [problem(bowl, w, name=str(i)) for i, w in enumerate(places)]
    table = fldiag.diagnose(problems, "landscape", directions="plane")
    models = table[table["metric"] == "point"].sort_values("index")
    np.testing.assert_allclose(models[["x", "y"]].to_numpy(float), places, atol=1e-12)
    losses = [float(bowl(*torch.tensor(w))) for w in places]
    np.testing.assert_allclose(models["value"].to_numpy(float), losses, rtol=1e-6)
    assert points(table)[:, :2].max() == pytest.approx(1.25 * 0.6)
    with pytest.raises(fldiag.FldiagError, match="on one line"):
        line = [problem(bowl, (t, t)) for t in (0.0, 0.1, 0.2)]
        fldiag.diagnose(line, "landscape", directions="plane")


def test_the_principal_axes_of_a_trajectory():
    rng = np.random.default_rng(0)
    way = np.cumsum(rng.normal(size=(6, 2)), 0) * [0.3, 0.1]
    problems = [problem(bowl, tuple(w), labels={"round": i}) for i, w in enumerate(way)]
    table = fldiag.diagnose(problems[::-1], "landscape", directions="pca")
    _, sizes, axes = np.linalg.svd(way - way.mean(0))
    shares = table[table["metric"] == "explained_variance"]["value"].to_numpy(float)
    np.testing.assert_allclose(shares, sizes**2 / (sizes**2).sum(), rtol=1e-9)
    places = table[table["metric"] == "trajectory"].sort_values("index")
    assert places["round"].tolist() == list(range(6))
    expected = (way - way[-1]) @ axes.T
    expected *= np.sign(expected[0])
    np.testing.assert_allclose(places[["x", "y"]].to_numpy(float), expected, atol=1e-9)
    away = table[table["metric"] == "projection_error"]["value"].astype(float)
    assert away.max() < 1e-12


def test_a_trajectory_is_scored_with_the_buffers_at_its_centre():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    x, y = (
        torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double(),
        torch.arange(12) % 2,
    )
    last = fldiag.Problem(net, nn.functional.cross_entropy, (x, y), dtype=x.dtype)
    rng = torch.Generator().manual_seed(1)
    moved = [last.w + torch.randn(len(last.w), generator=rng).double() for _ in range(3)]
    way = [
        last.at(w, {"1.running_mean": torch.full((2,), float(i)).double()}, labels={"round": i})
        for i, w in enumerate(moved)
    ]
    table = fldiag.diagnose(way, "landscape", directions="pca")
    rows = table[table["metric"] == "trajectory"].sort_values("index")
    assert rows["value"].tolist() == pytest.approx([way[-1].loss(w)[0] for w in moved])
    assert way[0].loss()[0] != pytest.approx(way[-1].loss(moved[0])[0])


def test_two_of_a_trajectory_are_refused():
    with pytest.raises(fldiag.FldiagError, match="at least three"):
        fldiag.diagnose([problem(bowl), problem(bowl, (1.0, 0.0))], "landscape", directions="pca")


def both():
    tables = [
        fldiag.diagnose(problem(height, name=name), "landscape", k=2)
        for name, height in (("low", bowl), ("high", lambda a, b: 2 * bowl(a, b)))
    ]
    return pd.concat(tables)


def test_the_picture_has_one_scale_and_the_numbers_of_the_table():
    table = both()
    fig = fldiag.draw(table)
    above = [ax for ax in fig.axes if ax.name == "3d"]
    assert len(above) == 2 and above[0].get_zlim() == above[1].get_zlim()
    texts = " ".join(ax.get_title() + ax.get_xlabel() for ax in fig.axes)
    assert "low" in texts and "λ₁ = 10" in texts and "λ₁ = 20" in texts and "λ₁/λ₂ = 1.67" in texts
    page = room.page(table.assign(run=table["run"] + EVIL))
    assert page.count('"type":"surface"') == 2 and r"\u03bb\u2081 = 20" in page
    assert (
        "default-src 'none'" in page and EVIL not in page and page.endswith("</div></body></html>")
    )


def test_a_surface_with_exploding_corners_ends_along_a_level_line():
    """No vertex of it is above the end of the colours, and its edge is at it."""
    corner = problem(lambda a, b: 20 + bowl(a, b) + torch.exp(25 * (a + b - 1.8)))
    rows = fldiag.diagnose(corner, "landscape", k=2)
    (grid,) = room.surfaces(rows)
    scale, losses = room.Scale([grid]), grid.losses
    end = losses.min() + 1.5 * (np.quantile(losses, 0.95) - losses.min())
    assert scale.high == pytest.approx(end) and end < losses.max() and not scale.is_log
    (mesh,) = [c for ax in fldiag.draw(rows).axes if ax.name == "3d" for c in ax.collections]
    heights = mesh._faces[~mesh._invalid_vertices][
        :, 2
    ]  # the rest pads smaller faces, with anything
    assert heights.max() == pytest.approx(scale.high)
