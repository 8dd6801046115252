"""``fldiag matching`` and the flags of ``fldiag spectrum`` as a user types them."""

import json
import shutil
from pathlib import Path

import pytest
from commands import last, rewrite, run, table

import fldiag
from fldiag.diagnosis.options import size
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.results import files
from fldiag.results.select import only

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
def copy(trained, tmp_path):
    return Path(
        shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("diagnostics"))
    )


# --- matching --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_matching_of_the_last_round(trained):
    result = run("matching", trained, "--samples", 120, "--k", 2)
    png = last(result)
    assert (
        png.parent == trained / "diagnostics"
        and png.read_bytes()[:4] == b"\x89PNG"
        and png.with_suffix(".pdf").is_file()
    )
    frame, about = table(png), json.loads(png.with_suffix(".json").read_text())
    ids = fldiag.load(trained).checkpoint(2).client_ids
    assert set(frame["round"]) == {2} and set(
        only(frame, metric="trace", moment="trained").client
    ) == set(ids)
    assert about["diagnostic"] == "matching" and about["checkpoints"]["2"] == files.sha256(
        trained / "rounds" / "0002.safetensors"
    )
    assert all(
        name in result.stdout
        for name in (
            "paper",
            "released code",
            "tensor_trace",
            "global model",
            "mean squared cosine",
        )
    )
    assert run("matching", trained, "--samples", 120, "--k", 2).stdout == result.stdout


@pytest.mark.slow
def test_the_printed_numbers_are_those_of_the_table(trained):
    result = run("matching", trained, "--samples", 120, "--k", 1, "--json")
    answer = json.loads(result.stdout)
    frame = table(Path(answer["paths"][-1]))
    row = next(r for r in answer["rows"] if r.get("diag_mode") == "diag" and r["data"] == "client")
    for metric in ("H_N", "H_D"):
        pairs = only(frame, metric=metric, diag_mode="diag", data="client", scope="pair").value
        assert row[metric] == pytest.approx(pairs.mean(), rel=1e-6) and len(pairs) == 3
    clients = {r["client"]: r for r in answer["rows"] if "client" in r}
    trained_ones = only(frame, metric="trace", moment="trained").client
    assert list(clients) == [*map(str, sorted({int(c) for c in trained_ones})), "global model"]
    for name, found in clients.items():
        part = (
            only(frame, moment="aggregated", scope="global")
            if name == "global model"
            else only(frame, moment="trained", client=int(name), slice=found["slice"])
        )
        assert found["lambda_max"] == pytest.approx(
            only(part, metric="eigenvalue", index=1).value.iloc[0], rel=1e-6
        )
        assert found["trace"] == pytest.approx(only(part, metric="trace").value.iloc[0], rel=1e-6)


@pytest.mark.slow
def test_several_rounds_and_fewer_things(trained):
    result = run(
        "matching",
        trained,
        "--samples",
        60,
        "--rounds",
        "1-2",
        "--on",
        "global",
        "--k",
        0,
    )
    frame = table(last(result))
    assert set(frame["round"]) == {1, 2} and set(frame["slice"]) == {"train"}
    assert not (frame.metric == "eigenvalue").any()


def test_a_run_without_client_weights_says_how_to_get_them(tmp_path):
    run(
        "train",
        "digits",
        *SMALL,
        "--set",
        "rounds=1",
        "--set",
        "checkpoint.clients=none",
        "--out",
        tmp_path / "bare",
    )
    text = run("matching", tmp_path / "bare", code=1).stderr
    assert "holds no round with client weights" in text and "checkpoint.clients=sampled" in text
    assert len(text.strip().splitlines()) == 2 and not (tmp_path / "bare" / "diagnostics").exists()


@pytest.mark.parametrize("name", ["matching", "forgetting", "drift"])
def test_one_checkpoint_is_not_a_run(name, trained):
    file = trained / "rounds" / "0002.safetensors"
    assert "is a single checkpoint" in run(name, file, code=2).stderr
    with pytest.raises(FldiagError, match="needs a run"):
        fldiag.diagnose(fldiag.load(file), name)


@pytest.mark.slow
def test_a_diverged_client_is_left_out_and_all_diverged_is_an_error(copy):
    def diverge(rows):
        def change(c):
            c["clients"] = c["clients"].clone()
            c["clients"][rows] = float("nan")

        return change

    ids = fldiag.load(copy).checkpoint(2).client_ids
    rewrite(copy, 2, diverge([0]))
    result = run("matching", copy, "--samples", 60, "--k", 1)
    assert (
        f"round 2: client {ids[0]} is left out: " in result.stderr
        and result.stderr.count("left out") == 1
    )
    assert (
        len(only(table(last(result)), metric="H_D", scope="pair", diag_mode="diag", data="client"))
        == 1
    )
    rewrite(copy, 2, diverge([0, 1]))
    result = run("matching", copy, "--samples", 60, "--k", 1)
    assert f"only client {ids[2]}" in result.stderr and last(result).is_file()
    rewrite(copy, 2, diverge([0, 1, 2]))
    assert "not finite" in run("matching", copy, "--samples", 60, "--k", 1, code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--on", "test"), "on = 'test'"),
        (("--k", "-1"), "greater than or equal"),
        (("--rtol", "1.5"), "less than 1"),
        (("--max-products", "1"), "greater than"),
    ],
)
def test_wrong_options(trained, arguments, text):
    assert text in run("matching", trained, *arguments, code=2).stderr


# --- spectrum --------------------------------------------------------------------------------------------------


def spectrum(trained, *arguments, code=0):
    return run(
        "spectrum", trained, "--samples", 120, "--k", 2, "--format", "png", *arguments, code=code
    )


@pytest.mark.slow
def test_trace_and_diagonal_by_layer_with_their_picture(trained):
    png = last(spectrum(trained, "--trace"))
    frame = table(png)
    traces = only(frame, metric="trace")
    assert set(traces.estimator) == {"exact"} and traces[
        traces.layer.notna()
    ].value.sum() == pytest.approx(traces[traces.layer.isna()].value.iloc[0], rel=1e-6)
    assert png.with_name(png.stem + "-layers.png").is_file()
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
    assert size(text) == bytes_


@pytest.mark.parametrize("text", ["", "0", "-5M", "1.2.3G", "many", "5T", "."])
def test_no_sizes(text):
    with pytest.raises(FldiagError, match="is not a size"):
        size(text)


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
        (("--memory", "lots"), "is not a size"),
        (("--k", "100000"), "weights"),
        (("--trace", "--rtol", "0"), "rtol"),
    ],
)
def test_flags_that_do_not_go_together(trained, arguments, text):
    assert text in spectrum(trained, *arguments, code=2).stderr
