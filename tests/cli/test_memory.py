"""``--memory`` as a user types it: other batches, the same numbers."""

import pytest
from commands import last, run, table

from fldiag.diagnosis.options import size
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem

SMALL = (
    "--set",
    "rounds=2",
    "--set",
    "model.name=mlp",
    "--set",
    "model.hidden=[12]",
    "--set",
    "train.epochs=1",
    "--set",
    "clients.per_round=3",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "r"
    run("train", "digits", *SMALL, "--set", "checkpoint.clients=sampled", "--out", folder)
    return folder


@pytest.fixture
def rooms(monkeypatch):
    """The bytes that each problem may use, and into how many batches it cuts its examples."""
    seen, init = [], Problem.__init__

    def spy(self, *given, **options):
        init(self, *given, **options)
        seen.append((self.memory, len(self.bounds)))

    monkeypatch.setattr(Problem, "__init__", spy)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    [
        ("spectrum", "--samples", 200, "--trace"),
        ("landscape", "--samples", 200, "--points", 5),
        ("matching", "--samples", 60, "--on", "global", "--k", 1),
    ],
)
def test_memory_bounds_the_batches_and_not_the_result(trained, rooms, tmp_path, verb):
    name, *more = verb
    a = table(last(run(name, trained, *more, "--out", tmp_path / "a")))
    usual = rooms.copy()
    b = table(last(run(name, trained, *more, "--memory", "64k", "--out", tmp_path / "b")))
    small = rooms[len(usual) :]
    assert {m for m, _ in usual} == {2**31} and {m for m, _ in small} == {2**16}
    assert sum(n for _, n in small) > sum(n for _, n in usual)
    a, b = (t[t.metric.isin(["eigenvalue", "trace", "loss"])].value.to_numpy(float) for t in (a, b))
    assert len(a) and a == pytest.approx(b, rel=2e-3)


@pytest.mark.parametrize(
    ("text", "bytes_"), [("500M", 500 * 2**20), ("2GiB", 2**31), ("1.5k", 1536), ("123456", 123456)]
)
def test_sizes(text, bytes_):
    assert size(text) == bytes_


@pytest.mark.parametrize("text", ["", "0", "-5M", "1.2.3G", "many", "5T", "."])
def test_no_sizes(text):
    with pytest.raises(FldiagError, match="is not a size"):
        size(text)
