"""The forecast times what a run will do: a warm step in the middle of training, with everything the method then does."""

import pytest

from fldiag.training.setup import Setup
from fldiag_papers import forecast, make, plan
from fldiag_papers.scales import scale
from fldiag_papers.study import Study, Trial, final

SMOKE = scale("smoke")


def planned(tmp_path, preset, method, *asks):
    study = Study(
        "a",
        "somewhere",
        "words",
        draw=None,
        trials=(Trial(preset, method),),
        ask=asks or (final(),),
        paper="test",
        id="a",
    )
    found = plan.make_plan(SMOKE, [study], [], tmp_path)
    make.prepare(found, download=False)
    return found, next(iter(found.tasks.values()))


@pytest.mark.parametrize(
    "preset, method, public",
    [("fedproj-cifar10-lda0.3", "fedproj", True), ("fedsol-cifar10-lda0.1", "fedsol", False)],
)
def test_a_step_of_the_middle_is_timed_and_the_first_one_is_not(
    tmp_path, preset, method, public, monkeypatch
):
    """FedProj projects from a round on only, and its server distils."""
    rounds = []
    train = Setup.train
    monkeypatch.setattr(
        Setup,
        "train",
        lambda self, unit: (rounds.append((unit.t, set(unit.sent))), train(self, unit))[1],
    )
    _, task = planned(tmp_path, preset, method)
    timed = forecast._step(task, download=False)
    middle = task.config.rounds // 2
    assert {t for t, _ in rounds} == {max(0, middle - 1), middle if middle else 1}
    assert timed.step > 0 and (timed.server > 0) == public
    if public:
        assert rounds[-1][1], "the server has sent what the projection needs"


@pytest.mark.parametrize(
    "runs, parts, cohorts, seconds",
    [
        (1, [12.0], 10, 7.0),
        (1, [12.0], 1, 12.0),
        (2, [12.0, 8.0], 10, 12.0),
        (2, [12.0], 10, 12.0),
        (1, [], 1, 0.0),
    ],
)
def test_a_single_run_is_shared_out_by_its_clients(runs, parts, cohorts, seconds):
    """Ten of its twelve seconds; not where another run cannot be timed."""
    found = forecast.Forecast(runs, 0, 0, parts, 0.0, {}, cohorts, shared=10.0)
    assert found.wall(2) == pytest.approx(seconds) and found.seconds == sum(parts)
