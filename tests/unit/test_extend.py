"""A finished run can have more rounds, and ends with the bits of one that had all of them from the start."""

import json
import shutil

import pytest
import torch
from commands import invoke
from helpers import config, needs
from test_journal import on_disk, train_until

from fldiag.errors import FldiagError
from fldiag.results.table import PERSONAL
from fldiag.runs.index import write_index
from fldiag.runs.run import Run
from fldiag.training import rounds


def small(n, method="scaffold", **more):
    return config(
        method,
        **{
            "rounds": n,
            "total": 4,
            "per_round": 2,
            "epochs": 1,
            **needs(method),
            "checkpoint": {"clients": "sampled", "every": 2},
            **more,
        },
    )


def same(extended, whole, more=()):
    """Weights, clients' weights, states and metrics; ``more``: rounds that the extended one stored besides."""
    assert extended.status == whole.status == "finished" and extended.done == whole.done
    assert extended.rounds == sorted({*whole.rounds, *more})
    for r in whole.rounds:
        one, other = extended.checkpoint(r), whole.checkpoint(r)
        assert all(torch.equal(one.state[k], other.state[k]) for k in other.state)
        assert one.clients is other.clients is None or torch.equal(one.clients, other.clients)
    for one, other in zip(*(run.states.items() for run in (extended, whole)), strict=True):
        assert one[0] == other[0] and all(torch.equal(one[1][k], other[1][k]) for k in other[1])
    assert extended.metrics.drop(columns="run").equals(whole.metrics.drop(columns="run"))
    assert (
        extended.config.rounds == whole.config.rounds
        and extended.index["hash"] == whole.index["hash"]
    )
    for name in extended.index["files"]:
        extended.verified(name)
    assert on_disk(extended.path) == {*extended.index["files"], "run.json"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return rounds.train(small(7), out=tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return rounds.train(small(3), out=tmp_path_factory.mktemp("short") / "run")


@pytest.fixture
def copy(short, tmp_path):
    return Run.open(shutil.copytree(short.path, tmp_path / "copy"))


def test_more_rounds_are_those_of_all_at_once(copy, whole):
    extended = rounds.train(small(7), out=copy.path, resume=True)
    same(extended, whole, more=[3])
    assert extended.index["extended"] == [{"rounds": 3, "stays": ["rounds/0003.pt"]}]
    assert [(s["first_round"], s["last_round"]) for s in extended.index["segments"]] == [
        (1, 3),
        (4, 7),
    ]


def test_twice(copy, whole):
    rounds.train(small(5), out=copy.path, resume=True)
    extended = rounds.train(small(7), out=copy.path, resume=True)
    same(extended, whole, more=[3, 5])
    assert [e["rounds"] for e in extended.index["extended"]] == [3, 5]


def test_a_run_that_was_stopped_gets_more_rounds(tmp_path, whole):
    def stop(event):
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounds.train(small(3), out=tmp_path / "cut", on_event=stop)
    extended = rounds.train(small(7), out=tmp_path / "cut", resume=True)
    same(extended, whole)
    assert "extended" not in extended.index


@pytest.mark.slow
def test_an_extension_that_is_killed(short, whole, tmp_path):
    operation, tried = 0, 0
    while True:
        operation += 3
        out = tmp_path / f"{operation}"
        shutil.copytree(short.path, out)
        if not train_until(operation, small(7), out):
            break
        tried += 1
        same(rounds.train(small(7), out=out, resume=True), whole, more=[3])
    assert tried > 8


def test_clients_own_models_of_the_former_last_round_stay(tmp_path):
    """The table that had them stays as it was; the run's own says what one of all rounds says."""
    short = rounds.train(small(2, "fedavg_ft"), out=tmp_path / "run")
    former, name = short.metrics, short.index["metrics"]
    assert former["metric"].str.startswith(PERSONAL).any()
    extended = rounds.train(small(4, "fedavg_ft"), out=tmp_path / "run", resume=True)
    same(extended, rounds.train(small(4, "fedavg_ft"), out=tmp_path / "whole"))
    assert extended.index["extended"] == [{"rounds": 2, "stays": [name]}]
    assert extended._table(name).equals(former)


def test_steps_of_the_former_last_round_stay(tmp_path):
    def chosen(n):
        return small(n).replace(metrics={"steps": True, "every": 2})

    rounds.train(chosen(3), out=tmp_path / "run")
    extended = rounds.train(chosen(5), out=tmp_path / "run", resume=True)
    same(extended, rounds.train(chosen(5), out=tmp_path / "whole"), more=[3])
    assert extended.recorded == [2, 3, 4, 5] and extended.index["extended"][0]["stays"] == [
        "rounds/0003.pt",
        "steps/0003.parquet",
    ]


def test_fewer_rounds_are_refused(copy):
    before = (copy.path / "run.json").read_bytes()
    with pytest.raises(FldiagError, match="rounds: 3 there, 2 now"):
        rounds.train(small(2), out=copy.path, resume=True)
    assert (copy.path / "run.json").read_bytes() == before


def test_a_run_without_its_clients_states_is_not_extended(copy):
    index = json.loads((copy.path / "run.json").read_text())
    write_index(copy.path, {**index, "thinned": {"rounds": [2, 3], "state": True}})
    with pytest.raises(FldiagError, match="no longer has the clients' states"):
        rounds.train(small(7), out=copy.path, resume=True)


def test_on_the_command_line(tmp_path, monkeypatch):

    monkeypatch.chdir(tmp_path)
    words = [
        "train",
        "digits",
        "--set",
        "model.name=mlp",
        "--set",
        "train.epochs=1",
        "--set",
        "clients.per_round=2",
        "--out",
        "r",
    ]
    assert invoke(*words, "--set", "rounds=1").exit_code == 0
    found = invoke(*words, "--set", "rounds=2", "--resume")
    assert (
        found.exit_code == 0
        and "resuming after round 1 of 2" in found.stderr
        and "0002.pt" in found.stdout
    )
