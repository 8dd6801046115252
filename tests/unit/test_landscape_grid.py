"""Landscapes from coarse to fine on a trained network: honest errors, interruptions, the cache."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fldiag
from fldiag.diagnostics.landscape import landscape
from fldiag.landscape import directions as rules
from fldiag.problem.problem import Problem

EXAMPLE = Path(__file__).parents[2] / "checkpoints" / "example" / "fedavg-digits.pt"
OPTIONS = {"directions": "random", "points": 21}


def small(**options):
    torch.manual_seed(2)
    x, y = torch.randn(30, 5), torch.arange(30) % 3
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    return Problem(net, torch.nn.functional.cross_entropy, (x, y), name="a", **options)


def test_a_second_question_is_answered_from_the_cache(tmp_path):
    first = fldiag.diagnose(small(), "landscape", cache=tmp_path, **OPTIONS)
    seen = []
    second = fldiag.diagnose(
        small(), "landscape", cache=tmp_path, progress=lambda *a: seen.append(a), **OPTIONS
    )
    assert not seen
    pd.testing.assert_frame_equal(first, second, check_dtype=False)


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
    found = rules.pca(p, [(None, w) for w in way])
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


def test_a_trajectory_in_a_plane_is_explained_by_it():
    p = small(dtype=torch.float64)
    a, b = torch.eye(p.layout.size, dtype=torch.float64)[:2]
    found = rules.pca(p, [(3, p.w + 4 * a + b), (20, p.w + 2 * a), (30, p.w + a - b)])
    rows = pd.DataFrame(found.rows)
    assert rows.loc[rows.metric == "explained_variance", "value"].sum() == pytest.approx(1)
    assert rows.loc[rows.metric == "projection_error", "value"].max() < 1e-12
    way = rows[rows.metric == "trajectory"]
    assert way["round"].tolist()[:3] == [3, 20, 30] and way["round"].isna().iloc[3]
    assert way.value.iloc[1] == pytest.approx(p.loss(p.w + 2 * a)[0])


def test_a_trajectory_that_spans_no_plane_is_refused():
    p = small()
    step = torch.ones_like(p.w)
    with pytest.raises(fldiag.FldiagError, match="on one line"):
        rules.pca(p, [(None, p.w + 2 * step), (None, p.w + step)])
    with pytest.raises(fldiag.FldiagError, match="at least three checkpoints"):
        landscape(p, directions="pca", points=3)
