"""sweep, runs, prune and list as they are typed."""

import json

import pandas as pd
import pytest
from commands import last, run

import fldiag

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
def test_a_sweep_ends_in_a_table(here):
    for verb in (
        ("sweep", "digits", "--over", "method.name=fedavg,scaffold", "--over", "seed=0,1"),
    ):
        result = run(*verb, *SHORT)
    frame = pd.read_csv(last(result))
    assert frame["method.name"].tolist() == ["fedavg", "scaffold"] and frame["runs"].tolist() == [
        2,
        2,
    ]
    assert frame["accuracy_std"].notna().all()
    rows = json.loads(run("runs", "--json").stdout)["rows"]
    assert len(rows) == 4 and {row["status"] for row in rows} == {"finished"}


def test_prune_deletes_after_a_yes(here):
    run("train", "digits", *SHORT, "--set", "method.name=scaffold", "--out", "r")
    state = here / "r" / "state" / "0001.safetensors"
    listed = run("prune", "r", code=1)  # nobody is there
    assert "state/0001.safetensors" in listed.stdout and state.is_file()
    run("prune", "r", "--yes")
    assert not state.exists() and fldiag.load("r").checkpoint().state


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
