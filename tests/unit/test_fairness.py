"""Fairness: closed forms of the spread over clients, and calibration against scikit-learn."""

import numpy as np
import pytest
from histories import always, history, identity, linear, one, separable, stored
from sklearn.calibration import calibration_curve

import fldiag
from fldiag.diagnostics.fairness import Answers, Groups, calibration, spread_rows, whole_rows
from fldiag.errors import FldiagError
from fldiag.results.means import gini, worst_decile
from fldiag.results.select import only

RNG = np.random.default_rng(0)


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
    assert one(table, "loss", scope="global").guess == pytest.approx(np.log(4))


def test_calibration_is_that_of_scikit_learn():
    y, logits = RNG.integers(0, 3, 200), RNG.normal(size=(200, 3)) * 2
    model, groups = Answers(logits, y), Groups(200, {0: np.arange(90), 1: np.arange(90, 200)})
    right, sure = calibration_curve(model.right, model.confidence, n_bins=10)
    rows = whole_rows(model, groups.matrix.sum(0), 10)
    n, accuracy = (
        np.array([row[column] for row in rows if row["metric"] == "bin_accuracy"])
        for column in ("n_examples", "value")
    )
    assert accuracy == pytest.approx(right)
    error = (n * np.abs(right - sure)).sum() / 200
    assert calibration(model.right, model.confidence, 10)[0] == pytest.approx(error)
    (row,) = (row for row in spread_rows(model, groups, 10) if row["metric"] == "ece")
    assert row["value"] == pytest.approx(error)


def test_errors_and_the_floor_are_what_chance_shows():
    confidence = RNG.uniform(0.5, 1, 150)
    draws = [calibration(RNG.random(150) < confidence, confidence, 15) for _ in range(300)]
    errors, _, floors = np.array(draws).T
    assert errors.mean() == pytest.approx(floors[0], rel=0.1)
    sure = [calibration(RNG.random(400) < 0.6, np.full(400, 0.95), 15) for _ in range(300)]
    errors, stderrs, _ = np.array(sure).T
    assert stderrs.mean() == pytest.approx(errors.std(), rel=0.15)


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
