"""``fldiag landscape`` in all its forms, as a user types them."""

import json
from pathlib import Path

import pandas as pd
import pytest
from commands import run

from fldiag.diagnostics import landscape
from fldiag.runs.open_problem import open_problem
from fldiag.runs.run import Run

QUICK = ["--samples", 60, "--device", "cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "r"
    run(
        "train",
        "digits",
        "--set",
        "rounds=4",
        "--set",
        "model.name=mlp",
        "--set",
        "checkpoint.clients=sampled",
        "--set",
        "train.epochs=1",
        "--out",
        folder,
        "--device",
        "cpu",
    )
    return folder


@pytest.mark.slow
def test_directions_that_join_checkpoints_of_a_users_own_model(tmp_path, monkeypatch):
    (tmp_path / "landscape_net.py").write_text(
        "from torch import nn\n\n\ndef net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    run(
        "train",
        "digits",
        "--set",
        "rounds=3",
        "--set",
        "model.name=landscape_net:net",
        "--set",
        "checkpoint.clients=sampled",
        "--set",
        "train.epochs=1",
        "--out",
        "r",
        "--device",
        "cpu",
    )
    question = ("landscape", "r", "--directions", "pca", *QUICK)
    frame_of(run(*question, "--model", "landscape_net:net"))
    refused = run(*question, code=1).stderr
    assert "does not import it because a file says so" in refused


def frame_of(result):
    png = Path(result.stdout.strip().splitlines()[-1])
    assert png.read_bytes()[:4] == b"\x89PNG"
    return pd.read_csv(png.with_suffix(".csv"))


@pytest.mark.slow
def test_paths_along_directions_and_to_every_stored_client(trained):
    result = run("paths", trained, "--points", 5, *QUICK)
    frame = frame_of(result)
    assert (frame.metric == "parabola").sum() == 10 and "curvature" in result.stdout
    result = run("paths", trained, "--directions", "clients", "--points", 3, "--json", *QUICK)
    rows = json.loads(result.stdout)["rows"]
    ids = Run.open(trained).checkpoint().client_ids
    assert {r["end"] for r in rows} == {f"client {k}" for k in ids}
    assert all(r["barrier"] >= 0 and r["distance"] > 0 for r in rows)


@pytest.mark.slow
def test_the_axes_of_a_trajectory(trained):
    result = run("landscape", trained, "--directions", "pca", *QUICK)
    frame = frame_of(result)
    way = frame[frame.metric == "trajectory"]
    assert way["round"].tolist() == Run.open(trained).rounds
    assert (frame.metric == "projection_error").sum() == 4 and way[["x", "y"]].iloc[
        -1
    ].tolist() == [0, 0]
    files = [trained / "rounds" / f"000{i}.safetensors" for i in (4, 1, 2)]
    some = frame_of(run("landscape", *files, "--directions", "pca", *QUICK))
    assert some[some.metric == "trajectory"]["round"].tolist() == [1, 2, 4]


def test_a_long_run_is_thinned_evenly_with_both_ends(trained, monkeypatch):
    monkeypatch.setattr(landscape, "LONGEST", 3)
    rounds = Run.open(trained).rounds
    problems = landscape.trajectory([open_problem(Run.open(trained))])
    found = [p.labels["round"] for p in problems]
    assert len(found) == 3 and found[0] == rounds[0] and found[-1] == rounds[-1]


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--directions", "sideways"], "sideways"),
        (["--span", 0], "greater than 0"),
    ],
)
def test_wrong_use_is_explained(trained, arguments, complaint):
    result = run("landscape", trained, *arguments, *QUICK, code=2)
    assert complaint in result.stderr and "Traceback" not in result.stderr


def test_checkpoints_without_clients_or_too_few_of_them_say_so(trained):
    example = Path(__file__).parents[2] / "checkpoints" / "example" / "fedavg-digits.pt"
    refusal = run("paths", example, "--directions", "clients", *QUICK, code=2).stderr
    assert "no checkpoint that holds trained weights of clients" in refusal
    assert (
        "at least three checkpoints"
        in run("landscape", example, "--directions", "pca", *QUICK, code=2).stderr
    )
