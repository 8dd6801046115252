"""The first hour of somebody who has just installed fldiag: the commands they type, in order, none of which may stumble."""

import json

import numpy as np
import pytest
import torch
from commands import last, run
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from fldiag.execution import threads

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hour")


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("FLDIAG_DATA", raising=False)
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """``fldiag train digits``, as it stands but for the folder."""
    return last(run("train", "digits", "--out", folder / "run", "--device", "cpu")).parent.parent


def test_what_is_there():
    assert "fedsol" in run("list").stdout and "source" in run("explain", "fedsol").stdout


def test_the_demo(here):
    with threads(2):
        result = run("demo", "--out", "shown")
    assert last(result).suffix == ".png" and (here / last(result)).is_file()
    assert "fedsol" in result.stdout and "λ₁/λ₅" in result.stdout
    taken = [
        json.loads(file.read_text())["provenance"]["threads"]
        for file in (here / "shown").glob("*/run.json")
    ]
    assert taken == [1, 1], "two would wait for each other wherever another program uses a core"


@pytest.mark.parametrize("verb", ["forgetting", "drift", "matching", "landscape", "spectrum"])
def test_every_diagnostic_of_the_default_run(here, trained, verb):
    few = {
        "landscape": ("--samples", "200"),
        "matching": ("--samples", "200"),
    }.get(verb, ())
    assert (here / last(run(verb, trained, *few, "--device", "cpu"))).stat().st_size > 1000


def test_two_methods_and_a_report(here, trained):
    settings = ("--set", "method.name=scaffold", "--set", "rounds=5")
    other = last(run("train", "digits", *settings, "--device", "cpu"))
    page = (here / last(run("report", trained, other.parent.parent))).read_text("utf-8").lower()
    assert "fedavg" in page and "scaffold" in page


@pytest.fixture(scope="module")
def own(folder):
    digits = load_digits()
    x, y = (digits.images * 15.9).astype(np.uint8), digits.target
    np.savez(
        folder / "own.npz",
        train_images=x[:1500],
        train_labels=y[:1500],
        test_images=x[1500:],
        test_labels=y[1500:],
    )
    return "npz:own.npz"


def test_own_data(own):
    result = run(
        "train", "digits", "--set", f"data.name={own}", "--set", "rounds=5", "--device", "cpu"
    )
    assert "finished" in result.stdout


def test_own_model_has_its_own_loss(here, own):
    """A net trained elsewhere on x / 255: the loss that fldiag reports is the loss it was trained to."""
    (here / "hour_net.py").write_text(
        "from torch import nn\n\n\ndef net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))\n"
    )
    with np.load(here / "own.npz") as file:
        x, y = (
            torch.from_numpy(file["train_images"]).float()[:, None] / 255,
            torch.from_numpy(file["train_labels"]),
        )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for _ in range(50):
        optimizer.zero_grad()
        loss = cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    torch.save(net.state_dict(), here / "net.pt")
    how = ("--model", "hour_net:net", "--data", own, "--device", "cpu", "-k", "1")
    answer = run("spectrum", "net.pt", *how, "--json").stdout
    found = {row["metric"]: row["value"] for row in json.loads(answer)["rows"]}
    assert found["loss"] == pytest.approx(float(cross_entropy(net(x), y)), rel=1e-5)


def test_answers_about_other_data_do_not_replace_each_other(here, own):
    """One file of weights, two data sets of one size: two answers, each of which says what it saw."""
    (here / "two_nets.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    torch.save(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).state_dict(), here / "two.pt")
    with np.load(here / "own.npz") as file:
        np.savez(
            here / "floats.npz",
            **{k: v.astype(np.float32) if "images" in k else v for k, v in file.items()},
        )
    about = {}
    for data in (own, "npz:floats.npz"):
        how = ("--model", "two_nets:net", "--data", data, "--device", "cpu", "-k", "1")
        made = last(run("spectrum", "two.pt", *how))
        about[made] = json.loads((here / made).with_suffix(".json").read_text())
    options = [a["options"] for a in about.values()]
    assert [o["data"] for o in options] == [own, "npz:floats.npz"]
    assert {o["model"] for o in options} == {"two_nets:net"}
    inputs = [a["checkpoints"]["two"]["inputs"] for a in about.values()]
    assert ["pixels / 255" in text for text in inputs] == [True, False]
