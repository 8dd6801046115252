"""Runs and checkpoints that fldiag 0.1.0 wrote stay readable, resumable and the same in every number.

``tests/fixtures/format1/make.py`` says what they are; its ``expected.json`` and ``expected/`` what was measured on them then.
Numbers are compared within what rounding explains, since another processor rounds otherwise.
"""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fldiag
from fldiag.runs.run import Run

FORMAT1 = Path(__file__).parents[1] / "fixtures" / "format1"
EXPECTED = json.loads((FORMAT1 / "expected.json").read_text())
RUNS = list(EXPECTED["runs"])
EPS32, EPS64 = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64))
#: The weights and inputs are float32 and given; what is computed of them is float64, so this is what a sum in another order
#: and an eigenvalue found from another side may differ by.
DOUBLE = 100 * EPS32
#: In float32 with the default tolerance of an eigenvalue, which is relative.
SINGLE = 2e-3
#: Float64 weights after some hundred local steps: every step may add a few roundings.
TRAINED = 1e6 * EPS64
#: What is made of eigenvectors, whose error is that of the residual over the gap to the next eigenvalue.
OF_VECTORS, VECTORS = ("eigenspace_overlap", "global_overlap"), 1e-3
#: The numbers of a row; all else, but whether the search for them ended in time, says which numbers they are.
VALUES = ("value", "scaled", "predicted", "n_examples", "n_steps", "n_clients", "masked")
NO_NAME = (*VALUES, "converged")


@pytest.fixture
def yesterday(tmp_path, monkeypatch):
    """A copy of all files, as if somebody had just come back to the folder."""
    shutil.copytree(FORMAT1, tmp_path / "format1")
    monkeypatch.chdir(tmp_path / "format1")
    monkeypatch.syspath_prepend(FORMAT1)  # the module of the user's own model
    return tmp_path / "format1"


def sums(frame):
    return {m: [len(part), float(part["value"].sum())] for m, part in frame.groupby("metric")}


def same_sums(frame, expected):
    found = sums(frame)
    assert found.keys() >= expected.keys()
    for metric, (rows, total) in expected.items():
        assert found[metric][0] == rows, metric
        assert found[metric][1] == pytest.approx(total, rel=rows * EPS64, abs=rows * EPS64), metric


@pytest.mark.parametrize("name", RUNS)
def test_a_run_opens(yesterday, name):
    run, expected = fldiag.load(name), EXPECTED["runs"][name]
    assert (run.status, run.done, run.rounds) == (
        expected["status"],
        expected["done"],
        expected["rounds"],
    )
    for r, clients in expected["clients"].items():
        checkpoint = run.checkpoint(int(r))
        assert checkpoint.round == int(r) and checkpoint.client_ids == clients
        assert checkpoint.clients is None or len(checkpoint.clients) == len(clients)
        assert all(torch.isfinite(t).all() for t in checkpoint.state.values())
    same_sums(run.metrics, expected["metrics"])
    for file in run.index["files"]:
        run.verified(file)


@pytest.mark.parametrize("name", [n for n in RUNS if n != "theirs"])
def test_its_config_is_read_and_says_what_it_said(yesterday, name):
    """The hash in run.json is of the config as it was then; a config that is read again must mean the same training."""
    run = fldiag.load(name)
    stored, read = run.index["config"], run.config.model_dump(mode="json")
    for section, content in stored.items():
        assert (
            (read[section].items() >= content.items())
            if isinstance(content, dict)
            else read[section] == content
        )


def test_the_local_steps_are_read(yesterday):
    run, expected = fldiag.load("fedsol"), EXPECTED["runs"]["fedsol"]["steps"]
    assert run.recorded == [int(r) for r in expected]
    for r, content in expected.items():
        steps = run.steps(int(r))
        same_sums(steps, content)
        assert {
            "client",
            "index",
            "metric",
            "layer",
            "proximal",
            "value",
            "scaled",
            "n_examples",
        } <= set(steps)
    assert len(run.steps()) == sum(
        rows for content in expected.values() for rows, _ in content.values()
    )


def test_foreign_rounds_say_where_they_are_from(yesterday):
    run = fldiag.load("theirs")
    assert (
        run.origin["recipe"]["model"] == "mlp_iris"
        and run.origin["recipe"]["clients"] == "round_{round}/client_{client}.pt"
    )
    with pytest.raises(fldiag.FldiagError, match="another program"):
        _ = run.config


def key(row):
    """Which number a row is: everything that it says but its values."""
    return tuple(
        sorted(
            (
                column,
                f"{v:g}" if isinstance(v, (int, float)) and not isinstance(v, bool) else str(v),
            )
            for column, v in row.items()
            if column not in NO_NAME
        )
    )


def rows_of(frame):
    found = [
        {k: v for k, v in row.items() if not pd.isna(v)}
        for row in frame.astype(object).to_dict("records")
    ]
    return [row for row in found if row["metric"] != "missing"]


