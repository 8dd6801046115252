"""``fldiag check`` and ``fldiag diff`` as a build server types them: exit codes, JSON, JUnit."""

import json
import shutil

import pandas as pd
import pytest
import torch
from commands import run

import fldiag
from fldiag.config import Config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One round and eight of the same training: the second is clearly better."""
    folder = tmp_path_factory.mktemp("verb")
    for name, rounds in (("short", 1), ("long", 8)):
        fldiag.train(
            Config.load(
                "digits", rounds=rounds, model__name="mlp", train__epochs=1, partition__kind="iid"
            ),
            out=folder / name,
        )
    return folder


@pytest.fixture(autouse=True)
def here(trained, monkeypatch):
    monkeypatch.chdir(trained)


@pytest.mark.parametrize(
    ("conditions", "strict", "code", "verdict"),
    [
        (["accuracy < baseline - 1pt", "loss > baseline"], False, 3, "fail"),
        (["accuracy > baseline"], False, 0, "pass"),
        (["accuracy < 99.9% ", "accuracy > baseline"], False, 3, "fail"),
        (["lambda_1 > 1e9"], True, 0, "pass"),
        (["loss < baseline", "worst_decile < 200%"], True, 3, "fail"),
    ],
)
def test_exit_codes(conditions, strict, code, verdict, tmp_path):
    words = [w for c in conditions for w in ("--fail-if", c)] + ["--strict"] * strict
    result = run("check", "short", "--baseline", "long", *words, "--out", tmp_path, code=code)
    assert f"verdict: {verdict}" in result.stdout


def test_undecided_passes_unless_it_is_strict(tmp_path):
    words = ["check", "short", "short", "--fail-if", "accuracy < 10.5%", "--out", tmp_path]
    value = fldiag.check("short", fail_if=["accuracy < 0.5"]).table["value"].iloc[0]
    words[4] = f"accuracy < {100 * value:.3f}%"
    assert "verdict: undecided" in run(*words).stdout
    run(*words, "--strict", code=3)


def test_a_model_that_cannot_be_made_is_no_noise(tmp_path):
    result = run("check", "short", "long", "--model", "os:system", "--out", tmp_path, code=2)
    assert (
        "verdict: error (not every number could be computed)" in result.stdout
        and "failed (TypeError" in result.stdout
    )
    assert "model factory 'os:system' failed (TypeError" in result.stderr


@pytest.fixture(scope="module")
def lacking(trained):
    """Sides of which something is missing: the model, the data, the weights, finite weights, clients."""
    run, folder = fldiag.load(trained / "short"), trained / "lacking"
    state = run.checkpoint().state
    folder.mkdir()
    torch.save(state, folder / "plain.pt")
    torch.save({n: t * torch.nan for n, t in state.items()}, folder / "nan.pt")
    shutil.copy(run.path / "rounds" / "0001.safetensors", folder / "alone.pt")
    for name in ("gone", "unread"):
        shutil.copytree(run.path, folder / name)
    (folder / "gone" / "rounds" / "0001.safetensors").unlink()
    (folder / "unread" / "rounds" / "0001.safetensors").write_bytes(b"damaged")
    return folder


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["plain.pt"], "--data digits"),
        (["plain.pt", "plain.pt"], "--data digits"),
        (["plain.pt", "--data", "digits"], "--model NAME"),
        (["alone.pt", "--data", "npz:nowhere.npz"], "leave out this condition"),
        (["alone.pt", "--data", "nowhere:f"], "install it"),
        (["nan.pt", "--model", "mlp", "--data", "digits"], "from before the training diverged"),
        (["alone.pt", "--fail-if", "forgetting > 0.2"], "run"),
        (["gone", "--fail-if", "lambda_1 > 9"], "restore"),
        (["unread", "--fail-if", "loss > 9", "--data", "digits"], "restore"),
        (["alone.pt", "--fail-if", "drift > 2", "--fail-if", "loss > 1e9"], "run"),
        (["alone.pt", "--fail-if", "drift > 2", "--strict"], "run"),
    ],
    ids=lambda w: " ".join(w) if isinstance(w, list) else "",
)
def test_what_could_not_be_computed_is_not_green(lacking, tmp_path, monkeypatch, words, remedy):
    monkeypatch.chdir(lacking)
    words = [*words, *(["--fail-if", "accuracy < 1%"] if "--fail-if" not in words else [])]
    result = run("check", *words, "--json", "--out", tmp_path, code=2)
    assert (
        result.stderr.startswith("error: not tested: ") and remedy in result.stderr.splitlines()[1]
    ), result.stderr
    answer = json.loads(result.stdout)
    errors = [row for row in answer["rows"] if row["verdict"] == "error"]
    assert (
        answer["verdict"] == "error"
        and errors
        and all(row["note"] and row["remedy"] for row in errors)
    )


def test_following_the_remedy_tests_the_model(lacking, tmp_path, monkeypatch):
    monkeypatch.chdir(lacking)
    words = ["check", "plain.pt", "plain.pt", "--out", tmp_path]
    for more in (["--data", "digits"], ["--model", "mlp"]):
        assert more[0] in run(*words, code=2).stderr
        words += more
    assert "verdict: pass" in run(*words).stdout
    assert fldiag.check("plain.pt", "plain.pt").verdict == "error"


def test_a_failure_comes_before_what_could_not_be_computed(lacking, tmp_path, monkeypatch):
    monkeypatch.chdir(lacking)
    words = [
        "check",
        "alone.pt",
        "--fail-if",
        "loss > 0",
        "--fail-if",
        "drift > 2",
        "--out",
        tmp_path,
    ]
    result = run(*words, code=3)
    assert "verdict: fail" in result.stdout and "not tested: 'drift > 2'" in result.output


def test_for_machines(tmp_path):
    found = json.loads(run("check", "short", "long", "--json", "--out", tmp_path, code=3).stdout)
    assert (
        found["verdict"] == "fail"
        and found["rows"][0]["metric"] == "accuracy"
        and found["rows"][0]["low"] < found["rows"][0]["high"] < 0
    )
    frame = pd.read_csv(found["paths"][-1])
    assert frame["verdict"].tolist() == ["fail"] and frame["question"].tolist() == ["models"]
    diff = json.loads(
        run("diff", "short", "long", "--number", "loss", "--json", "--out", tmp_path).stdout
    )
    assert diff["rows"][0]["better"] == "B" and "two given models" in diff["question"]
