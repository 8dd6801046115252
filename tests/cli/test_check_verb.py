"""``fldiag check`` and ``fldiag diff`` as a build server types them: exit codes, JSON, JUnit."""

import json
from xml.etree import ElementTree

import pandas as pd
import pytest
from commands import last, run

import fldiag
from fldiag.config import Config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One round and eight of the same training: the second is clearly better."""
    folder = tmp_path_factory.mktemp("verb")
    for name, rounds in (("short", 1), ("long", 8)):
        fldiag.train(Config.load("digits", rounds=rounds, model__name="mlp", train__epochs=1, partition__kind="iid"), out=folder / name)
    return folder


@pytest.fixture(autouse=True)
def here(trained, monkeypatch):
    monkeypatch.chdir(trained)


@pytest.mark.parametrize(("conditions", "strict", "code", "verdict"), [
    (["accuracy < baseline - 1pt", "loss > baseline"], False, 3, "fail"), (["accuracy > baseline"], False, 0, "pass"),
    (["accuracy < 99.9% ", "accuracy > baseline"], False, 3, "fail"), (["lambda_1 > 1e9"], True, 0, "pass"),
    (["loss < baseline", "worst_decile < 200%"], True, 3, "fail")])
def test_exit_codes_and_junit(conditions, strict, code, verdict, tmp_path):
    words = [w for c in conditions for w in ("--fail-if", c)] + ["--strict"] * strict
    result = run("check", "short", "--baseline", "long", *words, "--junit", tmp_path / "check.xml", "--out", tmp_path, code=code)
    assert f"verdict: {verdict}" in result.stdout and last(result) == tmp_path / "check.xml"
    suite = ElementTree.parse(tmp_path / "check.xml").getroot().find("testsuite")
    assert [case.get("name") for case in suite.iter("testcase")] == [c.strip() for c in conditions]
    assert int(suite.get("tests")) == len(conditions) and (int(suite.get("failures")) > 0) == (code == 3)
    assert len(list(suite.iter("failure"))) == int(suite.get("failures"))
    assert "two given models" in suite.find("properties/property").get("value")


def test_undecided_passes_unless_it_is_strict(tmp_path):
    words = ["check", "short", "short", "--fail-if", "accuracy < 10.5%", "--out", tmp_path]
    value = fldiag.check("short", fail_if=["accuracy < 0.5"]).table["value"].iloc[0]
    words[4] = f"accuracy < {100 * value:.3f}%"
    assert "verdict: undecided" in run(*words).stdout
    run(*words, "--strict", "--junit", tmp_path / "s.xml", code=3)
    assert 'failures="1"' in (tmp_path / "s.xml").read_text()


@pytest.mark.parametrize("words", [["--level", "nan"], ["--level", "0"], ["--level", "2"], ["--fail-if", "accuracy < 1e400"],
                                   ["--junit", "."]], ids=" ".join)
def test_what_is_no_check_is_one_error(words, tmp_path):
    for verb in ("check", "diff") if words[0] == "--level" else ("check",):
        said = run(verb, "short", "long", *words, "--out", tmp_path, code=1 if words[0] == "--junit" else 2).stderr
        assert "error: " in said and "→" in said and "unexpected" not in said and len(said) < 700


def test_a_model_that_cannot_be_made_is_no_noise(tmp_path):
    said = run("check", "short", "long", "--model", "os:system", "--out", tmp_path).stdout
    assert "verdict: undecided (nothing could be compared)" in said and "model factory 'os:system' failed (TypeError" in said


def test_for_machines(tmp_path):
    found = json.loads(run("check", "short", "long", "--json", "--out", tmp_path, code=3).stdout)
    assert found["verdict"] == "fail" and found["rows"][0]["metric"] == "accuracy" and found["rows"][0]["low"] < found["rows"][0]["high"] < 0
    frame = pd.read_csv(found["paths"][-1])
    assert frame["verdict"].tolist() == ["fail"] and frame["question"].tolist() == ["models"]
    diff = json.loads(run("diff", "short", "long", "--number", "loss", "--json", "--out", tmp_path).stdout)
    assert diff["rows"][0]["better"] == "B" and "two given models" in diff["question"]


@pytest.mark.parametrize(("words", "says"), [
    (["check", "short", "--fail-if", "accuracy < basline"], "position 12"), (["check"], "no run is given"),
    (["check", "short", "long", "--baseline", "long"], "a side is given twice"), (["diff", "short"], "one side is given"),
    (["check", "short", "long", "short"], "quote a pattern"), (["check", "short", "nowhere"], "is not there")])
def test_wrong_use_is_one_error(words, says):
    text = run(*words, code=2).stderr
    assert says in text and "Traceback" not in text and len(text.strip().splitlines()) == 2
