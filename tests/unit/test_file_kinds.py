"""Files by their first bytes: what others write is named with a way to convert it, and what is sound is read."""

import argparse
import json
import zipfile
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fldiag
from fldiag import FldiagError
from fldiag.runs import schema


def msgpack(key: bytes) -> bytes:
    return b"\x81" + bytes([0xA0 + len(key)]) + key + b"\xc0"


TAR = b"weights.pt".ljust(257, b"\0") + b"ustar\0" + b"\0" * 250
#: Name of the file, content, words of the message.
OTHERS = [
    ("model.h5", b"\x89HDF\r\n\x1a\n" + b"\0" * 200, "an HDF5 file.*read it with Keras"),
    ("model.weights", b"GGUF\x03\0\0\0" + b"\0" * 200, "a GGUF file.*save_pretrained"),
    ("model.pt", b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "git lfs pull"),
    ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ("model.pt", b"\n<!DOCTYPE html><html><body>404", "an html page.*download"),
    ("model.bin", b"<html lang=en>", "an html page.*download"),
    ("net.onnx", b"\x08\x08\x12\x07pytorch" + b"\0" * 40, "an ONNX graph.*state_dict"),
    ("net", b"\x08\x08\x12\x07pytorch" + b"\0" * 40, "an ONNX graph"),
    ("flax_model.msgpack", msgpack(b"params"), "a msgpack file.*from_flax=True"),
    ("flax_model", msgpack(b"params"), "a msgpack file"),
    ("w.pt.gz", b"\x1f\x8b\x08" + b"\0" * 90, "a gzip archive.*gunzip"),
    ("w.tar", TAR, "a tar archive.*unpack"),
]


@pytest.mark.parametrize(
    ("name", "content", "words"), OTHERS, ids=[f"{n} {w[:12]}" for n, _, w in OTHERS]
)
def test_what_others_write_is_named_with_a_way_to_convert_it(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FldiagError, match=words) as caught:
        fldiag.load(tmp_path / name)
    assert "damaged" not in str(caught.value)


def test_a_keras_archive_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "net.keras", "w") as archive:
        for name in ("metadata.json", "config.json", "model.weights.h5"):
            archive.writestr(name, "{}")
    with pytest.raises(FldiagError, match="a Keras archive"):
        fldiag.load(tmp_path / "net.keras")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_named_and_its_remedy_works(tmp_path):
    net, path = nn.Sequential(nn.Linear(4, 3)), tmp_path / "net.pt"
    torch.jit.trace(net, torch.zeros(1, 4)).save(path)
    with pytest.raises(FldiagError, match="TorchScript") as caught:
        fldiag.load(path)
    assert "torch.save(torch.jit.load(path).state_dict(), 'weights.pt')" in caught.value.remedy
    torch.save(torch.jit.load(path).state_dict(), tmp_path / "weights.pt")
    state = fldiag.load(tmp_path / "weights.pt").state
    assert torch.equal(state["0.weight"], net[0].weight)


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


@pytest.mark.parametrize("content", [b"\x08", b"\x08\x05\x12", b"\x81", b"\xde", b"\xdf\0\0\0\0"])
def test_the_first_bytes_of_a_kind_alone_are_a_damaged_file(content, tmp_path):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(FldiagError, match="damaged"):
        fldiag.load(tmp_path / "a.pt")


def test_a_part_that_holds_no_names_is_an_error(tmp_path):
    torch.save(torch.zeros(3), tmp_path / "part.bin")
    (tmp_path / "m.index.json").write_text(json.dumps({"weight_map": {"w": "part.bin"}}), "utf-8")
    with pytest.raises(FldiagError, match="hold no tensors by name"):
        fldiag.load(tmp_path / "m.index.json")
