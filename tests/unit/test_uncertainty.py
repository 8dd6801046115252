"""Intervals and p-values against scipy and worked examples."""

import numpy as np
import pytest
from scipy import stats

from fldiag.results.uncertainty import (
    Interval,
    basic,
    holm,
    independent_t,
    mcnemar,
    means,
    paired_t,
)

A, B = np.array([3.1, 2.9, 4.0, 3.6, 3.3, 3.8]), np.array([2.8, 2.7, 3.1, 3.5, 3.4, 3.0])


def test_t_intervals_are_scipy_s():
    found, oracle = paired_t(A - B), stats.ttest_rel(A, B)
    assert (found.low, found.high) == pytest.approx(
        tuple(oracle.confidence_interval())
    ) and found.p == pytest.approx(oracle.pvalue)
    found, oracle = independent_t(A, B[:4]), stats.ttest_ind(A, B[:4], equal_var=False)
    assert (found.low, found.high) == pytest.approx(
        tuple(oracle.confidence_interval())
    ) and found.p == pytest.approx(oracle.pvalue)


def test_what_has_no_spread_has_no_interval():
    assert (
        paired_t(np.array([0.5])) == Interval(0.5) and paired_t(np.array([0.1, 0.1, 0.1])).p is None
    )
    assert paired_t(np.zeros(3)) == Interval(0.0, 0.0, 0.0, 1.0)
    assert independent_t(A, B[:1]).p is None and basic(1.0, np.ones(9)) == Interval(1.0)


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"), [(0, 0, 1.0), (5, 0, 2 / 32), (1, 5, 14 / 64), (4, 4, 1.0)]
)
def test_mcnemar_counts_the_examples_on_which_only_one_is_right(only_a, only_b, p):
    a = np.array([True] * only_a + [False] * only_b + [True] * 7 + [False] * 3)
    b = np.array([False] * only_a + [True] * only_b + [True] * 7 + [False] * 3)
    assert mcnemar(a, b) == pytest.approx(p)


def test_holm_s_worked_example():
    assert holm([0.01, 0.04, 0.03, 0.005, None]) == pytest.approx([0.03, 0.06, 0.06, 0.02, None])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_two_models_share_the_draws():
    """What they have in common is taken out: a constant difference has no spread."""
    x = np.random.default_rng(0).normal(size=50)
    draws = means(np.stack([x, x + 0.3], 1))
    assert np.ptp(draws[:, 1] - draws[:, 0]) < 1e-9 < np.ptp(draws[:, 0])
