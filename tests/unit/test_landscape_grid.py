"""Landscapes from coarse to fine on a trained network: honest errors, interruptions, the cache."""

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fldiag
from fldiag.diagnostics.landscape import landscape
from fldiag.landscape import directions as rules
from fldiag.landscape.grid import Heights
from fldiag.problem.problem import Problem
from fldiag.results.table import check
from fldiag.runs.open_problem import open_problem

EXAMPLE = Path(__file__).parents[2] / "checkpoints" / "example" / "fedavg-digits.pt"
OPTIONS = {"directions": "random", "points": 21}


def trained(samples=60):
    return open_problem(fldiag.load(EXAMPLE), samples=samples)


def small(**options):
    torch.manual_seed(2)
    x, y = torch.randn(30, 5), torch.arange(30) % 3
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    return Problem(net, torch.nn.functional.cross_entropy, (x, y), name="a", **options)


def losses(frame, column="value"):
    return (
        frame[frame.metric == "loss"]
        .pivot(index="y", columns="x", values=column)
        .to_numpy(dtype=object)
    )


def numbers(frame, column="value"):
    return (
        pd.DataFrame(losses(frame, column)).astype("Float64").to_numpy(dtype=float, na_value=np.nan)
    )


def value(frame, metric, column="value"):
    return frame.loc[frame.metric == metric, column].item()


@cache
def every_point(**options):
    """The surface that the splines are compared with."""
    return landscape(trained(), **options, full=True)


@pytest.mark.parametrize(
    "options", [{"span": 1.0}, {"span": 5.0}, {"span": 5.0, "grid_rtol": 0.05}]
)
@pytest.mark.slow
def test_spline_is_as_close_as_it_says_on_a_trained_network(options):
    shared = {"points": 21, "k": 2, "tol": 1e-2}
    frame, whole = (
        check(landscape(trained(), **shared, **options)),
        every_point(**shared, span=options["span"]),
    )
    made, true, how = numbers(frame), numbers(whole), losses(frame, "estimator")
    exact = how == "exact"
    assert (made[exact] == true[exact]).all() and set(how[~exact].ravel()) == {"spline"}
    assert (
        exact.sum()
        == value(frame, "evaluated")
        < true.size * (0.75 if "grid_rtol" in options else 0.95)
    )
    assert (
        "evaluated" not in set(whole.metric)
        and (whole[whole.metric == "loss"].estimator == "exact").all()
    )
    share = Heights.of(true).share(made - true, true)
    assert value(frame, "interpolation_error") <= options.get(
        "grid_rtol", 0.01
    ) and share.max() <= value(frame, "interpolation_error")
    error, said = np.abs(made - true)[~exact], numbers(frame, "residual")
    assert (
        (error <= said[~exact]).all()
        and np.isnan(said[exact]).all()
        and value(frame, "interpolation_error", "index") >= 16
    )
    assert (
        np.abs(numbers(frame, "stderr") - numbers(whole, "stderr")).max()
        < 0.1 * numbers(whole, "stderr").max()
    )
    assert made[10, 10] == trained().loss()[0]


def test_a_second_question_is_answered_from_the_cache(tmp_path):
    first = fldiag.diagnose(small(), "landscape", cache=tmp_path, **OPTIONS)
    seen = []
    second = fldiag.diagnose(
        small(), "landscape", cache=tmp_path, progress=lambda *a: seen.append(a), **OPTIONS
    )
    assert not seen
    pd.testing.assert_frame_equal(first, second, check_dtype=False)
    fldiag.diagnose(
        small(),
        "landscape",
        cache=tmp_path,
        progress=lambda *a: seen.append(a),
        **OPTIONS,
        grid_rtol=0.5,
    )
    assert seen  # another error is another question


# -- principal axes of a trajectory


def walk(p, steps=7):
    g = torch.Generator().manual_seed(0)
    noise = (
        torch.randn(steps, p.layout.size, generator=g) * torch.linspace(1.5, 0.2, steps)[:, None]
    )
    return list(p.w + noise.cumsum(0).flip(0))


def test_pca_is_that_of_scikit_learn():
    from sklearn.decomposition import PCA

    p = small(dtype=torch.float64)
    way = [w.double() for w in walk(p)]
    found = rules.pca(p, way)
    rows = torch.stack([*way, p.w]).numpy()
    reference = PCA(2).fit(rows)
    ours = torch.stack([found.d1, found.d2]).numpy()
    np.testing.assert_allclose(np.abs((ours * reference.components_).sum(1)), 1, rtol=1e-9)
    np.testing.assert_allclose(ours @ ours.T, np.eye(2), atol=1e-12)
    shares = [r["value"] for r in found.rows if r["metric"] == "explained_variance"]
    np.testing.assert_allclose(shares, reference.explained_variance_ratio_, rtol=1e-9)
    way_rows = [r for r in found.rows if r["metric"] == "trajectory"]
    places = np.array([(r["x"], r["y"]) for r in way_rows])
    np.testing.assert_allclose(places, (rows - rows[-1]) @ ours.T, atol=1e-10)
    assert (
        (places[-1] == 0).all()
        and (places[0] >= 0).all()
        and found.reach == pytest.approx(np.abs(places).max())
    )
    away = [r["value"] for r in found.rows if r["metric"] == "projection_error"]
    np.testing.assert_allclose(
        away, np.linalg.norm(rows - rows[-1] - places @ ours, axis=1), atol=1e-10
    )
    assert [r["value"] for r in way_rows] == pytest.approx([p.loss(w)[0] for w in [*way, p.w]])


def test_a_trajectory_in_a_plane_is_explained_by_it_and_covered_by_the_grid():
    p = small(dtype=torch.float64)
    a, b = torch.eye(p.layout.size, dtype=torch.float64)[:2]
    frame = check(
        landscape(
            p,
            directions="pca",
            points=5,
            through={20: p.w + 2 * a, 3: p.w + 4 * a + b, 30: p.w + a - b},
        )
    )
    assert frame.loc[frame.metric == "explained_variance", "value"].sum() == pytest.approx(1)
    assert frame.loc[frame.metric == "projection_error", "value"].max() < 1e-12
    way = frame[frame.metric == "trajectory"].sort_values("index")
    assert way["round"].tolist()[:3] == [3, 20, 30]  # a dict goes by its rounds
    assert way.value.iloc[1] == pytest.approx(p.loss(p.w + 2 * a)[0])
    grid = frame[frame.metric == "loss"]
    assert grid.x.max() == pytest.approx(1.25 * way[["x", "y"]].abs().to_numpy().max())


def test_a_trajectory_that_spans_no_plane_is_refused():
    p = small()
    step = torch.ones_like(p.w)
    with pytest.raises(fldiag.FldiagError, match="on one line"):
        landscape(p, directions="pca", through=[p.w + 2 * step, p.w + step], points=3)
    for through, text in (
        (None, "at least three checkpoints"),
        ([p.w + step], "at least 2 weight"),
    ):
        with pytest.raises(fldiag.FldiagError, match=text):
            landscape(p, directions="pca", through=through, points=3)
