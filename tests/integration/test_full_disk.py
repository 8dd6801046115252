"""A disk that takes no more: one error with what to do, and no half-written file. The limit is the system's own, on the size of
every file (RLIMIT_FSIZE), so that the write itself fails, as on a full disk."""

import contextlib
import json

import commands
import pytest

import fldiag

resource = pytest.importorskip("resource")  # not on Windows
pytestmark = pytest.mark.slow
SMALL = (
    "--set",
    "rounds=2",
    "--set",
    "model.name=mlp",
    "--set",
    "train.epochs=1",
    "--set",
    "clients.total=4",
    "--set",
    "clients.per_round=2",
)


@contextlib.contextmanager
def files_of_at_most(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refused(*words, size):
    with files_of_at_most(size):
        result = commands.run(*words, code=1)
    assert result.stderr.count("error: cannot write ") == 1 and "File too large" in result.stderr
    assert (
        "free some disk space or choose another folder with --out" in result.stderr
        and "Traceback" not in result.stderr
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("full") / "run"
    return fldiag.train(
        fldiag.Config.load(
            "digits",
            rounds=2,
            model__name="mlp",
            train__epochs=1,
            clients__total=4,
            clients__per_round=2,
            checkpoint__clients="sampled",
        ),
        out=out,
        device="cpu",
    )


@pytest.mark.parametrize(
    "words",
    [("forgetting",), ("flatness", "--rtol", "0.9"), ("report",)],
    ids=lambda words: words[0],
)
def test_of_a_run(run, tmp_path, words):
    verb, *more = words
    refused(verb, str(run.path), *more, "--out", str(tmp_path / "out"), size=2000)
    written = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert all(f.suffix == ".json" and json.loads(f.read_text()) for f in written), written


def test_of_training(tmp_path):
    refused("train", "digits", *SMALL, "--out", str(tmp_path / "run"), size=8000)
    assert {f.name for f in tmp_path.rglob("*") if f.is_file()} <= {
        "run.json",
        "rounds.jsonl",
        "partition.npz",
        ".lock",
    }
    commands.run("train", "digits", *SMALL, "--out", str(tmp_path / "run"), "--resume")
    assert fldiag.Run.open(tmp_path / "run").status == "finished"
