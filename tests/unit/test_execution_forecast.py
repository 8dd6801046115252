"""Forecasts of work that is done at several places."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fldiag
from fldiag import Config, registry
from fldiag.diagnosis import measure
from fldiag.errors import FldiagError
from fldiag.execution import forecast
from fldiag.execution.choice import chosen
from fldiag.execution.shard import Shard
from fldiag.training.setup import Setup


@given(st.lists(st.floats(0, 1e6), max_size=30), st.integers(1, 10))
def test_between_an_equal_share_and_all_of_it(seconds, at_a_time):
    found = forecast.wall(seconds, at_a_time)
    least = max([sum(seconds) / at_a_time, *seconds], default=0.0)
    assert (
        least * (1 - 1e-9) <= found <= (2 - 1 / at_a_time) * least * (1 + 1e-9) + 1e-9
    )  # Graham's bound holds for any order
    assert math.isclose(forecast.wall(seconds, 1), sum(seconds), rel_tol=1e-9)


def test_another_executor_is_named_where_it_is_clearly_faster(monkeypatch):
    monkeypatch.setattr(forecast, "cores", lambda threads=None: 2)
    assert forecast.faster([[100.0] * 4], 400.0, 1)[:2] == ("processes:2", 204.0)
    assert forecast.faster([[50.0] * 2] * 2, 200.0, 1)[:2] == (
        "processes:2",
        104.0,
    )  # a round waits for the one before
    assert (
        forecast.faster([[100.0]], 100.0) is None and forecast.faster([[]], 0.0) is None
    )  # nothing to share
    assert forecast.faster([[1.0] * 4], 4.0) is None  # not worth starting
    assert forecast.faster([[100.0] * 4], 204.0) is None  # already so


@pytest.mark.parametrize("text", ["5/4", "0/4", "1", "a/b", "/", "-1/4", "²/4", "1/4/4"])
def test_a_part_that_is_none(text):
    with pytest.raises(FldiagError, match="--shard 1/4 to --shard 4/4") as caught:
        Shard.parse(text)
    assert caught.value.usage


def test_fewer_threads_are_named_where_a_worker_has_them():
    here = torch.get_num_threads()
    assert (
        forecast.Faster("processes:2", 60.0, here).said(400.0)
        == "--executor processes:2: 60 s instead of 7 min"
    )
    assert (
        forecast.Faster("processes:2", 60.0, here + 1)
        .said(400.0)
        .startswith(f"with OMP_NUM_THREADS={here + 1} in the ")
    )


@pytest.mark.parametrize(
    ("executor", "count"), [("serial", 1), ("processes:3", 3), ("dask:tcp://host:8786", None)]
)
def test_how_many_at_a_time(executor, count):
    assert forecast.workers(chosen(executor)) == count


@pytest.mark.parametrize(
    ("name", "executor", "said"),
    [
        (
            "landscape",
            "serial",
            ["about 7 min on this machine", "--executor processes:2: 3 min instead of 7 min"],
        ),
        ("landscape", "processes:2", ["about 3 min on this machine"]),
        (
            "landscape",
            "dask:tcp://host:8786",
            ["about 7 min of work for dask:tcp://host:8786, by the speed of this machine"],
        ),
        ("trace", "processes:2", ["about 7 min on this machine"]),
    ],
)  # it has no parts
def test_a_diagnostic_is_announced_as_long_as_it_takes_there(name, executor, said, monkeypatch):
    for module in (forecast, measure):
        monkeypatch.setattr(module, "cores", lambda threads=None: 2)
    subject = [SimpleNamespace(executor=executor)]
    found = list(measure._announced(registry.diagnostic.get(name), subject, {}, 400.0, whole=True))
    assert [text.split(";")[0] for text in found] == said


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
