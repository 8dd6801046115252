"""The call path: one table a question, kept and verified; what stands in its files; how much of fldiag it runs."""

import json
import shutil

import histories
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fldiag
from fldiag.diagnosis.diagnose import diagnose, identity
from fldiag.errors import FldiagError
from fldiag.registry import diagnostic
from fldiag.results.files import digest, get_table, put_table
from fldiag.results.table import Note, standing, table

KEY = "0123456789abcdef"
FRAME = table([{"metric": "eigenvalue", "index": i, "value": 8.54 / (i + 1)} for i in range(5)])


@pytest.fixture
def store(tmp_path):
    put_table(tmp_path, KEY, FRAME, {"seed": 0})
    return tmp_path


def test_what_was_put_comes_back_under_its_key_alone(store):
    pd.testing.assert_frame_equal(get_table(store, KEY), FRAME)
    assert json.loads((store / f"{KEY}.json").read_text())["seed"] == 0
    for ending in ("json", "parquet"):
        (store / f"other.{ending}").write_bytes((store / f"{KEY}.{ending}").read_bytes())
    assert get_table(store, "other") is None and get_table(store, "none") is None


@pytest.mark.parametrize("ending", ["json", "parquet"])
def test_a_damaged_table_is_never_a_number(store, ending):
    file = store / f"{KEY}.{ending}"
    content = file.read_bytes()
    flipped = [(i, mask) for i in range(0, len(content), 29) for mask in (1, 128)]
    damaged = [content[:i] + bytes([content[i] ^ m]) + content[i + 1 :] for i, m in flipped]
    for bad in [*damaged, b"", content[:-1], b"[]", b"3", b'{"key": 3}', b"[" * 10000]:
        file.write_bytes(bad)
        found = get_table(store, KEY)
        assert found is None or (ending == "json" and found.equals(FRAME))
    file.unlink()
    assert get_table(store, KEY) is None


def problem(net=None, scale=1.0, **options):
    y = torch.arange(90) % 3
    g = torch.Generator().manual_seed(0)
    x = 3 * F.one_hot(y, 3).float() + 0.5 * torch.randn(90, 3, generator=g)
    if net is None:
        net = nn.Linear(3, 3)
        with torch.no_grad():
            net.weight.copy_(2 * torch.eye(3))
            net.bias.zero_()
    return fldiag.Problem(net, F.cross_entropy, (scale * x, y), name="mine", **options)


def test_a_table_that_cannot_be_kept_is_still_an_answer(tmp_path):
    (tmp_path / "file").touch()
    told = []
    found = fldiag.diagnose(
        problem(), "spectrum", k=1, cache=tmp_path / "file" / "x", tell=told.append
    )
    assert len(found) and any("not kept for later: cannot write" in text for text in told)


def test_a_second_answer_computes_nothing_and_draws_nothing(tmp_path, monkeypatch):
    first = diagnose("spectrum", [problem()], {"k": 1}, out=tmp_path)
    monkeypatch.setattr("fldiag.results.files.commit", lambda: "1a2b")
    diagnose("spectrum", [problem()], {"k": 1}, out=tmp_path)  # the commit is another one

    def never(*args, **options):
        raise AssertionError

    monkeypatch.setattr("fldiag.diagnosis.diagnose.pictures", never)
    monkeypatch.setattr("fldiag.diagnosis.diagnose.put_table", never)
    again = diagnose("spectrum", [problem()], {"k": 1}, out=tmp_path)
    assert again.files == first.files and all(file.exists() for file in again.files)
    pd.testing.assert_frame_equal(again.table, first.table)
    first.files[-1].write_bytes(b"")
    with pytest.raises(AssertionError):
        diagnose("spectrum", [problem()], {"k": 1}, out=tmp_path)


def test_tables_of_several_subjects_stand_one_below_the_other(tmp_path):
    both = [problem(), problem(scale=-1.0)]
    parts = [fldiag.diagnose(one, "spectrum", k=1, tell=lambda text: None) for one in both]
    for executor in ("serial", "processes:2"):
        joint = fldiag.diagnose(both, "spectrum", k=1, executor=executor, tell=lambda text: None)
        pd.testing.assert_frame_equal(joint, pd.concat(parts, ignore_index=True))
        assert joint.attrs["diagnostic"] == "spectrum"
    named = fldiag.diagnose(both, "spectrum", k=1, names="a,b", tell=lambda text: None)
    assert {*named["run"]} == {"a", "b"} and {one.name for one in both} == {"mine"}


