"""``fldiag toy iris`` as a user types it."""

import json
from pathlib import Path

import pandas as pd
import pytest
from commands import invoke, last

from fldiag.plotting import style
from fldiag_papers.toys import iris, iris_reported

SMALL = ("--rounds", 1, "--seeds", 2, "--full-batch")


def run(*arguments, code=0):
    result = invoke("toy", "iris", *arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_help_has_an_example():
    text = run("--help").stdout
    assert "Example: fldiag toy iris" in text and "--variants" in text


@pytest.mark.slow
def test_pictures_tables_and_the_papers_numbers():
    result = run(*SMALL)
    png = last(result)
    assert png.parent == Path("fldiag-out") and png.name.startswith(
        "toy-iris-one-standardised-lr0.01-full-batch-"
    )
    stem = png.with_suffix("").as_posix()
    for suffix in (
        ".png",
        ".pdf",
        "-measures.png",
        "-measures.pdf",
        ".csv",
        "-summary.csv",
        ".json",
    ):
        assert Path(stem + suffix).is_file()
    assert not list(png.parent.glob(".*"))  # what was kept against interruptions is gone
    frame, found = pd.read_csv(stem + ".csv"), pd.read_csv(stem + "-summary.csv")
    fresh = iris.run([iris.Protocol(rounds=1, batch_size=None)], seeds=range(2))
    assert frame["value"].tolist() == pytest.approx(
        fresh["value"].astype(float).tolist(), rel=1e-11
    )
    assert found["accuracy"].tolist() == pytest.approx(
        iris_reported.summary(fresh)["accuracy"].tolist()
    )
    about = json.loads(Path(stem + ".json").read_text())
    assert about["statements"] == iris_reported.statements(fresh) and about["seeds"] == [0, 1]
    assert "64.00" in result.stdout and "93.33" in result.stdout and "here are 1." in result.stdout
    for sentence in about["statements"]:
        assert sentence in result.stdout
    assert "0.001" in result.stderr and "--variants" in result.stderr


@pytest.fixture
def _no_pictures(monkeypatch):
    """Drawing is what takes the time; one test sees the real files."""
    monkeypatch.setattr(
        style,
        "save",
        lambda fig, path, formats: [
            path.with_name(f"{path.name}.{f}")
            for f in formats
            if path.with_name(f"{path.name}.{f}").write_bytes(b"") == 0
        ],
    )


@pytest.mark.usefixtures("_no_pictures")
def test_numbers_for_machines():
    answer = json.loads(
        run(
            *SMALL,
            "--json",
            "--methods",
            "fedavg, fedsol",
            "--seed",
            5,
            "--lr",
            0.001,
            "--out",
            "here",
        ).stdout
    )
    assert [row["method"] for row in answer["rows"]] == ["fedavg", "fedsol"]
    assert (
        answer["rows"][0]["reported"] == 0.64
        and answer["rows"][1]["reported"] is None
        and 0 < answer["rows"][0]["accuracy"] < 1
    )
    assert (
        answer["statements"]
        and all(Path(p).is_file() for p in answer["paths"])
        and answer["paths"][-1].startswith("here/")
    )
    frame = pd.read_csv(
        next(p for p in answer["paths"] if p.endswith(".csv") and "summary" not in p)
    )
    assert set(frame["seed"]) == {5, 6}


@pytest.mark.usefixtures("_no_pictures")
def test_variants(monkeypatch):
    some = iris.variants(rounds=1)[-2:]
    asked = []
    monkeypatch.setattr(iris, "variants", lambda **common: asked.append(common) or some)
    result = run("--variants", "--rounds", 1, "--seeds", 2, "--methods", "fedavg")
    assert asked == [{"rounds": 1, "train_test": False}]
    assert all(p.name in result.stdout for p in some) and "as means" in result.stdout
    png = last(result)
    assert png.name.startswith("toy-iris-variants-")
    frame = pd.read_csv(png.with_suffix(".csv"))
    assert (
        set(frame["run"]) == {p.name for p in some}
        and not frame["metric"].isin(["region", "point"]).any()
    )


@pytest.mark.usefixtures("_no_pictures")
@pytest.mark.slow
def test_stopped_and_asked_again(monkeypatch):
    original, done = iris.train, []

    def stop_at_third(shared, job):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(job)
        return original(shared, job)

    monkeypatch.setattr(iris, "train", stop_at_third)
    assert "stopped" in run(*SMALL, code=1).stderr
    monkeypatch.setattr(
        iris, "train", lambda shared, job: done.append(job) or original(shared, job)
    )
    run(*SMALL)
    assert len(done) == len(set(done)) == 6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--split", "three"), "unknown split 'three'"),
        (("--lr", "0"), "lr = 0"),
        (("--rounds", "0"), "rounds = 0"),
        (("--seeds", "0"), "seeds = 0"),
        (("--methods", "fedprox,fedpro"), "unknown method 'fedpro'"),
        (("--methods", ","), "nothing to train"),
        (("--variants", "--lr", "0.1", "--raw"), "--lr, --raw would be ignored"),
        (("--executor", "thread"), "unknown executor"),
    ],
)
def test_wrong_options(arguments, text):
    assert text in run(*arguments, code=2).stderr
