"""Run folders: run.json is the one authority, and what does not fit it is refused with a sentence."""

import errno
import json
import shutil

import numpy as np
import pytest
from helpers import config

from fldiag.errors import FldiagError
from fldiag.results import files
from fldiag.runs.run import Run
from fldiag.training import rounds


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return rounds.train(
        config("scaffold", rounds=2, checkpoint={"clients": "sampled"}),
        out=tmp_path_factory.mktemp("run"),
    )


@pytest.fixture
def copy(run, tmp_path):
    """A copy of a run that a test may spoil."""
    return Run.open(shutil.copytree(run.path, tmp_path / "copy"))


def test_a_file_with_a_changed_byte_in_it_is_refused_by_the_run(copy):
    file = copy.path / "rounds" / "0002.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(FldiagError, match=r"sha256 differs from run\.json"):
        copy.checkpoint()


def test_a_path_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file" / "run", tmp_path / ("x" * 5000)):
        with pytest.raises(FldiagError, match="cannot create") as caught:
            rounds.train(config(rounds=1), out=out)
        assert "--out" in caught.value.remedy


def test_a_folder_without_permission(tmp_path, monkeypatch):
    def refuse(self, *a, **k):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(
        "pathlib.Path.mkdir", refuse
    )  # root, which runs tests in containers, may write anywhere
    with pytest.raises(FldiagError, match=r"cannot create .*Permission denied"):
        rounds.train(config(rounds=1), out=tmp_path / "run")


def test_a_read_only_run_folder(tmp_path, monkeypatch):
    opened = open

    def refuse(path, mode="r", *a, **k):
        if "w" in mode:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, mode, *a, **k)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(FldiagError, match=r"cannot write .*Permission denied"):
        rounds.train(config(rounds=1), out=tmp_path / "run")


def test_a_folder_that_holds_a_run(run):
    before = (run.path / "run.json").read_bytes()
    with pytest.raises(FldiagError, match="already holds a run") as caught:
        rounds.train(config("scaffold", rounds=2), out=run.path)
    assert caught.value.usage
    assert "--resume" in caught.value.remedy
    assert (run.path / "run.json").read_bytes() == before


def test_resuming_with_another_config_names_the_difference(run):
    with pytest.raises(FldiagError, match="was trained with another config") as caught:
        rounds.train(
            config("scaffold", rounds=2, checkpoint={"clients": "sampled"}, lr=0.25),
            out=run.path,
            resume=True,
        )
    assert "train.lr: 0.1 there, 0.25 now" in str(caught.value)
    with pytest.raises(FldiagError, match=r"method\.name: 'scaffold' there, 'fedavg' now"):
        rounds.train(config(rounds=2, checkpoint={"clients": "sampled"}), out=run.path, resume=True)
    with pytest.raises(FldiagError, match="rounds: 2 there, 1 now"):
        rounds.train(
            config("scaffold", rounds=1, checkpoint={"clients": "sampled"}),
            out=run.path,
            resume=True,
        )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"files": 3, "done": 1, "schema": 1}',
        '{"files": {}, "done": -1, "schema": 1}',
        '{"files": {}, "done": "x", "schema": 1}',
        '{"files": {}, "done": 1}',
    ],
)
def test_a_spoilt_index(text, copy):
    (copy.path / "run.json").write_text(text)
    with pytest.raises(FldiagError, match="is not valid"):
        Run.open(copy.path)


