"""Forecasts of work that is done at several places."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fldiag
from fldiag import Config
from fldiag.errors import FldiagError
from fldiag.execution.executor import Shard, parse_executor
from fldiag.training import forecast
from fldiag.training.setup import Setup


@given(st.lists(st.floats(0, 1e6), max_size=30), st.integers(1, 10))
def test_between_an_equal_share_and_all_of_it(seconds, at_a_time):
    found = forecast.wall(seconds, at_a_time)
    least = max([sum(seconds) / at_a_time, *seconds], default=0.0)
    assert (
        least * (1 - 1e-9) <= found <= (2 - 1 / at_a_time) * least * (1 + 1e-9) + 1e-9
    )  # Graham's bound holds for any order
    assert math.isclose(forecast.wall(seconds, 1), sum(seconds), rel_tol=1e-9)


@pytest.mark.parametrize("text", ["5/4", "0/4", "1", "a/b", "/", "-1/4", "²/4", "1/4/4"])
def test_a_part_that_is_none(text):
    with pytest.raises(FldiagError, match="--shard 1/4 to --shard 4/4") as caught:
        Shard.parse(text)
    assert caught.value.usage


@pytest.mark.parametrize(
    ("executor", "count"), [("serial", 1), ("processes:3", 3), ("dask:tcp://host:8786", None)]
)
def test_how_many_at_a_time(executor, count):
    assert parse_executor(executor).workers_here() == count


def test_what_is_timed_is_a_step_in_the_middle_of_the_training_with_a_teacher_to_project_on(
    monkeypatch,
):
    timed, train = [], Setup.train
    monkeypatch.setattr(
        Setup, "train", lambda setup, unit: timed.append(unit) or train(setup, unit)
    )
    found = fldiag.forecast(
        Config.load("digits", method__name="fedproj", model__name="mlp", rounds=8)
    )
    assert found.clients == 10 and 4 <= timed[-1].t < 8 and "teacher" in timed[-1].sent