def test_what_a_run_holds_now_decides(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs["fedavg"].path, run, ignore=shutil.ignore_patterns("diagnostics"))
    file = run / "rounds/0001.safetensors"
    content = file.read_bytes()

    def finite():
        rows = fldiag.diagnose(run, "doctor", cache=tmp_path / "cache")
        return rows.loc[rows["metric"] == "finite", "severity"].tolist()

    assert finite() == ["healthy"]
    file.write_bytes(content[: len(content) // 2] + bytes(1) + content[len(content) // 2 + 1 :])
    assert finite() == ["fault"]
    file.write_bytes(content)
    assert finite() == ["healthy"]
    names = [
        digest(identity(fldiag.load(run, data=name), True))
        for name in (None, None, "digits", "iris")
    ]
    assert names[0] == names[1] and len(set(names)) == 3


def doubts(frame):
    return [item.text for item in standing(frame) if isinstance(item, Note)]


SMALL = {"points": 3, "k": 2, "draws": 4, "steps": 3}
OF_WEIGHTS = [n for n in diagnostic.names() if diagnostic.get(n).on in ("problem", "checkpoints")]


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_every_result_about_weights_has_the_accuracy_beside_the_loss(name):
    options = {k: v for k, v in SMALL.items() if k in diagnostic.get(name).options.model_fields}
    several = diagnostic.get(name).on == "checkpoints"
    subject = [problem(), problem()] if several else problem()
    frame = fldiag.diagnose(subject, name, tell=lambda text: None, **options)
    texts = [item.text for item in standing(frame)]
    assert texts and all("accuracy 100 %, a guess 33.3 %" in text for text in texts)
    assert all("loss" in text and "as passed" in text for text in texts)


def test_no_better_than_a_guess_is_a_warning_with_the_remedy():
    with pytest.warns(UserWarning, match="mine: no better than a guess.*--normalise"):
        fldiag.diagnose(problem(scale=-1.0), "spectrum", k=1)


def test_a_summary_says_what_is_missing():
    w = histories.identity()
    rounds = [histories.stored(w, [w, w * torch.nan], w, round=t) for t in range(1, 11)]
    parts = [range(60), range(60, 120)]
    past = histories.history(histories.linear(), histories.separable(), parts, *rounds)
    answer = diagnose("forgetting", [past], {"own": False}, write=False)
    notes = [item.text for item in answer.summary() if isinstance(item, Note)]
    says = "the trained weights of client 1 are not finite: left out"
    assert notes[:8] == [f"round {t}: {says}" for t in range(1, 9)]
    assert notes[8:] == ["and 2 more (rows metric = missing of the table)"]


@pytest.mark.parametrize(
    ("accuracy", "guess", "n", "is_said"),
    [(0.9, 0.1, 1000, 0), (0.11, 0.1, 1000, 1), (0.95, 0.8, 1000, 0), (0.5, 0.5, 2, 0)],
)
def test_what_is_worth_a_word(accuracy, guess, n, is_said):
    about = {"run": "r", "slice": "test", "n_examples": n, "inputs": "pixels / 255"}
    row = {"metric": "accuracy", "value": accuracy, "guess": guess, **about}
    other = {**row, "round": 1, "scope": "client", "client": 2, "value": 0.0}
    assert len(doubts(table([{**row, "round": 2, "scope": "global"}, other]))) == is_said


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("spectrum", {"kk": 1}, "did you mean 'k'"),
        ("spectrum", {"rounds": "last"}, "unknown key 'rounds'"),
        ("spectrum", {"memory": "5"}, "at least 1k"),
        ("spectrum", {"names": "a,a"}, "one name twice"),
        ("spectrum", {"slice": "test"}, "has no effect on a Problem"),
        ("matching", {}, "Problem cannot be diagnosed"),
    ],
)
def test_a_wrong_question_is_one_error(name, options, says):
    with pytest.raises(FldiagError, match=says):
        fldiag.diagnose(problem(), name, **options)


def test_runs_of_one_name_are_told_apart(runs, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "run").symlink_to(runs["fedavg"].path)
    paths = [tmp_path / folder / "run" for folder in ("a", "b")]
    assert fldiag.diagnose(paths, "doctor")["run"].unique().tolist() == ["run (1)", "run (2)"]
    names = fldiag.diagnose(paths, "doctor", names="x,y")["run"].unique().tolist()
    assert names == ["x", "y"]
