"""Rows, numbers and rounds of a table, against the plainest way to find them."""

import doctest
import io
import itertools
import math

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fldiag.results import files
from fldiag.results import table as tables
from fldiag.results.table import WHOLE, last_round, number, only, rounds, table, thin

METRICS, LAYERS = ["loss", "trace", "eigenvalue"], ["conv1", "head"]
rows = st.lists(
    st.fixed_dictionaries(
        {
            "metric": st.sampled_from(METRICS),
            "layer": st.none() | st.sampled_from(LAYERS),
            "round": st.none() | st.integers(0, 5),
            "index": st.none() | st.integers(0, 3),
            "converged": st.none() | st.booleans(),
            "rho": st.none() | st.sampled_from([0.5, 1.0, 2.0]),
            "value": st.none() | st.floats(-1e6, 1e6),
            "scope": st.sampled_from(["global", "client"]),
        }
    ),
    max_size=12,
)
choices = {
    "metric": METRICS,
    "layer": [None, *LAYERS],
    "round": [None, *range(6)],
    "index": [None, *range(4)],
    "converged": [None, True, False],
    "rho": [None, 0.5, 1.0, 2.0],
    "client": [None, 3],
    "nowhere": [None, 1, "x"],
}
wanted = st.fixed_dictionaries(
    {},
    optional={
        name: st.sampled_from(values)
        | st.lists(st.sampled_from(values), max_size=3)
        | st.sets(st.sampled_from(values), max_size=3)
        for name, values in choices.items()
    },
)


def fits(row, where):
    return all(
        row.get(column) in (value if isinstance(value, (list, tuple, set)) else [value])
        for column, value in where.items()
    )


def frames(found):
    """The table as it is made, and as it comes back from a csv: other types, the same rows."""
    made = table(found) if found else table([{"metric": "loss"}]).iloc[:0]
    made = made.assign(rho=[row["rho"] for row in found])
    return made, pd.read_csv(io.StringIO(files.csv_text(made)))


@settings(deadline=None, max_examples=60)
@given(rows, wanted)
@pytest.mark.slow
def test_only_takes_the_rows_that_fit(found, where):
    expected = [i for i, row in enumerate(found) if fits(row, where)]
    for frame in frames(found):
        assert only(frame, **where).index.tolist() == expected
        assert only(frame, **where).equals(frame.loc[expected])


@settings(deadline=None, max_examples=60)
@given(rows, st.sampled_from(METRICS), wanted)
@pytest.mark.slow
def test_number_is_the_first_that_is_there(found, metric, where):
    where.pop("metric", None)
    expected = [
        row["value"]
        for row in found
        if row["metric"] == metric and fits(row, where) and row["value"] is not None
    ]
    made, read = frames(found)
    assert number(made, metric, **where) == (expected[0] if expected else None)
    assert number(read, metric, **where) == (
        pytest.approx(expected[0], rel=1e-8) if expected else None
    )
    assert number(only(made, metric=metric, **where)) == number(made, metric, **where)


@settings(deadline=None, max_examples=60)
@given(rows, st.sampled_from(METRICS), st.integers(2, 6))
@pytest.mark.slow
def test_rounds_are_in_order_each_once(found, metric, most):
    for frame in frames(found):
        there = sorted(
            {row["round"] for row in found if row["metric"] == metric and row["round"] is not None}
        )
        assert rounds(frame, metric) == there and last_round(frame, metric) == max(
            there, default=None
        )
        some = thin(rounds(frame, metric), most)
        assert (
            set(some) <= set(there) and some == sorted(some) and len(some) == min(len(there), most)
        )
        assert not there or (some[0], some[-1]) == (there[0], there[-1])
        assert rounds(frame) == sorted({row["round"] for row in found if row["round"] is not None})


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 200), st.integers(2, 20))
def test_spread_is_even(count, most):
    found = thin(range(count), most)
    gaps = {b - a for a, b in itertools.pairwise(found)}
    assert len(found) == min(count, most) and (not gaps or max(gaps) - min(gaps) <= 1)


def test_one_rule_for_missing_entries():
    frame = pd.DataFrame(
        {"metric": ["a", "b", None], "layer": [None, "x", math.nan], "value": [1.0, math.nan, 3.0]}
    )
    assert (
        only(frame, layer=None).index.tolist()
        == only(frame, layer=math.nan).index.tolist()
        == only(frame, layer=pd.NA).index.tolist()
        == [0, 2]
    )
    assert only(frame, metric=["a", None]).index.tolist() == [0, 2]
    assert only(frame, metric=[]).empty and only(frame, value=1).index.tolist() == [0]
    assert only(frame, client=None).equals(frame) and only(frame, client=0).empty
    assert only(frame).equals(frame)


def test_values_of_another_kind_equal_nothing():
    frame = table([{"metric": "a", "round": 1, "converged": True}])
    assert (
        only(frame, round="1").empty
        and only(frame, metric=1).empty
        and only(frame, round=1.5).empty
    )
    assert len(only(frame, round=1.0, converged=True)) == 1


def test_no_number_where_there_is_none():
    frame = table(
        [{"metric": "a", "value": None}, {"metric": "b", "value": 2.0, "converged": False}]
    )
    assert (
        number(frame, "a") is None
        and number(frame, "c") is None
        and number(frame, "b", column="nowhere") is None
    )
    assert (
        number(frame, "b", column="stderr") is None
        and number(frame, "b", column="converged") == 0.0
    )
    assert (
        number(frame.assign(value=["text", "2.5"]), "a") is None
        and number(frame.assign(value=["text", "2.5"]), "b") == 2.5
    )


def test_the_number_of_a_whole_round_is_not_that_of_a_client_or_layer():
    common = {"metric": "lambda_mean", "round": 2, "moment": "trained"}
    frame = table(
        [
            {**common, "scope": "client", "client": 0, "value": 1.0},
            {**common, "scope": "global", "layer": "fc1", "value": 2.0},
            {**common, "scope": "global", "index": 1, "value": 3.0},
            {**common, "scope": "global", "value": 4.0},
        ]
    )
    assert number(frame, "lambda_mean", round=2, moment="trained", **WHOLE) == 4.0


@pytest.mark.parametrize("module", [tables, files], ids=lambda m: m.__name__)
def test_the_examples_of_the_docstrings(module):
    failed, tried = doctest.testmod(module)
    assert failed == 0 and tried > 0
