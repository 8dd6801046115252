"""``fldiag landscape`` in all its forms, as a user types them."""

import json
from pathlib import Path

import pandas as pd
import pytest
from commands import run

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


@pytest.mark.parametrize(
    "arguments",
    [
        ("{run}", "clients"),
        ("{run}", "pca"),
        ("{run}/rounds/0002.safetensors", "clients"),
        (
            "{run}/rounds/0001.safetensors",
            "{run}/rounds/0002.safetensors",
            "{run}/rounds/0003.safetensors",
            "plane",
        ),
    ],
    ids=str,
)
@pytest.mark.slow
def test_directions_that_join_checkpoints_of_a_users_own_model(arguments, tmp_path, monkeypatch):
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
    *targets, directions = (text.format(run="r") for text in arguments)
    frame_of(
        run(
            "landscape",
            *targets,
            "--directions",
            directions,
            "--model",
            "landscape_net:net",
            "--points",
            "5",
            "--samples",
            "50",
            "--device",
            "cpu",
        )
    )
    refused = run(
        "landscape", *targets, "--directions", directions, "--device", "cpu", code=1
    ).stderr
    assert "does not import it because a file says so" in refused


def frame_of(result):
    png = Path(result.stdout.strip().splitlines()[-1])
    assert png.read_bytes()[:4] == b"\x89PNG"
    return pd.read_csv(png.with_suffix(".csv"))


@pytest.mark.slow
def test_a_landscape_in_float64(trained):
    assert (
        frame_of(run("landscape", trained, "--points", 3, "--precision", "fp64", *QUICK))
        .value.notna()
        .all()
    )
    assert (
        "'fp32' or 'fp64'"
        in run("landscape", trained, "--precision", "bf16", *QUICK, code=2).stderr
    )


@pytest.mark.slow
def test_lines_with_their_parabolas(trained):
    result = run("profile", trained, "--points", 5, *QUICK)
    frame = frame_of(result)
    assert (frame.metric == "loss").sum() == (
        frame.metric == "parabola"
    ).sum() == 10 and "curvature" in result.stdout
    assert set(
        frame_of(run("profile", trained, "--directions", "random", "--points", 3, *QUICK)).metric
    ) == {"loss", "accuracy", "parabola", "slope", "curvature"}


@pytest.mark.slow
def test_barriers_to_every_stored_client(trained):
    ids = Run.open(trained).checkpoint().client_ids
    result = run("landscape", trained, "--directions", "clients", "--json", *QUICK)
    rows = json.loads(result.stdout)["rows"]
    assert [r["client"] for r in rows] == ids and all(
        r["barrier"] >= 0 and r["distance"] > 0 for r in rows
    )
    frame = pd.read_csv(Path(json.loads(result.stdout)["paths"][-1]).with_suffix(".csv"))
    end = frame[(frame.metric == "loss") & (frame.x == 1)].set_index("client").value
    own = json.loads(
        run("spectrum", trained, "--client", ids[0], "--k", 1, "--json", *QUICK).stdout
    )["rows"]
    assert end[ids[0]] == pytest.approx(
        next(r["value"] for r in own if r["metric"] == "loss"), rel=1e-5
    )


@pytest.mark.slow
def test_the_axes_of_a_trajectory(trained):
    result = run("landscape", trained, "--directions", "pca", "--points", 5, *QUICK)
    frame = frame_of(result)
    way = frame[frame.metric == "trajectory"]
    assert (
        way["round"].tolist() == Run.open(trained).rounds
        and "trajectory's variance" in result.stdout
    )
    assert (frame.metric == "projection_error").sum() == 4 and way[["x", "y"]].iloc[
        -1
    ].tolist() == [0, 0]
    files = [trained / "rounds" / f"000{i}.pt" for i in (4, 1, 2)]
    some = frame_of(run("landscape", *files, "--directions", "pca", "--points", 3, *QUICK))
    assert some[some.metric == "trajectory"]["round"].tolist() == [1, 2, 4]


def test_a_long_run_is_thinned_evenly_with_both_ends(trained, monkeypatch):
    from fldiag.diagnostics.landscape import through

    monkeypatch.setattr(through, "LONGEST", 3)
    rounds = Run.open(trained).rounds
    found = [c.round for c in through.checkpoints_of([open_problem(Run.open(trained))])]
    assert len(found) == 3 and found[0] == rounds[0] and found[-1] == rounds[-1]


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--directions", "clients", "--span", 2], "start at the global model"),
        (["--directions", "sideways"], "sideways"),
        (["--points", 4], "odd number"),
    ],
)
def test_wrong_use_is_explained(trained, arguments, complaint):
    result = run("landscape", trained, *arguments, *QUICK, code=2)
    assert complaint in result.stderr and "→" in result.stderr and "Traceback" not in result.stderr


def test_checkpoints_without_clients_or_too_few_of_them_say_so(trained):
    example = Path(__file__).parents[2] / "checkpoints" / "example" / "fedavg-digits.pt"
    assert (
        "no trained weights of clients"
        in run("landscape", example, "--directions", "clients", *QUICK, code=2).stderr
    )
    assert (
        "at least three checkpoints"
        in run("landscape", example, "--directions", "pca", *QUICK, code=2).stderr
    )
