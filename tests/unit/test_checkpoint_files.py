"""Checkpoint files: what is written is read back, and everything else is refused with a sentence, never executed."""

import errno
import io
import json
import os
import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch
from helpers import config
from torch import nn

from fldiag.errors import FldiagError
from fldiag.results import files
from fldiag.runs import schema
from fldiag.runs.run import Run
from fldiag.training import rounds


class Trap:
    """Unpickling this creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return rounds.train(
        config("scaffold", rounds=2, checkpoint={"clients": "sampled"}),
        out=tmp_path_factory.mktemp("run"),
    )


@pytest.fixture
def good(run):
    return run.path / "rounds" / "0002.pt"


def test_a_checkpoint_says_what_it_is(run, good):
    read = schema.read(good)
    assert read.round == 2
    assert read.label == "scaffold round 2"
    assert read.client_ids == [0, 1, 2]
    assert read.clients.shape == (3, read.received.numel())
    assert read.manifest["config"] == run.index["config"]
    assert read.manifest["data"]["name"] == "iris"
    assert read.sha256 == run.index["files"]["rounds/0002.pt"]
    assert torch.equal(
        read.received, torch.cat([v.flatten() for v in run.checkpoint(1).state.values()])
    )


def test_a_checkpoint_is_tensors_and_json_for_torch_too(good):
    content = torch.load(good, weights_only=True)
    assert isinstance(json.loads(content["manifest"]), dict)
    assert all(isinstance(v, torch.Tensor) for v in content["model"].values())
    net = nn.Sequential(
        OrderedDict(
            fc1=nn.Linear(4, 7),
            relu=nn.ReLU(),
            fc2=nn.Linear(7, 5),
            relu2=nn.ReLU(),
            classifier=nn.Linear(5, 3),
        )
    ).double()
    net.load_state_dict(content["model"])


def test_a_plain_state_dict_is_a_checkpoint(tmp_path):
    net = nn.Linear(3, 2)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    read = schema.read(tmp_path / "net.pt")
    assert read.manifest == {}
    assert read.label == "net"
    assert read.round is None
    assert torch.equal(read.state["weight"], net.weight)
    torch.save({"state_dict": net.state_dict(), "epoch": 3}, tmp_path / "wrapped.pt")
    assert torch.equal(schema.read(tmp_path / "wrapped.pt").state["bias"], net.bias)


def test_a_safetensors_file_is_a_checkpoint(tmp_path):
    from safetensors.torch import save_file

    net = nn.Linear(3, 2)
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    assert torch.equal(schema.read(tmp_path / "net.safetensors").state["weight"], net.weight)
    whole = (tmp_path / "net.safetensors").read_bytes()
    (tmp_path / "bad.safetensors").write_bytes(whole[:-4])
    with pytest.raises(FldiagError, match="not a readable safetensors file"):
        schema.read(tmp_path / "bad.safetensors")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: {"manifest": "{}", "model": {"w": torch.ones(2)}, "extra": t},
        lambda t: {"w": torch.ones(2), "b": t},
    ],
    ids=["bare", "in a checkpoint", "in a state_dict"],
)
@pytest.mark.parametrize("how", ["torch", "legacy", "pickle"])
def test_pickled_objects_are_refused_and_not_executed(wrap, how, tmp_path):
    trap, file = tmp_path / "executed", tmp_path / "evil.pt"
    content = wrap(Trap(trap))
    if how == "pickle":
        file.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=how == "torch")
    assert not trap.exists()
    with pytest.raises(FldiagError, match="refused; nothing in it was executed") as caught:
        schema.read(file)
    assert not trap.exists()
    assert str(file) in str(caught.value)
    torch.load(file, weights_only=False) if how != "pickle" else pickle.loads(file.read_bytes())
    assert trap.exists()  # the trap works where somebody is careless


def test_a_whole_pickled_module_is_refused(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(FldiagError, match=r"content\.state_dict"):
        schema.read(tmp_path / "module.pt")


@pytest.mark.parametrize("part", [0.999, 0.9, 0.5, 0.1, 0.01])
def test_truncated(good, part, tmp_path):
    whole = good.read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(FldiagError, match="truncated") as caught:
        schema.read(tmp_path / "cut.pt")
    assert "copy it again" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello", "not a checkpoint"),
        (b"\x80\x02", "refused|truncated"),
        (b"PK\x03\x04", "truncated"),
    ],
)
def test_not_a_checkpoint(content, message, tmp_path):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(FldiagError, match=message):
        schema.read(tmp_path / "x.pt")


def test_missing(tmp_path):
    with pytest.raises(FldiagError, match="is not there") as caught:
        schema.read(tmp_path / "none.pt")
    assert caught.value.usage


@pytest.mark.parametrize(
    "content", [3, [torch.ones(1)], {}, {"w": 3}, {1: torch.ones(1)}, torch.ones(2, 2)]
)
def test_tensors_that_are_no_state_dict(content, tmp_path):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(FldiagError, match="is not a state_dict"):
        schema.read(tmp_path / "x.pt")


def rewrite(source, target, **changes):
    content = torch.load(source, weights_only=True)
    manifest = json.loads(content["manifest"])
    manifest.update(changes)
    content["manifest"] = json.dumps({k: v for k, v in manifest.items() if v is not None})
    torch.save(content, target)
    return target


@pytest.mark.parametrize(
    "change",
    [
        {"round": "two"},
        {"seed": None},
        {"config": []},
        {"method": None},
        {"shape": 4},
        {"classes": None},
        {"clients": [1]},
        {"schema": None},
        {"schema": "one"},
    ],
)
def test_a_hand_edited_manifest(change, good, tmp_path):
    with pytest.raises(FldiagError, match="the file was edited; use the original"):
        schema.read(rewrite(good, tmp_path / "edited.pt", **change))


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"text"'])
def test_a_manifest_that_is_no_json_object(text, good, tmp_path):
    content = torch.load(good, weights_only=True)
    torch.save({**content, "manifest": text}, tmp_path / "edited.pt")
    with pytest.raises(FldiagError, match="its manifest is not valid"):
        schema.read(tmp_path / "edited.pt")


def test_a_later_schema(good, tmp_path):
    with pytest.raises(
        FldiagError, match=f"has schema 99, this fldiag reads up to {schema.SCHEMA}; update fldiag"
    ):
        schema.read(rewrite(good, tmp_path / "later.pt", schema=99))


def test_renamed_and_mailed_alone_it_still_says_what_it_is(good, tmp_path):
    (tmp_path / "mail from Ann.PT").write_bytes(good.read_bytes())
    assert schema.read(tmp_path / "mail from Ann.PT").label == "scaffold round 2"


def test_zip_that_is_something_else(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as z:
        z.writestr("hello.txt", "hello")
    with pytest.raises(FldiagError, match="truncated or not a checkpoint that is read"):
        schema.read(tmp_path / "x.pt")


# -- writing


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "x.pt"
    schema.write(file, {"round": 1}, {"w": torch.ones(3)})
    before = file.read_bytes()
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(FldiagError, match="No space left on device") as caught:
        schema.write(file, {"round": 2}, {"w": torch.zeros(3)})
    assert "what was written before is intact" in str(caught.value)
    assert file.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["x.pt"]  # no half-written temporary either


def test_a_disk_that_fills_while_tensors_are_written(tmp_path, monkeypatch):
    file = tmp_path / "x.pt"
    schema.write(file, {"round": 1}, {"w": torch.ones(3)})
    before = file.read_bytes()
    opened = open

    class Full(io.FileIO):
        def write(self, data):
            full_disk()

    monkeypatch.setattr(
        "builtins.open",
        lambda p, mode="r", *a, **k: Full(p, mode) if "w" in mode else opened(p, mode, *a, **k),
    )
    with pytest.raises(FldiagError, match="cannot write"):
        schema.write(file, {"round": 2}, {"w": torch.zeros(300)})
    monkeypatch.undo()
    assert file.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["x.pt"]


def test_written_under_a_temporary_name_flushed_then_renamed(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda f: order.append("fsync") or fsync(f))
    monkeypatch.setattr(os, "replace", lambda a, b: order.append("replace") or replace(a, b))
    digest = schema.write(tmp_path / "x.pt", {}, {"w": torch.ones(1)})
    assert order == ["fsync", "replace", "fsync"]  # the file, its name, and the folder
    assert digest == files.sha256(tmp_path / "x.pt")


def test_training_onto_a_full_disk_keeps_the_rounds_before(tmp_path, monkeypatch):
    fsync = os.fsync

    def fill(event):
        if event["event"] == "round" and event["round"] == 1:
            monkeypatch.setattr(os, "fsync", full_disk)

    with pytest.raises(FldiagError, match="No space left on device"):
        rounds.train(config(rounds=3), out=tmp_path / "run", on_event=fill)
    monkeypatch.setattr(os, "fsync", fsync)
    kept = Run.open(tmp_path / "run")
    assert (kept.done, kept.rounds) == (1, [1])
    assert kept.checkpoint().round == 1
