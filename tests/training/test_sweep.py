"""Sweeps: every combination, each as if trained alone."""

import pytest
import torch
from helpers import config

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
    over = {"train.lr": [0.1, 1e30], "seed": [0, 1]}
    runs = fldiag.sweep(config(rounds=2), over, out=tmp_path)
    table = sweep.table(runs, over)
    last = [
        r.metrics.query("round == 2 and metric == 'accuracy'")["value"].item() for r in runs[:2]
    ]
    assert list(table["train.lr"]) == ["0.1", "1e+30"] and list(table["diverged"]) == [0, 2]
    first = table.iloc[0]
    assert first["accuracy"] == pytest.approx(sum(last) / 2)
    assert first["accuracy_std"] == pytest.approx(abs(last[0] - last[1]) / 2**0.5)
    assert table["accuracy"].isna().tolist() == [False, True] and table["runs"].tolist() == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes:2", "dask"])
def test_where_the_runs_are_trained_does_not_show(executor, tmp_path):
    start, over = config(rounds=2), {"method.name": ["fedavg", "scaffold"], "seed": [0, 1]}
    events = []
    here = fldiag.sweep(start, over, out=tmp_path / "here")
    there = fldiag.sweep(
        start, over, out=tmp_path / "there", executor=executor, on_event=events.append
    )
    assert sorted(e["path"] for e in events) == sorted(str(run.path) for run in there)
    for one, other in zip(here, there, strict=True):
        assert one.path.name == other.path.name and one.metrics.equals(other.metrics)
        assert all(
            torch.equal(w, other.checkpoint().state[n]) for n, w in one.checkpoint().state.items()
        )


def test_shards_are_all_runs_once_and_a_call_without_one_collects(tmp_path):
    start, over = config(rounds=1), {"method.name": ["fedavg", "fedprox"], "seed": [0, 1]}
    parts = [sweep.sweep(start, over, out=tmp_path, shard=f"{i}/3") for i in (1, 2, 3)]
    assert sorted(run.path for part in parts for run in part) == sorted(tmp_path.iterdir()) and [
        len(p) for p in parts
    ] == [2, 1, 1]
    events = []
    assert len(fldiag.sweep(start, over, out=tmp_path, on_event=events.append)) == len(events) == 4
