"""The flags of ``fldiag spectrum``, and ``--memory``, as a user types them."""

import pytest
from commands import last, run, table

from fldiag.diagnosis.diagnose import read_size
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.results.table import only

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


def spectrum(trained, *arguments, code=0):
    return run(
        "spectrum", trained, "--samples", 120, "--k", 2, "--format", "png", *arguments, code=code
    )


@pytest.mark.slow
def test_trace_and_diagonal_by_layer(trained):
    png = last(spectrum(trained, "--trace"))
    frame = table(png)
    traces = only(frame, metric="trace")
    assert set(traces.estimator) == {"exact"} and traces[
        traces.layer.notna()
    ].value.sum() == pytest.approx(traces[traces.layer.isna()].value.iloc[0], rel=1e-6)
    assert len(only(frame, metric="diagonal_norm")) == len(traces)


@pytest.mark.slow
def test_blocks_of_the_hessian(trained):
    layers = table(last(spectrum(trained, "--per-layer", "--matrix", "ggn")))
    first = layers[layers.metric == "eigenvalue"]
    one = first[first.layer.notna()]
    for layer, value in zip(one.layer, one.value, strict=True):
        block = table(last(spectrum(trained, "--params", f"{layer}.*", "--matrix", "ggn")))
        block = block[block.metric == "eigenvalue"]
        assert set(block.layer) == {f"{layer}.*"} and block.value.iloc[0] == pytest.approx(
            value, rel=2e-3
        )
    assert len(one) > 1 and first[first.layer.isna()].value.max() >= one.value.max() * (
        1 - 1e-3
    )  # interlacing
    low = table(last(spectrum(trained, "--which", "smallest")))
    assert low[low.metric == "eigenvalue"].value.max() < first.value.min()
    assert "matches no parameter" in spectrum(trained, "--params", "nothing.*", code=2).stderr


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
        ("landscape", "--samples", 200),
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
    assert read_size(text) == bytes_


@pytest.mark.parametrize("text", ["", "0", "-5M", "1.2.3G", "many", "5T", "."])
def test_no_sizes(text):
    with pytest.raises(FldiagError, match="give such as"):
        read_size(text)


def test_pyhessian_engine_beside_the_own_one(trained):
    own = table(last(spectrum(trained, "--trace")))
    result = spectrum(trained, "--trace", "--engine", "pyhessian")
    theirs = table(last(result))
    assert (
        set(theirs[~theirs.metric.isin(["loss", "accuracy"])].estimator) == {"pyhessian"}
        and "stopping rules" in result.stderr
    )
    first = theirs[theirs.metric == "eigenvalue"].iloc[0]
    true = own[own.metric == "eigenvalue"].value.iloc[0]
    assert first.value == pytest.approx(true, rel=0.1)
    assert only(theirs, metric="trace").value.iloc[0] == pytest.approx(
        own[(own.metric == "trace") & own.layer.isna()].value.iloc[0], rel=0.6
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--engine", "pyhessain"), "pyhessain"),
        (("--engine", "pyhessian", "--density"), "PyHessian knows"),
        (("--engine", "pyhessian", "--params", "x"), "PyHessian knows"),
        (("--engine", "pyhessian", "--precision", "fp64"), "PyHessian knows"),
        (("--trace", "--matrix", "ggn"), "leave out --params and --matrix"),
        (("--density", "--params", "0.*"), "leave out --params and --matrix"),
        (("--matrix", "kfac"), "matrix = 'kfac'"),
        (("--memory", "lots"), "give such as"),
        (("--trace", "--rtol", "0"), "rtol"),
    ],
)
def test_flags_that_do_not_go_together(trained, arguments, text):
    assert text in spectrum(trained, *arguments, code=2).stderr
