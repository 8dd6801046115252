"""Counts that add up against scikit-learn on the pooled examples; closed forms of the spread over clients."""

import numpy as np
import pytest
from commands import run, table
from histories import always, history, identity, linear, one, separable, stored
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.calibration import calibration_curve

import fldiag
from fldiag.diagnostics.fairness.measure import ACCURACIES, Answers, Groups, _spread
from fldiag.errors import FldiagError
from fldiag.results.binned import Binned, gini, worst_decile
from fldiag.results.means import share
from fldiag.results.uncertainty import basic, weights


def clients(n=(40, 7, 90), classes=4, seed=0):
    """Logits and labels of clients that differ in size and in classes."""
    rng = np.random.default_rng(seed)
    for k, size in enumerate(n):
        y = rng.integers(0, classes - k, size)
        yield rng.normal(size=(size, classes)) * (1 + k) + 2 * np.eye(classes)[y], y


def counts(z, y, bins):
    """Of logits [n, C] and labels [n]."""
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    return Binned.of(p.argmax(1) == y, p.max(1), bins)


def test_merged_counts_are_those_of_scikit_learn_on_all_examples():
    made = list(clients())
    whole = sum((counts(z, y, 10) for z, y in made[1:]), counts(*made[0], 10))
    z, y = np.concatenate([z for z, _ in made]), np.concatenate([y for _, y in made])
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    assert whole.n == len(y) and whole.right == (p.argmax(1) == y).sum()
    right, sure = calibration_curve(p.argmax(1) == y, p.max(1), n_bins=10)
    n, r, c, *_ = whole.sums[:, whole.sums[0] > 0]
    assert r / n == pytest.approx(right) and c / n == pytest.approx(sure)
    assert whole.ece()[0] == pytest.approx((n * np.abs(right - sure)).sum() / len(y))


def test_opposite_errors_of_two_clients_add_up_to_none():
    sure = np.tile([np.log(4), 0.0], (10, 1))
    off = [counts(sure, np.repeat([0, 1], [right, 10 - right]), 15) for right in (6, 10)]
    assert [s.ece()[0] for s in off] == pytest.approx([0.2, 0.2])
    assert (off[0] + off[1]).ece()[0] == pytest.approx(0, abs=1e-12)


def test_the_error_of_a_calibration_error_is_its_spread_over_examples():
    rng = np.random.default_rng(0)
    odds = np.stack([rng.normal(0, 3, (300, 400)), np.zeros((300, 400))], 2)
    right = rng.random((300, 400)) < 1 / (1 + np.exp(-0.4 * odds[..., 0]))  # far too sure
    found = np.array(
        [counts(z, 1 - r.astype(int), 10).ece() for z, r in zip(odds, right, strict=True)]
    )
    assert found[:, 1].mean() == pytest.approx(
        found[:, 0].std(ddof=1), rel=0.1
    )  # 300 draws: 4 % of noise


def test_the_floor_is_what_a_calibrated_model_shows():
    rng = np.random.default_rng(0)
    odds = np.stack([rng.normal(0.5, 1, 150), np.zeros(150)], 1)
    p = 1 / (1 + np.exp(-odds[:, 0]))
    shown = [counts(odds, (rng.random(150) > p).astype(int), 15).ece()[0] for _ in range(300)]
    floor = counts(odds, np.zeros(150, dtype=int), 15).ece_floor()
    assert floor == pytest.approx(
        np.mean(shown), rel=0.1
    )  # the normal approximation in bins of few examples


@given(arrays(float, st.integers(1, 30), elements=st.floats(0, 1, allow_subnormal=False)))
def test_gini_is_the_mean_absolute_difference(x):
    mean = np.abs(x[:, None] - x).mean() / (2 * x.mean()) if x.sum() else 0.0
    assert gini(x) == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize(
    ("values", "coefficient", "worst"),
    [
        ([0] * 9 + [1], 0.9, 0.0),
        ([0.5] * 20, 0.0, 0.5),
        (list(range(1, 21)), 19 / 60, 1.5),
        ([0.3], 0.0, 0.3),
    ],
)
def test_closed_forms(values, coefficient, worst):
    assert gini(np.array(values, dtype=float)) == pytest.approx(coefficient)
    assert worst_decile(np.array(values, dtype=float)) == pytest.approx(worst)


def test_the_bootstrap_s_interval_of_a_mean_is_the_normal_one():
    x = np.random.default_rng(1).normal(size=400)
    found = basic(x.mean(), np.concatenate([w @ x / w.sum(1) for w in weights(400)]))
    half = 1.96 * x.std() / 20
    assert (found.low, found.high) == pytest.approx(
        (x.mean() - half, x.mean() + half), abs=0.1 * half
    )
    assert basic(1.0, np.ones(10)).low is None


