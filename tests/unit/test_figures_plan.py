"""Which runs several studies share, and what a run has to keep."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest

from fldiag.errors import FldiagError
from fldiag.runs.run import Run
from fldiag_papers import make, plan, questions, workers
from fldiag_papers.scales import scale
from fldiag_papers.study import Study, Trial, curve, diagnostic, final, personal, seconds

SMOKE = scale("smoke")
PRESET = "fedsol-cifar10-lda0.1"
BENCH = workers.Bench(SMOKE, is_strict=True)


def study(id, *trials, ask=(final(),), **more):
    return Study(
        id, "somewhere", "words", draw=None, trials=trials, ask=ask, paper="test", id=id, **more
    )


def made(studies, everything=(), store=None):
    found = plan.make_plan(SMOKE, studies, everything, store)
    assert make.prepare(found, download=False) == {}
    return found


def test_studies_with_the_same_protocol_are_one_run(tmp_path):
    a, b = (
        study("a", Trial(PRESET, "fedavg")),
        study("b", Trial(PRESET, "fedavg", label="again"), Trial(PRESET, "fedsol")),
    )
    found = made([a, b], store=tmp_path)
    assert sorted(len(t.users) for t in found.tasks.values()) == [1, 2]
    assert found.cells["test/a", 0, 0] == found.cells["test/b", 0, 0] != found.cells["test/b", 1, 0]


def test_a_run_keeps_what_any_study_wants_whichever_is_asked_for(tmp_path):
    plain, hungry = (
        study("plain", Trial(PRESET, "fedavg")),
        study("hungry", Trial(PRESET, "fedavg"), ask=(diagnostic("drift", steps="kl"),)),
    )
    alone, both = (
        made([plain], [plain, hungry], tmp_path),
        made([plain, hungry], [plain, hungry], tmp_path),
    )
    (task,), (other,) = alone.tasks.values(), both.tasks.values()
    assert (
        task.config == other.config
        and task.config.checkpoint.clients == "sampled"
        and task.config.metrics.proximal == "kl"
    )
    assert list(task.asks) != list(other.asks), "only what was asked for is answered"
    (poor,) = made([plain], [plain], tmp_path).tasks.values()
    assert poor.config.checkpoint.clients == "none" and poor.core == task.core


def test_studies_that_cannot_share_a_recording_are_told(tmp_path):
    with pytest.raises(FldiagError, match="different proximal losses"):
        made(
            [
                study(
                    "a",
                    Trial(PRESET, "fedavg"),
                    ask=(diagnostic("drift", steps="kl"), diagnostic("drift", steps="l2")),
                )
            ],
            store=tmp_path,
        )


def test_rounds_of_a_history_are_spread_and_end_with_the_last(tmp_path):
    (task,) = plan.make_plan(
        scale("small"),
        [study("a", Trial(PRESET, "fedavg"), ask=(diagnostic("drift"),))],
        [],
        tmp_path,
    ).tasks.values()
    assert task.rounds == (2, 4, 6, 8, 10, 12)
    task = next(
        iter(
            plan.make_plan(
                scale("paper"),
                [study("a", Trial(PRESET, "fedavg"), ask=(diagnostic("drift"),))],
                [],
                tmp_path,
            ).tasks.values()
        )
    )
    assert (
        len(task.rounds) == 30 and task.rounds[-1] == 300 and all(r % 10 == 0 for r in task.rounds)
    )


def test_questions_of_few_seeds(tmp_path):
    a = study("a", Trial(PRESET, "fedavg"), ask=(final(), replace(curve(), seeds=1)), seeds=2)
    found = plan.make_plan(scale("small"), [a], [], tmp_path)
    asked = {
        t.config.seed: sorted(ask.name for ask in t.asks.values()) for t in found.tasks.values()
    }
    assert asked == {0: ["curve", "final"], 1: ["final"]}


def test_a_trial_that_is_no_config_names_its_study(tmp_path):
    with pytest.raises(FldiagError, match=r"test/a, trial fedsol: .*rhoo"):
        made([study("a", Trial(PRESET, "fedsol", {"method.rhoo": 1.0}))], store=tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of which the client weights of all rounds are wanted, and its bench."""
    store = tmp_path_factory.mktemp("store")
    (task,) = made(
        [
            study(
                "a",
                Trial(PRESET, "scaffold"),
                ask=(final(), diagnostic("drift", rho=())),
            )
        ],
        store=store,
    ).tasks.values()
    outcome = workers.perform(BENCH, (task, plan.Plan(SMOKE, store).new_folder(task)))
    return task, outcome, store


def test_a_run_is_trained_asked_and_thinned(trained):
    task, outcome, _ = trained
    run = Run.open(outcome.path)
    assert run.status == "finished" and outcome.error == "" and task.is_done(Run.open(outcome.path))
    assert run.rounds == [1, 2, 3, 4]
    assert not list((outcome.path / "state").glob("client*")), (
        "control variates of a finished run serve nobody"
    )
    assert [f for f in run.index["files"] if not (outcome.path / f).is_file()] == []
    value = (
        plan.answers(outcome.path)
        .get(*next(k for k in task.asks if k[0] == "final"))["value"]
        .iloc[0]
    )
    assert value == pytest.approx(100 * run.metrics.query("metric == 'accuracy'")["value"].iloc[-1])


