"""The language of conditions: what it says, and what it refuses at which place."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fldiag import registry
from fldiag.compare.conditions import parse
from fldiag.errors import FldiagError
from fldiag.report import summary
from fldiag.results.numbers import Number, numbers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("accuracy < baseline - 1pt", ("accuracy", "<", 1, -0.01)),
        ("accuracy<80%", ("accuracy", "<", 0, 0.8)),
        (" forgetting  >  .2 ", ("forgetting", ">", 0, 0.2)),
        ("loss >= baseline + 5%", ("loss", ">=", 1.05, 0)),
        ("worst_decile <= baseline", ("worst_decile", "<=", 1, 0)),
        ("λ1 > 1.5e1", ("lambda_1", ">", 0, 15)),
        ("loss > -1e-3", ("loss", ">", 0, -0.001)),
        ("drop > baseline + 0.5 pt", ("drop", ">", 1, 0.005)),
        ("accuracy < baseline - 10%", ("accuracy", "<", 0.9, 0)),
    ],
)
def test_says(text, says):
    found = parse(text)
    assert (found.number.name, found.sign) == says[:2] and (
        found.scale,
        found.offset,
    ) == pytest.approx(says[2:])


@pytest.mark.parametrize(
    ("text", "at", "says"),
    [
        ("", 1, "known: accuracy"),
        ("accurcy < 1", 1, "did you mean 'accuracy'"),
        ("accuracy", 9, "write one of <"),
        ("accuracy = 3", 10, "'='"),
        ("accuracy + 3", 10, "comparison"),
        ("accuracy <", 11, "a number is expected"),
        ("accuracy < basline", 12, "did you mean 'baseline'"),
        ("accuracy < baseline * 2", 21, "'\\*'"),
        ("accuracy < baseline 3", 21, r"\+ or -"),
        ("accuracy < baseline - 1px", 24, "unknown unit"),
        ("loss > 3pt", 9, "not a fraction"),
        ("accuracy < 3 and loss > 1", 14, "conditions one by one"),
        ("accuracy < 3pt 4", 16, "several conditions"),
        ("__import__('os')", 11, r"'\('"),
        ("accuracy < baseline -", 22, "a number"),
    ],
)
def test_refuses_at_the_place(text, at, says):
    with pytest.raises(FldiagError, match=f"position {at}: .*{says}") as caught:
        parse(text)
    assert caught.value.usage and caught.value.remedy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("accuracy < 1e400", "too large"),
        ("loss > baseline - " + "9" * 150 + "e200%", "too large"),
        ("(" * 10**6, "1,000,000 characters"),
    ],
)
def test_refuses_what_is_out_of_reach_in_few_words(text, says):
    with pytest.raises(FldiagError, match=says) as caught:
        parse(text)
    assert len(str(caught.value)) < 500


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=st.sampled_from("acury<>=+-%0123456789. ptbaselinλ()_e\n")) | st.text())
def test_any_text_is_a_condition_or_one_error(text):
    try:
        assert parse(text).number.name in numbers()
    except FldiagError as error:
        assert "position" in error.what


def test_a_diagnostic_brings_its_numbers(monkeypatch):
    """To the conditions, and to the first table of a report."""
    mine = Number(
        "wiggle",
        "how far it wiggles",
        "lower",
        {"metric": "wiggle"},
        column="Wiggle of the weights",
        short="wiggle",
    )
    entry = dataclasses.replace(registry.diagnostic.get("spectrum"), name="mine", numbers=(mine,))
    monkeypatch.setitem(registry.diagnostic.entries, "mine", entry)
    assert parse("wiggle < 3").number == dataclasses.replace(mine, source="mine")
    assert "Wiggle of the weights" in [n.column for n in summary.shown_numbers()]
