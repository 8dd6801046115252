"""Sweeps: every combination, each as if trained alone."""

import pytest
import torch
from helpers import config
from reference import vector

import fldiag
from fldiag.training import sweep


def test_combinations_in_order():
    over = {"method.name": ["fedavg", "fedprox"], "seed": [0, 1]}
    assert [tuple(keys.values()) for keys in sweep.combinations(over)] == [
        ("fedavg", 0),
        ("fedavg", 1),
        ("fedprox", 0),
        ("fedprox", 1),
    ]
    assert sweep.combinations({}) == [{}]


def test_every_method_gets_what_the_preset_says_of_it(tmp_path):
    small = {"rounds": [1], "train.epochs": [0], "clients.per_round": [1]}
    over = small | {"method.name": ["fedavg", "feddf"]}
    average, distil = fldiag.sweep("digits", over, out=tmp_path)
    assert (average.config.data.public, distil.config.data.public) == (None, "holdout:200")


def test_the_table_has_mean_and_deviation_of_the_runs_that_did_not_diverge(tmp_path):
    over = {"train.lr": [0.1, 300.0], "seed": [0, 1]}
    runs = fldiag.sweep(config(rounds=6), over, out=tmp_path)
    assert runs[2].status == "diverged" and runs[2].done  # after rounds with numbers
    table = sweep.table(runs, over)
    last = [
        r.metrics.query("round == 6 and metric == 'accuracy'")["value"].item() for r in runs[:2]
    ]
    assert list(table["train.lr"]) == ["0.1", "300.0"] and list(table["diverged"]) == [0, 2]
    first = table.iloc[0]
    assert first["accuracy"] == pytest.approx(sum(last) / 2)
    assert first["accuracy_std"] == pytest.approx(abs(last[0] - last[1]) / 2**0.5)
    assert table["accuracy"].isna().tolist() == [False, True] and table["runs"].tolist() == [2, 2]


@pytest.mark.parametrize(
    "executor",
    ["serial", *(pytest.param(e, marks=pytest.mark.slow) for e in ("processes:2", "dask"))],
)
def test_a_sweep_trains_what_train_does(executor, tmp_path):
    over, events = {"method.name": ["fedavg", "scaffold"], "seed": [0, 1]}, []
    how = {"executor": executor, "on_event": events.append}
    runs = fldiag.sweep(config(rounds=2), over, out=tmp_path / "sweep", **how)
    assert sorted(e["path"] for e in events) == sorted(str(run.path) for run in runs)
    for run in runs:
        alone = fldiag.train(run.config, out=tmp_path / run.path.name)
        assert run.metrics.equals(alone.metrics)
        assert torch.equal(vector(run.checkpoint().state), vector(alone.checkpoint().state))


def test_shards_are_all_runs_once_and_a_call_without_one_collects(tmp_path):
    start, over = config(rounds=1), {"method.name": ["fedavg", "fedprox"], "seed": [0, 1]}
    parts = [sweep.sweep(start, over, out=tmp_path, shard=f"{i}/3") for i in (1, 2, 3)]
    assert sorted(run.path for part in parts for run in part) == sorted(tmp_path.iterdir()) and [
        len(p) for p in parts
    ] == [2, 1, 1]
    assert len(fldiag.sweep(start, over, out=tmp_path)) == len(list(tmp_path.iterdir())) == 4