def test_an_index_that_is_not_text(copy):
    (copy.path / "run.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FldiagError, match="is not valid"):
        Run.open(copy.path)


def test_an_index_of_a_later_schema(copy):
    (copy.path / "run.json").write_text(json.dumps({**copy.index, "schema": 99}))
    with pytest.raises(FldiagError, match="has schema 99"):
        Run.open(copy.path)


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_not_a_run_folder(path, tmp_path):
    with pytest.raises(FldiagError, match=r"is not a run folder|is not there") as caught:
        Run.open(tmp_path / path)
    assert caught.value.usage


def test_a_missing_checkpoint_of_a_run(copy):
    (copy.path / "rounds" / "0002.pt").unlink()
    with pytest.raises(FldiagError, match=r"listed in run\.json but is not there"):
        copy.checkpoint()
    with pytest.raises(FldiagError, match=r"no checkpoint of round 7; it has rounds 1\.\.2"):
        copy.checkpoint(7)


def test_a_checkpoint_put_in_the_place_of_another(copy):
    rounds_folder = copy.path / "rounds"
    (rounds_folder / "0001.pt").replace(rounds_folder / "0002.pt")
    with pytest.raises(FldiagError, match="not the file this run wrote"):
        copy.checkpoint(2)


def test_every_file_is_listed_with_its_digest(run):
    assert set(run.index["files"]) >= {"partition.npz", "rounds/0001.pt", "rounds/0002.pt"}
    for name, digest in run.index["files"].items():
        assert files.sha256(run.path / name) == digest
    with np.load(run.path / "partition.npz", allow_pickle=False) as z:
        assert sum(z[k].size for k in z.files) >= 120


def test_a_damaged_table_of_metrics(copy):
    file = copy.path / copy.index["metrics"]
    good = file.read_bytes()
    for place in sorted(
        {*range(0, len(good), 37), *range(16), *range(len(good) - 16, len(good))}
    ):  # header, values, footer
        for mask in (0x01, 0x80):
            file.write_bytes(good[:place] + bytes([good[place] ^ mask]) + good[place + 1 :])
            with pytest.raises(FldiagError, match=r"parquet is not the file this run wrote"):
                _ = copy.metrics
    file.write_bytes(good[:-1])
    with pytest.raises(FldiagError, match=r"parquet is not the file this run wrote"):
        _ = copy.metrics
    file.write_bytes(good)
    assert len(copy.metrics)
    file.unlink()
    with pytest.raises(FldiagError, match=r"parquet is listed in run\.json but is not there"):
        _ = copy.metrics


def test_a_forged_table_of_metrics_is_refused(copy):
    file = copy.path / copy.index["metrics"]
    forged = copy.metrics
    forged.loc[forged["metric"] == "accuracy", "value"] = 0.999
    forged.to_parquet(file, index=False)
    with pytest.raises(FldiagError, match="not the file this run wrote"):
        _ = copy.metrics


def test_metrics_of_the_same_round_do_not_replace_those_that_run_json_lists(copy):
    """A kill between the new table and run.json leaves a run that can be read."""
    first = copy.metrics
    for name, factor in (("metrics/0002-1.parquet", 2), ("metrics/0002-2.parquet", 3)):
        copy.put_metrics(first.assign(value=first["value"] * factor))
        assert copy.index["metrics"] == name and Run.open(copy.path).metrics.equals(first)
    copy.commit()
    copy.clean()
    assert Run.open(copy.path).metrics["value"].equals(first["value"] * 3)
    assert [f.name for f in (copy.path / "metrics").iterdir()] == ["0002-2.parquet"]


def test_a_run_without_metrics(copy):
    del copy.index["metrics"]
    with pytest.raises(FldiagError, match="no table of metrics"):
        _ = copy.metrics


@pytest.mark.parametrize("key", ["hash", "status", "config", "state", "provenance"])
def test_an_index_that_lost_a_part(key, copy):
    (copy.path / "run.json").write_text(
        json.dumps({k: v for k, v in copy.index.items() if k != key})
    )
    with pytest.raises(FldiagError, match=f"{key} is missing or of the wrong kind"):
        Run.open(copy.path)


def test_an_index_whose_config_was_edited(copy):
    index = {**copy.index, "config": {**copy.index["config"], "rounds": -3}}
    (copy.path / "run.json").write_text(json.dumps(index))
    with pytest.raises(FldiagError, match=r"run\.json: its config is not valid.*rounds = -3"):
        _ = Run.open(copy.path).config


def test_cleaning_removes_what_a_run_writes_and_nothing_else(tmp_path):
    left, mine = (
        [
            "metrics/0001.parquet",
            "state/server-0001.pt",
            "state/.clients-00000002.safetensors.77.tmp",
            "steps/0003.parquet",
        ],
        [
            "metrics/notes.csv",
            "state/thesis.pt",
            "steps/0003.parquet.d/x",
            "metrics/summary.parquet",
        ],
    )
    for name in left + mine:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    Run(tmp_path, {"files": {}}).clean()
    assert not any((tmp_path / name).exists() for name in left) and all(
        (tmp_path / name).exists() for name in mine
    )
