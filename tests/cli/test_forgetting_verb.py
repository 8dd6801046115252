"""``fldiag forgetting`` and ``fldiag drift`` as a user types them, on whole and on damaged runs."""

import shutil
from pathlib import Path

import pytest
from commands import last, rewrite, run, table

from fldiag.diagnosis.diagnose import read_rounds

SMALL = ("--set", "rounds=4", "--set", "model.name=mlp", "--set", "train.epochs=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "r"
    run("train", "digits", *SMALL, "--set", "checkpoint.clients=sampled", "--out", folder)
    return folder


@pytest.fixture
def copy(trained, tmp_path):
    """The run, to be damaged; its diagnostics left behind."""
    return Path(
        shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("diagnostics"))
    )


@pytest.mark.slow
def test_a_damaged_round_is_an_error_that_names_it_and_can_be_left_out(copy):
    before = last(run("forgetting", copy))
    content = (copy / "rounds" / "0002.safetensors").read_bytes()
    (copy / "rounds" / "0002.safetensors").write_bytes(content[: len(content) // 2])
    (copy / "rounds" / "0003.safetensors").unlink()
    for verb in ("forgetting", "drift"):  # also where a table is kept
        error = run(verb, copy, code=1).stderr
        assert "0002.safetensors is not the file this run wrote" in error
    assert "0003.safetensors belongs to" in run("drift", copy, "--rounds", "3", code=1).stderr
    after = table(last(run("forgetting", copy, "--rounds", "1,4")))
    assert set(after[after.metric != "missing"]["round"].dropna()) == {1, 4} and before.exists()


@pytest.mark.slow
def test_a_round_with_fewer_clients(copy):
    def fewer(c):
        c["manifest"]["clients"] = c["manifest"]["clients"][:2]
        c["clients"] = c["clients"][:2]

    rewrite(copy, 2, fewer)
    frame = table(last(run("forgetting", copy)))
    assert frame[(frame["round"] == 2) & (frame.metric == "drop")].client.nunique() == 2


def test_a_run_without_client_weights_says_how_to_get_them(tmp_path):
    run(
        "train",
        "digits",
        "--set",
        "rounds=1",
        "--set",
        "model.name=mlp",
        "--set",
        "train.epochs=1",
        "--set",
        "checkpoint.clients=none",
        "--out",
        tmp_path / "bare",
    )
    text = run("drift", tmp_path / "bare", code=1).stderr
    assert (
        "holds no round with client weights" in text
        and "checkpoint.clients=sampled" in text
        and "Traceback" not in text
    )
    assert not (tmp_path / "bare" / "diagnostics").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--rounds", "9"), "no such round is stored"),
        (("--rounds", "1,9"), "no such round is stored"),
        *((("--rounds", text), "is not valid") for text in ("x", "1 - 3", "1-2-3", "-3", "1-")),
        (("--min-count", "0"), "greater than or equal to 1"),
        (("--samples", "0"), "samples"),
    ],
)
def test_wrong_options(trained, arguments, text):
    error = run("forgetting", trained, *arguments, code=2).stderr
    assert text in error


def test_choice_of_rounds():
    there = [1, 2, 3, 5, 8, 10]
    assert (
        read_rounds(None, there) is None
        and read_rounds("last", there) == [10]
        and read_rounds("2-8", there) == [2, 3, 5, 8]
    )
    assert (
        read_rounds("1,3,8-10", there) == [1, 3, 8, 10]
        and read_rounds([8, 3], there) == [3, 8]
        and read_rounds(5, there) == [5]
    )


def test_no_code_that_a_run_names_is_executed(copy):
    def other(c):
        c["manifest"]["config"]["model"] = {"name": "os:getcwd"}

    for r in (1, 2, 3, 4):
        rewrite(copy, r, other)
    assert "because a file says so" in run("forgetting", copy, code=1).stderr
