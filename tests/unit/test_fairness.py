"""Fairness: closed forms of the spread over clients, and calibration against scikit-learn."""

import numpy as np
import pytest
from histories import always, history, identity, linear, one, separable, stored
from sklearn.calibration import calibration_curve

import fldiag
from fldiag.diagnostics.fairness import answers, floor, matrix_of, spread_rows, spreads
from fldiag.errors import FldiagError
from fldiag.results.statistics import gini, worst_decile
from fldiag.results.table import only

RNG = np.random.default_rng(0)


def two_clients(n):
    return matrix_of({0: np.arange(n // 2), 1: np.arange(n // 2, n)}, n)


def test_one_client_is_served_and_one_is_not():
    parts = [np.arange(0, 30), np.arange(30, 60), np.arange(0)]
    round_ = stored(identity(), [identity()] * 2, always(0))  # class 0 to everything
    table = fldiag.diagnose(history(linear(), separable(), parts, round_), "fairness")
    assert [one(table, "accuracy", client=k).value for k in (0, 1)] == [1, 0]
    few = one(table, "accuracy", client=2)
    assert few.masked and few.note == "too few examples"
    expected = {"mean_accuracy": 0.5, "worst_decile": 0, "accuracy_variance": 0.25}
    expected |= {"accuracy_gini": 0.5, "accuracy": 0.5}
    for metric, value in expected.items():
        assert one(table, metric, scope="global").value == pytest.approx(value)


def test_calibration_is_that_of_scikit_learn():
    y, logits = RNG.integers(0, 3, 200), RNG.normal(size=(200, 3)) * 2
    model = answers(logits, y, 10)
    right, sure = calibration_curve(model.right, model.confidence, n_bins=10)
    n = np.bincount(model.bin, minlength=10)
    (row,) = (r for r in spread_rows(model, two_clients(200)) if r["metric"] == "ece")
    assert row["value"] == pytest.approx((n[n > 0] * np.abs(right - sure)).sum() / 200)
    assert row["low"] <= row["high"] and row["stderr"] > 0


def test_the_floor_is_what_chance_shows():
    z = RNG.uniform(0, 2, 150)
    logits, chance = np.stack([z, 0 * z], 1), 1 / (1 + np.exp(-z))
    draws = [answers(logits, (RNG.random(150) > chance).astype(int), 15) for _ in range(300)]
    errors = [spreads(model, two_clients(150), np.ones((1, 150)))["ece"][0] for model in draws]
    assert np.mean(errors) == pytest.approx(floor(draws[0], np.ones(150)), rel=0.1)


def test_shared_examples_count_for_each_client_and_are_said_to_be_shared():
    parts = [np.arange(0, 30), np.arange(0, 30)]
    round_ = stored(identity(), [identity()] * 2, identity())
    run = history(linear(), separable(), parts, round_)
    row = one(fldiag.diagnose(run, "fairness", on="own"), "accuracy", scope="global")
    assert (row.n_examples, row.n_different) == (50, 25)
    ends = only(fldiag.diagnose(run, "fairness", on="own"), scope="global")
    assert (ends["low"].dropna() >= 0).all()
    with pytest.raises(FldiagError, match="no client has 99 examples"):
        fldiag.diagnose(run, "fairness", on="own", min_count=99)


def test_spread_of_known_values():
    values = np.array([0.0, 0.0, 0.0, 1.0])
    assert (gini(values), worst_decile(np.arange(20.0))) == (0.75, 0.5)
    apart = np.abs(values[:, None] - values).mean() / (2 * values.mean())
    assert gini(values) == apart
