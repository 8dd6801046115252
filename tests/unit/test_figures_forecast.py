"""The forecast times what a run will do: a warm step in the middle of training, with everything the method then does."""

from dataclasses import replace

import pytest

from fldiag.figures import forecast, make, plan
from fldiag.figures.scales import scale
from fldiag.figures.study import Study, Trial, diagnostic, final
from fldiag.training.setup import Setup

SMOKE = scale("smoke")


def planned(tmp_path, preset, method, *asks):
    study = Study("a", "somewhere", "words", draw=None, trials=(Trial(preset, method),), ask=asks or (final(),), paper="test", id="a")
    found = plan.made(SMOKE, [study], [], tmp_path)
    make.prepare(found, download=False)
    return found, next(iter(found.tasks.values()))


@pytest.mark.parametrize("preset, method, public", [("fedproj-cifar10-lda0.3", "fedproj", True), ("fedsol-cifar10-lda0.1", "fedsol", False)])
def test_a_step_of_the_middle_is_timed_and_the_first_one_is_not(tmp_path, preset, method, public, monkeypatch):
    """FedProj projects from a round on only, and its server distils."""
    rounds = []
    train = Setup.train
    monkeypatch.setattr(Setup, "train", lambda self, unit: (rounds.append((unit.t, set(unit.sent))), train(self, unit))[1])
    _, task = planned(tmp_path, preset, method)
    timed = forecast._step(task, download=False)
    middle = task.config.rounds // 2
    assert {t for t, _ in rounds} == {max(0, middle - 1), middle if middle else 1}
    assert timed.step > 0 and (timed.server > 0) == public
    if public:
        assert rounds[-1][1], "the server has sent what the projection needs"


def test_drift_is_charged_with_the_clients_own_examples(tmp_path):
    the_plan, task = planned(tmp_path, "fedsol-cifar10-lda0.1", "fedavg", diagnostic("drift", gradients=False))
    bare, _ = planned(tmp_path, "fedsol-cifar10-lda0.1", "fedavg")
    timed = forecast.Timed(step=1.0, server=0.0, size=10, train=5000, test=100)
    alone = replace(task, questions=[])
    c = task.config
    asked = forecast._seconds(task, the_plan, timed) - forecast._seconds(alone, bare, timed)
    samples = SMOKE.asks["drift"]["samples"]
    own = min(samples, 5000 / c.clients.total)
    assert asked == pytest.approx(3 * len(task.rounds) * c.clients.per_round * own / c.train.batch_size)
