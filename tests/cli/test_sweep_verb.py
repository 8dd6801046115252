"""sweep, runs, prune, list and --overwrite as they are typed."""

import json
from pathlib import Path

import pandas as pd
import pytest
from commands import last, run

SHORT = (
    "--set",
    "rounds=1",
    "--set",
    "model.name=mlp",
    "--set",
    "model.hidden=[8]",
    "--set",
    "train.epochs=1",
    "--set",
    "clients.per_round=3",
    "--device",
    "cpu",
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_sweep_ends_in_a_table_and_a_report(here):
    for verb in (
        ("sweep", "digits", "--over", "method.name=fedavg,scaffold", "--over", "seed=0,1"),
    ):
        result = run(*verb, *SHORT)
        page = Path(last(result))
        assert page.suffix == ".html" and page.is_file() and "4 runs" in result.stdout
    (csv,) = (here / "checkpoints").glob("sweep-????????.csv")
    frame = pd.read_csv(csv)
    assert frame["method.name"].tolist() == ["fedavg", "scaffold"] and frame["runs"].tolist() == [
        2,
        2,
    ]
    assert frame["accuracy_std"].notna().all()
    rows = json.loads(run("runs", "--json").stdout)["rows"]
    assert len(rows) == 4 and {row["status"] for row in rows} == {"finished"}


def test_a_dry_run_lists_all_runs_and_writes_nothing(here):
    sweep = ("sweep", "digits", "--over", "method.name=fedavg,fedprox", "--over", "seed=0,1")
    rows = [
        json.loads(run(*sweep, *SHORT, "--dry-run", "--json", *more).stdout)["rows"]
        for more in ((), ("--shard", "1/4"), ("--shard", "5/5"))
    ]
    assert [len({row["run"] for row in of}) for of in rows] == [4, 1, 0]
    assert not list(here.iterdir())


def test_overwrite_begins_anew(here):
    run("train", "digits", *SHORT, "--out", "r")
    told = run("train", "digits", *SHORT, "--out", "r", code=2).stderr
    assert "--resume" in told and "--overwrite" in told
    (here / "r" / "mine.txt").write_text("mine")
    run("train", "digits", *SHORT, "--set", "seed=5", "--out", "r", "--overwrite")
    assert (
        json.loads((here / "r" / "run.json").read_text())["config"]["seed"] == 5
        and (here / "r" / "mine.txt").is_file()
    )


def test_prune_asks(here):
    run("train", "digits", *SHORT, "--set", "method.name=scaffold", "--out", "r")
    assert "nothing was removed" in run("prune", "r", "--dry-run").stdout
    assert len(list((here / "r" / "state").glob("*.safetensors"))) == 1
    assert "--yes" in run("prune", "r", code=2).stderr and list(
        (here / "r" / "state").glob("*.safetensors")
    )  # nobody is there
    run("prune", "r", "--yes")
    assert "nothing to remove" in run("prune", "r").stdout
    assert (
        not list((here / "r" / "state").glob("*.safetensors"))
        and "no run under" in run("runs", "r/state", code=2).stderr
    )


def test_list_without_a_kind_lists_all():
    text = run("list").stdout
    assert all(
        word in text
        for word in (
            "methods",
            "fedsol",
            "models",
            "small_cnn",
            "diagnostics",
            "matching",
            "presets",
            "figures",
        )
    )
