"""Files by their content: other formats are refused, and what is sound is read."""

import argparse
import json
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fldiag
from fldiag import FldiagError
from fldiag.runs import schema

OTHERS = {
    "HDF5": b"\x89HDF\r\n\x1a\n" + b"\0" * 200,
    "GGUF": b"GGUF\x03\0\0\0" + b"\0" * 200,
    "pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n",
    "html": b"<html lang=en>",
    "ONNX": b"\x08\x08\x12\x07pytorch" + b"\0" * 40,
    "msgpack": b"\x81\xa6params\xc0",
    "gzip": b"\x1f\x8b\x08" + b"\0" * 90,
    "one byte": b"\x08",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_formats_are_not_read(kind, tmp_path):
    (tmp_path / "a.pt").write_bytes(OTHERS[kind])
    with pytest.raises(FldiagError, match="not a checkpoint that is read"):
        fldiag.load(tmp_path / "a.pt")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_not_executed(tmp_path):
    torch.jit.trace(nn.Linear(4, 3), torch.zeros(1, 4)).save(tmp_path / "net.pt")
    with pytest.raises(FldiagError, match=r"not a checkpoint|nothing in it was executed"):
        fldiag.load(tmp_path / "net.pt")


@pytest.mark.parametrize("name", ["a.pt", "a.bin", "a"])
def test_content_and_not_the_name_decides(name, tmp_path):
    state = nn.Linear(4, 3).state_dict()
    save_file(state, tmp_path / name)
    assert torch.equal(fldiag.load(tmp_path / name).state["weight"], state["weight"])
    torch.save(state, tmp_path / "b.safetensors")
    assert torch.equal(fldiag.load(tmp_path / "b.safetensors").state["bias"], state["bias"])


# -- a model in several files


def save_in_parts(folder, state, ending):
    """As the hub names the parts of a large model."""
    folder.mkdir()
    weight_map = {name: f"part-{i % 2 + 1:05}-of-00002{ending}" for i, name in enumerate(state)}
    for part in set(weight_map.values()):
        tensors = {n: state[n] for n in state if weight_map[n] == part}
        save_file(tensors, folder / part) if ending == ".safetensors" else torch.save(
            tensors, folder / part
        )
    stem = "model.safetensors" if ending == ".safetensors" else "pytorch_model.bin"
    index = folder / f"{stem}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), "utf-8")
    return index


@pytest.mark.parametrize("ending", [".safetensors", ".bin"])
def test_the_parts_of_a_model_are_read_by_folder_and_by_index(ending, tmp_path):
    state = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).state_dict()
    index = save_in_parts(tmp_path / "m", state, ending)
    whole = [fldiag.load(path) for path in (tmp_path / "m", index)]
    for checkpoint in whole:
        assert checkpoint.state.keys() == state.keys()
        assert all(torch.equal(checkpoint.state[n], state[n]) for n in state)
    before = whole[0].sha256
    state["1.bias"] = state["1.bias"] + 1
    (tmp_path / "m").rename(tmp_path / "before")
    save_in_parts(tmp_path / "m", state, ending)
    assert fldiag.load(tmp_path / "m").sha256 != before, "the digest is of all parts"


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"w": "../other.safetensors"}}, "not a file of weights in this folder"),
        ({"weight_map": {"w": "model.safetensors.index.json"}}, "not a file of weights in this"),
        ({"weight_map": {"w": "missing.safetensors"}}, "is not there"),
        ({"weight_map": ["w"]}, "no index of a model's parts"),
        ([], "no index of a model's parts"),
    ],
)
def test_an_index_names_files_of_its_folder_only(index, words, tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index), "utf-8")
    with pytest.raises(FldiagError, match=words):
        fldiag.load(path)


# -- plain objects beside the weights


@pytest.mark.parametrize(
    "beside",
    [
        argparse.Namespace(lr=0.1, layers=[1, 2], device=torch.device("cpu")),
        np.float64(0.9),
        np.int64(3),
        np.arange(3.0),
        {"history": [np.float32(1), argparse.Namespace(a=np.arange(2))]},
    ],
    ids=["Namespace", "float64", "int64", "array", "nested"],
)
def test_numbers_of_numpy_and_arguments_beside_the_weights_are_passed_over(beside, tmp_path):
    net = nn.Linear(4, 3)
    torch.save({"model": net.state_dict(), "beside": beside}, tmp_path / "a.pt")
    assert torch.equal(schema.read(tmp_path / "a.pt").state["weight"], net.weight)


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    "wrap", [lambda t: argparse.Namespace(lr=t), lambda t: np.array([t], dtype=object)]
)
def test_what_they_hold_is_not_executed(wrap, tmp_path):
    trap = tmp_path / "executed"
    torch.save({"model": nn.Linear(2, 2).state_dict(), "args": wrap(Trap(trap))}, tmp_path / "a.pt")
    with pytest.raises(FldiagError, match="nothing in it was executed"):
        schema.read(tmp_path / "a.pt")
    assert not trap.exists()


def test_the_remedy_for_other_objects_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = nn.Linear(4, 3)
    torch.save({"model": net.state_dict(), "out": PurePosixPath("x")}, "a.pt")
    with pytest.raises(FldiagError, match=r"content = torch\.load") as caught:
        fldiag.load("a.pt")
    assert "torch.save(content['model'], 'weights.pt')" in caught.value.remedy
    content = torch.load("a.pt", weights_only=False)
    torch.save(content["model"], "weights.pt")
    assert torch.equal(fldiag.load("weights.pt").state["weight"], net.weight)


def test_a_part_that_holds_no_names_is_an_error(tmp_path):
    torch.save(torch.zeros(3), tmp_path / "part.bin")
    (tmp_path / "m.index.json").write_text(json.dumps({"weight_map": {"w": "part.bin"}}), "utf-8")
    with pytest.raises(FldiagError, match="hold no tensors by name"):
        fldiag.load(tmp_path / "m.index.json")
