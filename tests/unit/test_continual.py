"""Measures of continual learning: recomputed from the accuracy matrix, and told apart by name and sign."""

import numpy as np
import pytest
from histories import always, history, identity, linear, one, separable, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from fldiag.diagnostics.forgetting import forgetting
from fldiag.diagnostics.forgetting.measure import CONTINUAL, continual_rows
from fldiag.diagnostics.forgetting.picture import continual_if_any
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


def test_the_three_measures_of_a_known_federation():
    """Class 0 is right at first, lost in round 2; class 1 is learned in round 2 and lost; class 2 is trained last."""
    made = world(
        ([0], always(3), always(0)),
        ([1], always(0), always(1)),
        ([2], always(1), always(2)),
    )
    frame = forgetting(made, own=False)
    forgotten = [one(frame, "average_forgetting", index=c).value for c in range(4)]
    assert forgotten == [1, 1, -1, 1]  # class 2 is better than ever; the initial model knew class 3
    assert one(frame, "average_forgetting", index=None).value == 0.5
    backward = [one(frame, "gem_backward_transfer", index=c) for c in range(4)]
    assert [row.value for row in backward[:2]] == [-1, -1] and backward[1].since == 2
    assert backward[2].masked and backward[2].note == "the class was trained in the last round"
    assert backward[3].note == "no stored client has the class"
    mean = one(frame, "gem_backward_transfer", index=None)
    assert mean.value == -1 and mean.n_classes == 2 and mean["round"] == 3
    forward = [one(frame, "gem_forward_transfer", index=c) for c in range(4)]
    assert forward[0].note == "the class was trained in the first round"
    assert forward[1].value == 0 and forward[2].value == 0 and forward[2].since == 2
    assert continual_if_any(frame) is not None
    texts = " ".join(item.text for item in summary(frame, {}) if hasattr(item, "text"))
    assert "after round 3: average forgetting (Chaudhry) 50" in texts
    assert "backward transfer (GEM) −100" in texts and "(2 classes)" in texts


def test_forward_transfer_is_what_others_taught_of_a_class_before_it_was_trained():
    made = world(([0], always(3), identity()), ([1], identity(), identity()))
    frame = forgetting(made, own=False)
    row = one(frame, "gem_forward_transfer", index=1)
    assert row.value == 1 and row.since == 1  # 1 after round 1, 0 before training


def test_one_round_and_rounds_without_clients_are_masked():
    single = forgetting(world(([0], always(3), always(0))), own=False)
    assert one(single, "average_forgetting", index=3).value == 1
    for metric in CONTINUAL[1:]:
        rows = single[single["metric"] == metric]
        assert rows["masked"].all() and rows["value"].isna().all() and rows["note"].notna().all()
    made = world(
        ([0], always(3), always(0)), ([1], always(0), always(1)), ([2], always(1), always(2))
    )
    del made._rounds[2]
    frame = forgetting(made, own=False)
    assert (
        one(frame, "gem_backward_transfer", index=0).note == "who trained in round 2 is not stored"
    )
    assert one(frame, "average_forgetting", index=0).value == 1
    mean = one(frame, "average_forgetting", index=None)
    assert mean.compared == 2
    assert mean.note == "the best of 2 of 3 rounds before the last, as 1 round (2) gave no numbers"
    assert any(mean.note in getattr(item, "text", "") for item in summary(frame, {}))


def rows_of(matrix, trained):
    """What ``forgetting`` hands on of accuracies [T + 1, C] and of the classes [T] that were trained."""
    base = {"scope": "global", "slice": "test", "metric": "class_accuracy"}
    rows = []
    for t, accuracies in enumerate(matrix):
        for c, value in enumerate(accuracies):
            at = {"round": max(t, 1), "moment": "aggregated" if t else "received", "index": c}
            stderr = (value * (1 - value) / 50) ** 0.5
            rows.append({**base, **at, "value": value, "stderr": stderr, "n_examples": 50})
    for t, classes in enumerate(trained, start=1):
        rows += [
            {
                "metric": "unseen_classes",
                "scope": "client",
                "moment": "trained",
                "round": t,
                "client": c,
            }
            for c in classes
        ]
    examples = [{"client": c, "index": c, "value": 9.0} for c in range(len(matrix[0]))]
    return rows, examples


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_all_are_recomputed_from_the_matrix(data):
    rounds, classes = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    shares = st.integers(0, 50).map(lambda k: k / 50)
    a = np.array(
        [[data.draw(shares) for _ in range(classes)] for _ in range(rounds + 1)], dtype=float
    )
    trained = [data.draw(st.sets(st.integers(0, classes - 1), min_size=1)) for _ in range(rounds)]
    frame = table(continual_rows(*rows_of(a, trained)))
    values = {metric: {} for metric in CONTINUAL}
    for c in range(classes):
        values["average_forgetting"][c] = a[:rounds, c].max() - a[rounds, c]
        when = [t + 1 for t in range(rounds) if c in trained[t]]
        if when and when[-1] < rounds:
            values["gem_backward_transfer"][c] = a[rounds, c] - a[when[-1], c]
        if when and when[0] > 1:
            values["gem_forward_transfer"][c] = a[when[0] - 1, c] - a[0, c]
    for metric, of_classes in values.items():
        for c in range(classes):
            row = one(frame, metric, index=c)
            assert row.masked == (c not in of_classes)
            if c in of_classes:
                assert row.value == pytest.approx(of_classes[c])
        mean = one(frame, metric, index=None)
        assert mean.masked == (not of_classes)
        if of_classes:
            assert mean.value == pytest.approx(np.mean(list(of_classes.values())))


def test_the_error_of_a_change_is_that_of_two_independent_shares():
    rows, examples = rows_of([[0.1], [0.8], [0.5]], [{0}, {0}])
    frame = table(continual_rows(rows, examples))
    expected = (0.8 * 0.2 / 50 + 0.5 * 0.5 / 50) ** 0.5
    assert one(frame, "average_forgetting", index=0).stderr == pytest.approx(expected)
