"""fldiag export: the verb, its words and its refusals (the exporters themselves: tests/unit/test_export.py)."""

import json
import shutil
import sys
from pathlib import Path

import helpers
import pytest
from commands import invoke

import fldiag
from fldiag.results.table import table


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return fldiag.train(helpers.config(rounds=2), out=tmp_path_factory.mktemp("export") / "run")


@pytest.fixture
def run(kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(kept.path, tmp_path / "run")
    return tmp_path / "run"


def call(*arguments, code=0):
    result = invoke("export", *arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def points(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    reader.Reload()
    return {tag: [e.step for e in reader.Tensors(tag)] for tag in reader.Tags()["tensors"]}


def test_to_tensorboard_in_the_run_or_elsewhere(run):
    result = call(run, "--to", "tensorboard")
    assert Path(result.stdout.strip().splitlines()[-1]) == run / "export" / "tensorboard" / "run"
    found = points(run / "export" / "tensorboard" / "run")
    assert found["run/accuracy/aggregated/test"] == [1, 2] and not any(
        "client 0" in tag for tag in found
    )
    table([{"metric": "m", "round": 2, "client": 0, "value": 1.0}]).to_csv("mine.csv", index=False)
    said = json.loads(
        call(
            run,
            "--to",
            "tensorboard",
            "--out",
            "o",
            "--per-client",
            "--table",
            "mine.csv",
            "--json",
        ).stdout
    )
    assert said["paths"] == ["o/run"] and points("o/run")["mine/m/client 0"] == [2]
    assert said["rows"][0]["numbers"] == sum(
        len(v) for k, v in points("o/run").items() if k != "config/text_summary"
    )


@pytest.mark.parametrize(
    ("arguments", "expected", "code"),
    [
        (["run", "--to", "tensorbord"], "did you mean 'tensorboard'?", 2),
        (["nowhere", "--to", "mlflow"], "nowhere", 2),
        (["run/rounds/0001.pt", "--to", "mlflow"], "one checkpoint", 2),
        (["run", "--to", "mlflow", "--out", "file/x"], "--out", 1),
        (["run", "--to", "mlflow", "--table", "gone.csv"], "gone.csv", 1),
    ],
)
def test_wrong_use(run, arguments, expected, code):
    Path("file").write_text("")
    result = call(*arguments, code=code)
    assert expected in result.stderr and "Traceback" not in result.output


def test_a_missing_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install 'fldiag[wandb]'" in call(run, "--to", "wandb", code=2).stderr