def same_table(found, expected, rtol):
    """Every number of ``expected`` is in ``found``, which may have more rows and columns.

    Up to ``rtol`` of itself, or of the largest number of its metric and column: a small one is a difference of larger ones."""
    columns = set(expected)
    there = {}
    for row in rows_of(found):
        there.setdefault(key({k: v for k, v in row.items() if k in columns}), []).append(row)
    wanted = rows_of(expected)
    assert wanted
    for row in wanted:
        hits = there.get(key(row), [])
        assert len(hits) == 1, (row, hits)
        for column in set(row) & set(VALUES):
            value, now = row[column], hits[0].get(column)
            tolerance = VECTORS if row["metric"] in OF_VECTORS and column == "value" else rtol
            size = max(
                abs(other[column])
                for other in wanted
                if other["metric"] == row["metric"] and column in other
            )
            assert now is not None and math.isclose(
                now, value, rel_tol=tolerance, abs_tol=tolerance * size
            ), (row, column, now)
        assert ("value" in row) == ("value" in hits[0]), (row, hits)


def ask(target, diagnostic, model=None, data=None, dtype=None, **options):
    """A checkpoint is told its model and data when it is loaded, a run when it is asked."""
    if dtype is not None:
        options["precision"] = {"float64": "fp64"}[dtype]
    given = {k: v for k, v in (("model", model), ("data", data)) if v is not None}
    if Path(target).is_dir():
        return fldiag.diagnose(fldiag.load(target), diagnostic, **options, **given)
    return fldiag.diagnose(fldiag.load(target, **given), diagnostic, **options)


@pytest.mark.parametrize(
    "question",
    EXPECTED["asked"],
    ids=lambda q: f"{q['diagnostic']}-{q['target']}-{q['answer'][:2]}",
)
@pytest.mark.slow
def test_diagnostics_say_what_they_said(yesterday, question):
    found = ask(question["target"], question["diagnostic"], **question["options"])
    expected = pd.read_csv(yesterday / "expected" / question["answer"])
    if question["options"].get("k") == 1:  # one eigenvalue has no ratio
        expected = expected[expected["metric"] != "eigenvalue_ratio"]
    same_table(found, expected, DOUBLE if "dtype" in question["options"] else SINGLE)


def test_images_of_ones_own_are_standardised(yesterday):
    """A run on npz:PATH that does not say how its inputs are normalised: by the training images' own mean and deviation."""
    run = fldiag.load("pixels")
    assert "normalise" not in run.index["config"]["data"]
    with np.load("pixels.npz") as file:
        x, y = file["train_images"] / 255, torch.from_numpy(file["train_labels"])
    x = torch.from_numpy((x - x.mean((0, 1, 2))) / x.std((0, 1, 2))).permute(0, 3, 1, 2).flatten(1)
    w = {name: t.double() for name, t in run.checkpoint().state.items()}
    hidden = torch.relu(x @ w["fc1.weight"].T + w["fc1.bias"])
    loss = torch.nn.functional.cross_entropy(
        hidden @ w["classifier.weight"].T + w["classifier.bias"], y
    )
    found = fldiag.diagnose(run, "spectrum", k=1, precision="fp64")
    assert found.loc[found["metric"] == "loss", "value"].item() == pytest.approx(
        loss.item(), rel=DOUBLE
    )


def whole():
    with np.load("scaffold-whole.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def resumed():
    """The interrupted run, taken up with the config that it itself names."""
    return fldiag.train(Run.open("scaffold").config, out="scaffold", resume=True)


def is_whole(run):
    assert run.status == "finished" and run.rounds == [2, 4, 5]
    state, expected = run.checkpoint().state, whole()
    assert state.keys() == expected.keys()
    for name, weights in expected.items():
        torch.testing.assert_close(state[name], weights, rtol=TRAINED, atol=TRAINED, msg=name)
    same_table(
        run.metrics.drop(columns=["run", "method", "seed", "unit"]),
        pd.read_csv("scaffold-whole.csv"),
        1e-8,
    )


def test_the_interrupted_run_goes_on(yesterday):
    is_whole(resumed())


def test_a_run_from_before_stretches_were_listed_goes_on(yesterday):
    """The long runs began before run.json said which commit and which processor trained which rounds."""
    file = yesterday / "scaffold" / "run.json"
    index = json.loads(file.read_text())
    del index["segments"], index["digest"]
    for name in ("commit", "capability"):
        del index["provenance"][name]
    file.write_text(json.dumps(index))
    is_whole(resumed())


def test_finished_runs_are_left_as_they_are(yesterday):
    before = {f: f.read_bytes() for f in (yesterday / "fedsol").rglob("*") if f.is_file()}
    run = fldiag.train(Run.open("fedsol").config, out="fedsol", resume=True)
    assert run.status == "finished"
    assert before == {f: f.read_bytes() for f in (yesterday / "fedsol").rglob("*") if f.is_file()}


def test_a_user_own_model_is_still_not_run_because_a_file_says_so(yesterday):
    with pytest.raises(fldiag.FldiagError, match="user code"):
        fldiag.diagnose(fldiag.load("norm"), "spectrum", k=1)
