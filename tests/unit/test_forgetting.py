"""Forgetting: planted federations whose every number is known, and rounds that say nothing."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from histories import always, history, identity, linear, one, separable, stored

import fldiag
from fldiag.diagnostics.forgetting import over_rounds
from fldiag.results.table import only

PARTS = [np.arange(0, 60), np.arange(60, 120)]  # classes 0, 1 and classes 2, 3


def forgetting(*rounds, **options):
    """Of four classes of which the last has three test examples."""
    data = separable(test_per_class=(25, 25, 25, 3))
    return fldiag.diagnose(history(linear(), data, PARTS, *rounds), "forgetting", **options)


def test_clients_that_received_different_models():
    """One received a model that answers class 0 only and kept it: nothing was lost, and the picture shows one line a moment."""
    rounds = []
    for r in (1, 2):
        item = stored(identity(), [always(0), identity()], identity(), round=r)
        rounds.append(dataclasses.replace(item, starts=item.clients.clone()))
    table = forgetting(*rounds)
    assert set(only(table, metric="drop", scope="client")["value"]) == {0}
    at = {"moment": "received", "scope": "global", "slice": "test", "round": 1}
    received = only(table, metric="accuracy", **at)
    assert received["value"].tolist() == [1]
    fldiag.draw(table)


def test_a_client_that_answers_class_0():
    """And one that is unharmed; averaging restores all."""
    table = forgetting(stored(identity(), [always(0), identity()], identity()))
    at = {"moment": "trained", "scope": "client", "slice": "test", "index": None}
    lost = one(table, "drop", client=0, **at)
    assert (lost.value, lost.n_examples) == (pytest.approx(53 / 78), 78)
    for c, value in enumerate((0, 1, 1)):
        assert one(table, "class_forgetting", client=0, index=c).value == value
    few = one(table, "class_forgetting", client=0, index=3)
    assert few.masked and pd.isna(few.value) and few.n_examples == 3
    assert one(table, "forgetting", client=0).value == 1
    assert one(table, "accuracy_seen", client=0, **at).value == 0.5
    assert one(table, "accuracy_unseen", client=0, **at).value == 0
    own = {"moment": "trained", "client": 0}
    assert one(table, "accuracy", slice="client:0/train", **own).value == 0.5
    assert one(table, "accuracy", slice="client:0/others", **own).value == 0
    at["scope"] = "global"
    assert one(table, "drop", **at).value == pytest.approx(53 / 78 / 2)
    assert one(table, "drop_std", **at).value == pytest.approx(53 / 78 / 2)
    held = table[(table["metric"] == "class_examples") & (table["client"] == 1)]
    assert held["value"].tolist() == [0, 0, 30, 30]


def test_over_rounds():
    """Round 3 is not there: no class is compared with it."""
    rounds = [
        stored(received, [aggregated, aggregated], aggregated, round=t)
        for t, (received, aggregated) in {
            1: (always(1), always(0)),
            2: (always(0), identity()),
            4: (always(2), always(2)),
        }.items()
    ]
    table = forgetting(*rounds, own=False)
    for t, changes in {2: [0, 1, 1], 4: [-1, -1, 0]}.items():
        each = table[(table["metric"] == "backward_transfer") & (table["round"] == t)]
        each = each.dropna(subset=["value"])
        assert each[each["index"].notna()]["value"].tolist() == changes
        assert each[each["index"].isna()]["value"].tolist() == [np.mean(changes)]
    each = [one(table, "average_forgetting", index=c) for c in range(4)]
    assert [row.value for row in each[:3]] == [1, 1, 0] and each[3].masked
    assert [row.since for row in each[:3]] == [2, 2, 2]  # the latest of equal maxima
    mean = one(table, "average_forgetting", index=None)
    assert (mean.value, mean.n_classes, mean.compared) == (pytest.approx(2 / 3), 3, 3)
    (guess,) = (v for v in fldiag.draw(table).axes[0].get_lines() if v.get_label() == "_chance")
    assert set(guess.get_ydata()) == {table.query("metric == 'accuracy'").guess.max()}
    initial = forgetting(stored(always(1), [always(0)] * 2, always(0)), own=False)
    assert one(initial, "average_forgetting", index=1).value == 1  # the initial model knew it


def test_weights_that_are_no_numbers():
    table = forgetting(stored(identity(), [identity() * torch.nan, identity()], identity()))
    (row,) = only(table, client=0).to_dict("records")
    assert row["masked"] and "weights of client 0 are not finite" in row["note"]
    assert one(table, "drop", scope="global", index=None).n_clients == 1


def test_the_error_of_what_was_forgotten_is_that_of_both_rounds():
    at = {"metric": "class_accuracy", "scope": "global", "moment": "aggregated", "slice": "test"}
    cells = [(1, 0, 0.8, 0.03), (1, 1, 0.5, 0.06), (2, 0, 0.5, 0.04), (2, 1, 0.7, 0.08)]
    rows = [
        {**at, "round": r, "index": c, "value": v, "stderr": e, "n_examples": 20}
        for r, c, v, e in cells
    ]
    *_, one, other, mean = (r for r in over_rounds(rows) if r["metric"] == "average_forgetting")
    assert (one["value"], one["stderr"]) == pytest.approx((0.3, 0.05))
    assert (other["value"], other["stderr"]) == pytest.approx((-0.2, 0.1))
    assert (mean["value"], mean["stderr"]) == pytest.approx((0.05, np.hypot(0.05, 0.1) / 2))
