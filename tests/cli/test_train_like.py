"""One's own loop and fldiag's methods in one federation, as the page on own loops shows it."""

import json
import re
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from commands import last
from commands import run as typed

import fldiag
from fldiag.data import partition

LOOP = Path(__file__).parents[2] / "docs" / "own_loop.py"


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """The run that the loop of the docs records, and its folder as the current one."""
    shutil.copy(LOOP, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_loop", None)
    import own_loop

    own_loop.main()
    yield Path("runs/own")
    sys.modules.pop("own_loop", None)


@pytest.mark.slow
def test_a_recorded_loop_and_two_methods_share_a_federation(recording):
    like = ["--like", recording, "--set", "model.name=own_loop:net", "--set", "train.lr=0.1"]
    folders = []
    for name in ("fedprox", "scaffold"):
        folders.append(f"runs/{name}")
        result = typed("train", *like, "--set", f"method.name={name}", "--out", folders[-1])
        assert "train.epochs = 5" in result.stderr and "received first" in result.stderr
    runs = [fldiag.load(folder) for folder in (recording, *folders)]
    starts = [run.checkpoint(1).received for run in runs]
    assert all(torch.equal(start, starts[0]) for start in starts)
    parts = [partition.load_parts(run.path / "partition.npz") for run in runs]
    assert all(partition.same(one, parts[0]) for one in parts)

    consent = ["--model", "own_loop:net"]
    table = pd.read_csv(last(typed("doctor", recording, *folders, *consent)).with_suffix(".csv"))
    assert not table["severity"].isin(["fault", "hint"]).any()
    page = last(typed("report", recording, *folders)).read_text("utf-8")
    assert not re.search("different models|different data|divide the data differently", page)
    diff = typed("diff", folders[0], recording, *consent, "--number", "accuracy", "--json")
    assert json.loads(diff.stdout)


def test_its_partition_is_drawn(recording):
    fldiag.Recorder("bare", "mlp", data="digits").close()
    assert "record it with clients=" in typed("partition", "bare", code=2).stderr
    result = typed("partition", recording, "--format", "png", "--out", "out")
    assert last(result).name == "partition.png" and "10" in result.stdout
    counts = pd.read_csv("out/partition.csv")
    assert counts["count"].sum() == 1500 and counts["client"].nunique() == 10


def test_the_run_itself_is_not_overwritten(recording):
    words = ["--like", recording, "--set", "model.name=own_loop:net", "--out", recording]
    assert "would delete" in typed("train", *words, "--overwrite", code=2).stderr
    assert (recording / "data.npz").is_file()


@pytest.mark.slow
def test_sweeps_take_a_run_as_their_model(recording):
    result = typed(
        "train",
        "--like",
        recording,
        "--set",
        "model.name=own_loop:net",
        "--sweep",
        "method.name=fedavg,fedsol",
        "--sweep",
        "seed=0,1",
        "--out",
        "runs",
    )
    assert last(result).suffix == ".html"
    runs = [fldiag.load(path.parent) for path in Path("runs").glob("own-*/run.json")]
    assert len(runs) == 4
    assert len({run.index["files"]["partition.npz"] for run in runs}) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "what to train is not clear"),
        (("digits", "--like", "here"), "a config and --like were given"),
        (("--like", "here"), "here is not there"),
    ],
)
def test_one_of_config_and_run_is_given(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in typed("train", *words, code=2).stderr
