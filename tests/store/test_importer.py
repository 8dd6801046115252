"""Other programs' folders of weights as runs."""

import json
import time

import numpy as np
import pytest
import torch
from reference import clients_of, typed, value
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag
from fldiag.integrations.importer import compiled

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
PARTS = {1: range(4), 2: range(4, 12)}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


def flat(module):
    return nn.utils.parameters_to_vector(module.parameters())


def folder(tmp_path, rounds=(0, 1), globals_=(), form="pt"):
    """Weights of clients 1 and 2 in round r by the seed 10 r + k, and of the global model by 100 + r."""
    path = tmp_path / "files"
    path.mkdir()
    for r in rounds:
        for k in PARTS:
            write(path / f"r{r}" / f"model_c{k}", net(10 * r + k), form)
    for r in globals_:
        write(path / f"g{r}", net(100 + r), form)
    return path


def write(path, module, form):
    path.parent.mkdir(exist_ok=True)
    if form == "pt":
        torch.save({"epoch": 3, "state_dict": nn.DataParallel(module).state_dict()}, f"{path}.pt")
    elif form == "npz":
        np.savez(path, *module.state_dict().values())
    else:
        save_file(module.state_dict(), f"{path}.{form}")


PATTERN = "r{round}/model_c{client}.pt"


def converted(files, pattern=PATTERN, **options):
    return fldiag.convert(files, files.parent / "run", pattern=pattern, model=net(), **options)


@pytest.mark.parametrize("form", ["pt", "safetensors", "npz"])
def test_clients_and_global_models(form, tmp_path):
    files = folder(tmp_path, globals_=(0, 1), form=form)
    patterns = f"r{{round}}/*_c{{client}}.{form}", f"g{{round}}.{form}"
    where = dict(zip(("pattern", "global_pattern"), patterns, strict=True))
    run = converted(files, **where, data=(X, Y), partition=PARTS)
    assert (run.rounds, run.status) == ([1, 2], "finished")
    for t in (1, 2):
        c = run.checkpoint(t)
        assert {k: w.tolist() for k, w in clients_of(c).items()} == {
            k: flat(net(10 * (t - 1) + k)).tolist() for k in PARTS
        }
        assert torch.equal(c.state["weight"], net(100 + t - 1).weight)
        with torch.no_grad():
            expected = float(cross_entropy(net(100 + t - 1)(X), Y))
        assert value(run.metrics, "loss", round=t) == pytest.approx(expected, rel=1e-5)
    assert run.checkpoint(1).received is None
    assert torch.equal(run.checkpoint(2).received, flat(net(100)))


def test_without_global_models_they_are_means_by_the_examples(tmp_path):
    run = converted(folder(tmp_path), partition=PARTS)
    expected = (4 * net(1).weight.double() + 8 * net(2).weight.double()) / 12
    assert torch.allclose(run.checkpoint(1).state["weight"].double(), expected, rtol=1e-6)
    assert "mean" in str(run.origin["notes"])


def test_what_clients_received_is_the_global_model_of_the_round_before_or_not_known(tmp_path):
    files = folder(tmp_path, rounds=(1, 2, 5, 9), globals_=(0, 1, 2, 5, 8, 9))
    run = converted(files, global_pattern="g{round}.pt")
    assert run.rounds == [0, 1, 2, 3, 4]
    for t, seed in ((1, 100), (2, 101), (4, 108)):
        assert torch.equal(run.checkpoint(t).received, flat(net(seed)))
    assert run.checkpoint(3).received is None


def test_global_models_alone(tmp_path):
    files = folder(tmp_path, rounds=(), globals_=(0, 1, 2))
    run = converted(files, None, global_pattern="g{round}.pt")
    assert run.rounds == [0, 1, 2]
    assert torch.equal(run.checkpoint(0).state["bias"], net(100).bias)


def test_a_partition_that_lacks_a_client_is_named_and_the_weights_are_kept(tmp_path):
    with pytest.raises(fldiag.FldiagError, match="lacks client 2"):
        converted(folder(tmp_path), data=(X, Y), partition=[range(4), range(4, 12)])
    run = fldiag.load(tmp_path / "run")
    assert run.done == 2 and "partition.npz" not in run.files


@pytest.mark.parametrize(
    ("name", "content", "pattern", "word"),
    [
        ("model_c1.pt", b"half", PATTERN, "model_c1.pt"),
        ("model_c1.pt", nn.Linear(4, 2).state_dict(), PATTERN, "weight"),
        ("other_c1.pt", net().state_dict(), "r{round}/*_c{client}.pt", "same round and client"),
        ("other.txt", {}, "r{round}/c{client}.pt", "no file"),
        ("other.txt", {}, "r{round}/{round}_{client}.pt", "twice"),
    ],
    ids=["damaged", "another model", "two files", "no file", "wrong pattern"],
)
def test_what_cannot_be_read_is_one_error(name, content, pattern, word, tmp_path):
    files = folder(tmp_path)
    torch.save(content, files / "r1" / name)
    if content == b"half":
        (files / "r1" / name).write_bytes(content)
    with pytest.raises(fldiag.FldiagError, match=word):
        converted(files, pattern)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("c{client}_r{round}.pt", "c7_r12.pt", ("12", "7")),
        ("*/c{client}.*", "a b/c7.pt", (None, "7")),
        ("*_{client}.pt", "a_1_23.pt", (None, "23")),
        ("*{client}.pt", "c12.pt", (None, "12")),
        ("*/c{client}.pt", "a/b/c7.pt", ()),
        ("c{client}.pt", "c7.pt.bak", ()),
        ("c{client}.pt", "cx.pt", ()),
        ("c(1)+{client}[a].pt", "c(1)+4[a].pt", (None, "4")),
    ],
)
def test_patterns(pattern, name, expected):
    match = compiled(pattern).fullmatch(name)
    groups = match.groupdict() if match else {}
    assert (() if match is None else (groups.get("round"), groups["client"])) == expected


@pytest.mark.parametrize("name", ["a_" * 110 + "1.pt", "1" * 220, "a" * 220])
def test_a_pattern_of_many_stars_ends(name):
    start = time.process_time()
    for pattern in ("*_" * 9 + "{client}x.pt", "*" * 20 + "{client}", "*1" * 12 + "{client}x"):
        compiled(pattern).fullmatch(name)
    assert time.process_time() - start < 5


def test_the_verb(tmp_path, monkeypatch):
    files = folder(tmp_path, globals_=(0, 1))
    (tmp_path / "own.py").write_text(
        "import torch\n\ndef net():\n    return torch.nn.Linear(4, 3)\n"
    )
    parts = {str(k): list(p) for k, p in PARTS.items()}
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    arrays = {"images": X.numpy(), "labels": Y.numpy()}
    splits = {f"{split}_{n}": a for split in ("train", "test") for n, a in arrays.items()}
    np.savez(tmp_path / "data.npz", **splits)
    monkeypatch.chdir(tmp_path)
    words = ["--pattern", PATTERN, "--global-pattern", "g{round}.pt"]
    words += ["--model", "own:net", "--data", "npz:data.npz", "--partition", "parts.json"]
    answer = typed("convert", files, "run", *words)
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[-1] == "run"
    assert fldiag.load("run").done == 2
    again = typed("convert", files, "run", *words)
    assert again.code == 2 and "already holds a run" in again.err