def test_the_interval_of_an_accuracy_stays_below_1():
    """Ten clients with one wrong answer in ten: the bias of the worst one alone would carry an interval past 1."""
    y = np.zeros(100, dtype=int)
    logits = np.eye(2)[(np.arange(100) % 10 == 0).astype(int)]
    clients = Groups(100, {k: np.arange(10 * k, 10 * k + 10) for k in range(10)})
    rows = {row["metric"]: row for row in _spread(Answers(logits, y), clients, 10)}
    assert all(0 < rows[m]["low"] < rows[m]["high"] < 1 for m in ACCURACIES)
    wilson = share(90, 100)
    for end in ("low", "high"):
        assert rows["accuracy"][end] == pytest.approx(wilson[end], abs=0.015)


PARTS = [
    np.arange(0, 60),
    np.arange(60, 120),
    np.concatenate([np.arange(0, 10), np.arange(60, 110)]),
]  # two classes each


@pytest.mark.parametrize("on", ["test", "own", "train"])
def test_a_model_that_answers_one_class(on):
    """A client's accuracy is the share of that class in its own mixture."""
    made = history(linear(), separable(), PARTS, stored(identity(), [always(0)] * 3))
    frame = fldiag.diagnose(made, "fairness", on=on)
    shares = (
        frame[(frame.metric == "accuracy") & (frame.scope == "client")].set_index("client").value
    )
    expected = [
        0.5,
        0.0,
        {"train": 1 / 6, "own": 1 / 3, "test": 25 / 75}[on],
    ]  # of 50 and 50 test examples there are 25 of each
    assert shares.tolist() == pytest.approx(expected)
    assert one(frame, "worst_decile").value == 0.0 and one(
        frame, "mean_accuracy"
    ).value == pytest.approx(np.mean(expected))
    assert one(frame, "accuracy_variance").value == pytest.approx(np.var(expected))
    assert one(frame, "accuracy_gini").value == pytest.approx(gini(np.array(expected)))
    low, high = one(frame, "mean_accuracy")[["low", "high"]]
    assert low < np.mean(expected) < high
    assert fldiag.draw(frame) is not None


def test_one_client_few_examples_and_weights_that_are_no_numbers():
    alone = fldiag.diagnose(
        history(linear(), separable(), [np.arange(120)], stored(identity(), [identity()])),
        "fairness",
    )
    assert one(alone, "accuracy_variance").masked
    assert one(alone, "worst_decile").value == 1.0 and fldiag.draw(alone) is not None
    few = fldiag.diagnose(
        history(
            linear(),
            separable(),
            [np.arange(120), np.arange(0)],
            stored(identity(), [identity()] * 2),
        ),
        "fairness",
    )
    assert (
        one(few, "accuracy", client=1).note == "too few examples"
        and one(few, "mean_accuracy").n_clients == 1
    )
    with pytest.raises(FldiagError, match="no client has 1000 examples"):
        fldiag.diagnose(
            history(linear(), separable(), PARTS, stored(identity(), [identity()] * 3)),
            "fairness",
            min_count=1000,
        )
    broken = fldiag.diagnose(
        history(linear(), separable(), PARTS, stored(identity(), [identity() * np.nan] * 3)),
        "fairness",
    )
    assert (
        "no numbers" in one(broken, "missing").note
        and fldiag.registry.diagnostic.get("fairness").drawings[""](broken) is None
    )


def test_bins_without_number_are_refused():
    with pytest.raises(FldiagError, match="bins"):
        fldiag.diagnose(
            history(linear(), separable(), PARTS, stored(identity(), [identity()] * 3)),
            "fairness",
            bins=10**7,
        )


@pytest.mark.slow
def test_a_run_without_client_weights_or_without_classes(tmp_path):
    run(
        "train",
        "digits",
        "--set",
        "rounds=2",
        "--set",
        "model.name=mlp",
        "--set",
        "train.epochs=1",
        "--set",
        "checkpoint.clients=none",
        "--out",
        tmp_path / "bare",
    )
    result = run("fairness", tmp_path / "bare")
    assert "perfectly calibrated" in result.stdout
    frame = table(tmp_path / "bare" / "diagnostics" / result.stdout.strip().split("/")[-1])
    assert (frame["round"] == 2).all() and frame.query(
        "scope == 'client' and metric == 'accuracy'"
    ).client.nunique() == 20
    data = separable()
    regression = type(data)("real", data.train_x, data.train_x, data.test_x, data.test_x, 4)
    with pytest.raises(FldiagError, match="has no classes"):
        fldiag.diagnose(
            history(linear(), regression, PARTS, stored(identity(), [identity()] * 3)), "fairness"
        )
