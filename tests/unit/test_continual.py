"""Average forgetting: recomputed from the accuracy matrix, and what is said of rounds that are not there."""

import numpy as np
import pytest
from histories import always, history, linear, one, separable, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from fldiag.diagnostics.forgetting import forgetting
from fldiag.diagnostics.forgetting.measure import average_forgetting_rows
from fldiag.diagnostics.forgetting.summary import summary
from fldiag.results.table import table

#: Client k has class k alone.
PARTS = [np.arange(30 * k, 30 * k + 30) for k in range(4)]


def world(*rounds):
    """Rounds of (ids, weights received, weights aggregated)."""
    made = [
        stored(received, [always(k) for k in ids], after, round=t, ids=ids)
        for t, (ids, received, after) in enumerate(rounds, start=1)
    ]
    return history(linear(), separable(), PARTS, *made)


def federation():
    """Class 0 is right at first, lost in round 2; class 1 is learned in round 2 and lost; class 2 is trained last."""
    return world(
        ([0], always(3), always(0)),
        ([1], always(0), always(1)),
        ([2], always(1), always(2)),
    )


def test_of_a_known_federation():
    frame = forgetting(federation(), own=False)
    forgotten = [one(frame, "average_forgetting", index=c).value for c in range(4)]
    assert forgotten == [1, 1, -1, 1]  # class 2 is better than ever; the initial model knew class 3
    assert one(frame, "average_forgetting", index=1).since == 2
    mean = one(frame, "average_forgetting", index=None)
    assert mean.value == 0.5 and mean.n_classes == 4 and mean["round"] == 3
    texts = " ".join(item.text for item in summary(frame, {}) if hasattr(item, "text"))
    assert "after round 3: average forgetting (Chaudhry) 50" in texts and "(4 classes)" in texts


def test_one_round_and_rounds_that_are_not_stored():
    single = forgetting(world(([0], always(3), always(0))), own=False)
    assert one(single, "average_forgetting", index=3).value == 1
    made = federation()
    del made._rounds[2]
    frame = forgetting(made, own=False)
    assert one(frame, "average_forgetting", index=0).value == 1
    mean = one(frame, "average_forgetting", index=None)
    assert mean.compared == 2
    assert mean.note == "the best of 2 of 3 rounds before the last, as 1 round (2) gave no numbers"
    assert any(mean.note in getattr(item, "text", "") for item in summary(frame, {}))


def rows_of(matrix):
    """What ``forgetting`` hands on of accuracies [T + 1, C]."""
    base = {"scope": "global", "slice": "test", "metric": "class_accuracy"}
    return [
        {
            **base,
            "round": max(t, 1),
            "moment": "aggregated" if t else "received",
            "index": c,
            "value": value,
            "stderr": (value * (1 - value) / 50) ** 0.5,
            "n_examples": 50,
        }
        for t, accuracies in enumerate(matrix)
        for c, value in enumerate(accuracies)
    ]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_it_is_recomputed_from_the_matrix(data):
    rounds, classes = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    shares = st.integers(0, 50).map(lambda k: k / 50)
    a = np.array(
        [[data.draw(shares) for _ in range(classes)] for _ in range(rounds + 1)], dtype=float
    )
    frame = table(average_forgetting_rows(rows_of(a)))
    expected = a[:rounds].max(0) - a[rounds]
    values = [one(frame, "average_forgetting", index=c).value for c in range(classes)]
    assert values == pytest.approx(expected)
    assert one(frame, "average_forgetting", index=None).value == pytest.approx(expected.mean())


def test_the_error_of_a_change_is_that_of_two_independent_shares():
    frame = table(average_forgetting_rows(rows_of([[0.1], [0.8], [0.5]])))
    expected = (0.8 * 0.2 / 50 + 0.5 * 0.5 / 50) ** 0.5
    assert one(frame, "average_forgetting", index=0).stderr == pytest.approx(expected)