def test_what_is_done_is_not_done_again(trained, monkeypatch):
    task, outcome, _store = trained
    stamps = {f: f.stat().st_mtime_ns for f in outcome.path.rglob("*") if f.is_file()}
    monkeypatch.setattr(workers.questions, "answer", lambda *a: pytest.fail("asked again"))
    assert workers.perform(BENCH, (task, outcome.path)).path == outcome.path
    assert {f: f.stat().st_mtime_ns for f in outcome.path.rglob("*") if f.is_file()} == stamps


def test_a_damaged_answer_is_asked_again_and_that_is_said(trained):
    task, outcome, _store = trained
    key = next(k for k in task.asks if k[0] == "final")
    file = outcome.path / "answers" / f"{'-'.join(key)}.parquet"
    good, value = file.read_bytes(), plan.answers(outcome.path).get(*key)
    file.write_bytes(good[:200] + bytes([good[200] ^ 1]) + good[201:])
    assert plan.answers(outcome.path).get(*key) is None and not task.is_done(Run.open(outcome.path))
    again = workers.perform(BENCH, (task, outcome.path))
    assert again.path == outcome.path and again.error == ""
    assert again.notes == [f"cache entry {'-'.join(key)} was damaged and is computed again"]
    assert task.is_done(Run.open(outcome.path)) and plan.answers(outcome.path).get(*key).equals(
        value
    )


def test_a_new_question_is_asked_of_the_old_run_where_it_has_the_weights(trained):
    task, outcome, store = trained
    (more,) = made(
        [study("b", Trial(PRESET, "scaffold"), ask=(diagnostic("spectrum", samples=50, k=1),))],
        store=store,
    ).tasks.values()
    assert more.config.checkpoint != task.config.checkpoint and more.fits(Run.open(outcome.path))
    (states,) = made(
        [study("c", Trial(PRESET, "scaffold"), ask=(personal(1),))], store=store
    ).tasks.values()
    assert not states.fits(Run.open(outcome.path)), "the clients' states are gone"


def test_a_poorer_run_does_not_serve(tmp_path):
    (poor,) = made([study("a", Trial(PRESET, "fedavg"))], store=tmp_path).tasks.values()
    path = workers.perform(BENCH, (poor, plan.Plan(SMOKE, tmp_path).new_folder(poor))).path
    assert Run.open(path).rounds == [4]
    for ask in (diagnostic("drift"), diagnostic("matching")):  # of several rounds, of the last
        (rich,) = made(
            [study("a", Trial(PRESET, "fedavg"), ask=(ask,))], store=tmp_path
        ).tasks.values()
        assert rich.core == poor.core and not rich.fits(Run.open(path))


def test_rounds_that_are_trained_again_are_clocked_once(tmp_path, monkeypatch):
    """A run that was killed after round 3 and had stored 2 goes on with the third."""
    (task,) = plan.make_plan(
        SMOKE, [study("a", Trial(PRESET, "fedavg"), ask=(seconds(),))], [], tmp_path
    ).tasks.values()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / questions.CLOCK).write_text('{"seconds": [1.0, 2.0, 3.0]}')

    def train(config, *, on_event, **more):
        for number in (3, 4):
            on_event({"event": "round", "round": number, "rounds": 4})

    monkeypatch.setattr(workers.rounds, "train", train)
    workers._train(task, tmp_path / "run", BENCH, None)
    clock = json.loads((tmp_path / "run" / questions.CLOCK).read_text())["seconds"]
    assert clock[:2] == [1.0, 2.0] and len(clock) == 4


def test_a_clock_of_the_first_rounds_only_times_no_run(tmp_path):
    (tmp_path / questions.CLOCK).write_text('{"seconds": [9.0, 2.0, 3.0, 4.0]}')
    subject = SimpleNamespace(run=SimpleNamespace(path=tmp_path, done=4, common={}))
    assert questions.answer(subject, "seconds", {})["value"].tolist() == [3.0]
    subject.run.done = 5
    with pytest.raises(FldiagError, match="not all of its rounds were timed"):
        questions.answer(subject, "seconds", {})


def test_a_failure_is_an_outcome(tmp_path):
    (task,) = made(
        [
            study(
                "a",
                Trial(PRESET, "fedavg"),
                ask=(diagnostic("spectrum", k=2, params="nothing.*"), final()),
            )
        ],
        store=tmp_path,
    ).tasks.values()
    outcome = workers.perform(workers.Bench(SMOKE), (task, tmp_path / "run"))
    assert outcome.error.startswith("spectrum: ") and not task.is_done(Run.open(outcome.path))
    assert isinstance(
        plan.answers(outcome.path).get(*next(k for k in task.asks if k[0] == "final")),
        pd.DataFrame,
    )
