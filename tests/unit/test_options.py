"""Options of a subject are checked like those of a diagnostic, and none is ignored."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fldiag
from fldiag.diagnosis.options import size
from fldiag.diagnosis.question import parse_question
from fldiag.runs.run import select_rounds


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = fldiag.Config.load(
        "digits",
        rounds=2,
        clients__per_round=2,
        train__epochs=1,
        model__name="mlp",
        checkpoint__clients="sampled",
    )
    return fldiag.train(config, out=tmp_path_factory.mktemp("options") / "run")


@pytest.fixture(scope="module")
def problem():
    return fldiag.Problem(
        torch.nn.Linear(2, 3), F.cross_entropy, (torch.eye(2), torch.tensor([0, 2]))
    )


def refused(target, name, **options):
    with pytest.raises(fldiag.FldiagError) as caught:
        fldiag.diagnose(target, name, **options)
    assert caught.value.usage
    return str(caught.value)


@pytest.mark.parametrize(
    "name, options, says",
    [
        ("spectrum", {"slice": 5}, "slice = 5 is not valid"),
        ("spectrum", {"memory": -5}, "memory = -5 is not a size"),
        ("spectrum", {"samples": 0}, "samples = 0"),
        ("spectrum", {"samples": "many"}, "samples = 'many'"),
        ("spectrum", {"client": -1}, "client = -1"),
        ("spectrum", {"precision": "fp8"}, "'fp32' or 'fp64'"),
        ("spectrum", {"sampels": 20}, "did you mean 'samples'?"),
        ("spectrum", {"rounds": "1"}, "'rounds' has no effect on spectrum"),
        ("spectrum", {"download": "perhaps"}, "download = 'perhaps'"),
        ("forgetting", {"rounds": 1.5}, "is not valid"),
        ("forgetting", {"rounds": 7}, "no checkpoint of round 7"),
        ("forgetting", {"stack": "odd"}, "stack = 'odd'"),
        ("forgetting", {"client": 1}, "'client' has no effect on forgetting"),
        ("personalise", {"samples": 5}, "samples"),
    ],
)
def test_wrong_values_are_one_error(run, name, options, says):
    assert says in refused(run, name, **options)


def test_rounds_are_numbers_too(run):
    one, text, several = (fldiag.diagnose(run, "forgetting", rounds=r) for r in (1, "1", [1]))
    assert one["value"].tolist() == text["value"].tolist() == several["value"].tolist() and set(
        one["round"].dropna()
    ) == {1}
    assert (
        select_rounds(2, [1, 2]) == [2]
        and select_rounds(range(1, 3), [1, 2]) == [1, 2]
        and size(5) == 5
    )


@pytest.mark.parametrize(
    "options",
    [
        {"data": "iris"},
        {"model": "mlp"},
        {"round": 1},
        {"precision": "fp64"},
        {"slice": "test"},
        {"samples": 1},
        {"memory": "1G"},
        {"root": "."},
        {"download": True},
    ],
)
def test_what_would_be_ignored_is_refused(problem, options):
    (name,) = options
    assert refused(problem, "spectrum", **options).startswith(f"option {name} = ")


def test_what_a_problem_is_already_may_be_said(problem):
    fldiag.diagnose(
        problem, "spectrum", precision="fp32", device="cpu", download=False, samples=None
    )


def test_a_history_refuses_too(run):
    history = fldiag.History.of(run)
    assert "option precision = 'fp64'" in refused(history, "forgetting", precision="fp64")
    assert "option rounds = 1" in refused(history, "forgetting", rounds=1)
    fldiag.diagnose(history, "forgetting", precision="fp32")


def test_a_round_is_chosen_among_those_of_a_run(run):
    assert set(fldiag.diagnose(run, "spectrum", round=1, samples=20)["round"].dropna()) == {1}
    assert "round = 1 chooses a checkpoint of a run" in refused(
        run.checkpoint(2), "spectrum", round=1
    )


def test_what_is_given_is_taken_apart():
    for every, values in (
        (False, {}),
        (False, {"rounds": "all"}),
        (True, {"rounds": np.arange(3)}),
    ):
        assert parse_question("matching", values).options.every_round is every
    question = parse_question(
        "spectrum", {"k": 3, "samples": 20, "memory": "1M", "density": True, "precision": "fp64"}
    )
    expected = {"samples": 20, "memory": 2**20, "precision": "fp64"}
    assert question.subject_options.values() == expected and question.options.k == 3
    assert question.options.density
