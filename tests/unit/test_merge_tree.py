"""Merge trees against a closed form, against flooding level by level, and against GUDHI's cubical complexes."""

import numpy as np
import pytest
from scipy.ndimage import label

from fldiag.surface.merge_tree import smad, valleys


def rough(seed, shape=(9, 11)):
    return np.random.default_rng(seed).normal(size=shape)


def test_two_wells_and_the_saddle_between_them():
    x = np.linspace(-2, 2, 81)
    surface = (x[None] ** 2 - 1) ** 2 + 0.3 * x[None] + x[::8, None] ** 2  # minima near x = -1 and 1, of different depth
    deep, shallow = valleys(surface)
    roots = np.sort(np.roots([4, 0, -4, 0.3]).real)  # of the derivative along y = 0
    height = (roots**2 - 1) ** 2 + 0.3 * roots
    assert [x[v.minimum[1]] for v in (deep, shallow)] == pytest.approx([roots[0], roots[2]], abs=0.03)
    assert x[shallow.saddle[1]] == pytest.approx(roots[1], abs=0.03) and deep.saddle is None
    assert smad([deep, shallow]) == pytest.approx(height[1] - height[2], abs=5e-3)


def test_a_bowl_and_a_plain_have_one_valley():
    x = np.linspace(-1, 1, 15)
    assert smad(valleys(x[None] ** 2 + x[:, None] ** 2)) == 0 and len(valleys(np.zeros((5, 5)))) == 1


@pytest.mark.parametrize("seed", range(3))
def test_levels_flooded_one_by_one(seed):
    surface = rough(seed, (6, 7))
    counts = [label(surface <= level, np.ones((3, 3)))[1] for level in np.sort(surface, axis=None)]
    found = valleys(surface)
    assert counts == [sum(v.low <= level < v.high for v in found) for level in np.sort(surface, axis=None)]


@pytest.mark.parametrize("seed", range(5))
def test_gudhi(seed):
    gudhi = pytest.importorskip("gudhi")
    surface = rough(seed) if seed else np.round(rough(seed), 0)  # also with ties
    pairs = gudhi.CubicalComplex(top_dimensional_cells=surface)
    pairs.compute_persistence()
    theirs = [tuple(pair) for pair in pairs.persistence_intervals_in_dimension(0) if pair[1] > pair[0]]
    assert sorted(theirs) == sorted((v.low, v.high) for v in valleys(surface))


def test_valleys_below_the_error_and_overflow():
    surface = rough(1)
    depths = [v.depth for v in valleys(surface)]
    assert depths[1:] == sorted(depths[1:], reverse=True)
    assert [v.depth for v in valleys(surface, depths[3])] == depths[:3]
    wall = np.zeros((3, 5))
    wall[:, 2] = [np.inf, np.nan, np.inf]
    wall[0, 4] = -1
    assert [(v.minimum, v.saddle) for v in valleys(wall)] == [((0, 4), None), ((0, 0), None)]
