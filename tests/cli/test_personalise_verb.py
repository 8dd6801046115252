"""``fldiag personalise`` and the end of a personalised training, as a user types them."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from commands import run

from fldiag.runs.run import Run

QUICK = (
    *("--set", "rounds=1", "--set", "model.name=mlp"),
    *("--set", "train.epochs=1", "--device", "cpu"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "r"
    run("train", "digits", *QUICK, "--out", folder)
    return folder


def test_training_a_personalised_method_ends_with_the_mean():
    method = ("--set", "method.name=fedbabu", "--set", "method.tune_epochs=[0,1]")
    answer = json.loads(run("train", "digits", *QUICK, *method, "--out", "r", "--json").stdout)
    frame = Run.open("r").metrics.query("metric == 'personal_accuracy' and scope == 'client'")
    expected = frame[frame["index"] == 1]["value"].mean()
    assert answer["rows"][0]["personal_accuracy"] == pytest.approx(expected)
    assert answer["paths"][-1].endswith("0001.safetensors")


def test_a_run_of_any_method_table_picture_and_provenance(trained):
    result = run("personalise", trained, "--epochs", "0,2")
    png = Path(result.stdout.strip().splitlines()[-1])
    assert png.parent == trained / "diagnostics" and png.read_bytes()[:4] == b"\x89PNG"
    assert "personal accuracy" in result.stdout
    frame = pd.read_csv(png.with_suffix(".csv"))
    assert sorted(frame["index"].unique()) == [0, 2] and (frame["scope"] == "client").sum() == 40
    about = json.loads(png.with_suffix(".json").read_text())
    assert about["checkpoints"] == Run.open(trained).files
    assert about["options"]["epochs"] == "0,2"
    assert (
        run("personalise", trained, "--epochs", "0,2").stdout == result.stdout
    )  # the cache's answer is the same


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--epochs", "1,x"), "0,1,5"),
        (("--epochs", "-1"), "0,1,5"),
        (("--epochs", "100000000000"), "up to 9999"),
    ],
)
def test_wrong_questions(trained, options, text):
    assert text in run("personalise", trained, *options, code=2).stderr


def test_a_run_that_is_not_finished_is_refused(trained, tmp_path):
    shutil.copytree(trained, "half")
    lines = Path("half/rounds.jsonl").read_text().splitlines(keepends=True)
    Path("half/rounds.jsonl").write_text("".join(lines[:-1]))  # without that of the end
    assert "--resume" in run("personalise", "half", code=1).stderr
