"""Clients that are made when they are asked for: what one holds depends on nothing but its number and the seeds."""

import numpy as np
import pytest
import torch
from helpers import config

import fldiag
from fldiag import data
from fldiag.data import partition, synthetic
from fldiag.data.public import deal
from fldiag.data.synthetic import EXAMPLES
from fldiag.errors import FldiagError
from fldiag.runs.run import Run
from fldiag.sections import PartitionSection
from fldiag.training import rounds


@pytest.fixture(scope="module")
def dataset():
    return data.load("synthetic")


def dealt(dataset, clients, kind="dirichlet", **options):
    return deal(dataset, PartitionSection(kind=kind, **options), clients)


def chosen(method="fedavg", clients=1000, **more):
    made = config(
        method, data="synthetic", total=clients, per_round=4, epochs=1, precision="fp32", **more
    )
    return made.replace(partition__kind="dirichlet", partition__alpha=0.3)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("dirichlet", {"alpha": 0.1}), ("pathological", {"classes": 3}), ("iid", {})],
)
def test_a_client_does_not_depend_on_the_others_nor_on_the_order(dataset, kind, options):
    few, many = (dealt(dataset, n, kind, **options) for n in (10, 100_000))
    mine = {k: dataset.batch(torch.from_numpy(many[k])) for k in (9, 0, 5)}
    for k in (0, 5, 9):
        assert np.array_equal(few[k], many[k]) and (np.diff(few[k]) > 0).all()
        assert torch.equal(dataset.batch(torch.from_numpy(few[k])), mine[k])
    both = torch.from_numpy(np.concatenate([few[9][3:7], few[0][:2]]))
    assert torch.equal(dataset.batch(both), torch.cat([mine[9][3:7], mine[0][:2]]))
    assert not torch.equal(mine[0], mine[5])


def test_clients_share_no_example_and_are_skewed_by_alpha(dataset):
    skew = {}
    for alpha in (0.05, 100.0):
        parts = dealt(dataset, 300, alpha=alpha)
        everything = np.concatenate(list(parts))
        assert len(np.unique(everything)) == len(everything) == 300 * EXAMPLES == parts.sizes.sum()
        counts = partition.summary(parts, dataset.train_y).pivot(
            index="client", columns="class", values="count"
        )
        assert (counts.sum(axis=1) == EXAMPLES).all()
        skew[alpha] = counts.max(axis=1).mean() / EXAMPLES
    assert skew[0.05] > 0.7 and skew[100.0] < 0.3


def test_a_hundred_thousand_clients_take_a_recipe(dataset, tmp_path):
    parts = dealt(dataset, 100_000, alpha=0.5)
    partition.save(tmp_path / "p.npz", parts)
    back = partition.load_parts(tmp_path / "p.npz")
    assert (tmp_path / "p.npz").stat().st_size < 2000
    assert partition.same(parts, back) and not partition.same(
        parts, dealt(dataset, 100_000, alpha=0.4)
    )
    assert len(back) == len(partition.sizes(back)) == 100_000 and np.array_equal(
        back[99_999], parts[99_999]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("iid", {}),
        ("sharding", {"shards": 2}),
        ("lda", {"alpha": 100.0, "min_size": 1}),
        ("dirichlet", {"alpha": 0.1}),
        ("pathological", {"classes": 3}),
    ],
)
def test_held_data_are_dealt_to_a_hundred_thousand_clients(kind, options):
    labels = np.arange(500_000) % 10
    parts = partition.make(kind, labels, 100_000, 0, **options)
    assert len(parts) == 100_000 and partition.sizes(parts).min() >= 1
    assert partition.sizes(parts).sum() == 500_000


def test_a_run_makes_the_sampled_clients_only(monkeypatch, tmp_path):
    made = set()
    rng = synthetic.numpy_rng
    monkeypatch.setattr(
        synthetic,
        "numpy_rng",
        lambda seed, purpose, *at: (
            made.update([(purpose, *at)] if "client" in purpose or "dirichlet" in purpose else [])
            or rng(seed, purpose, *at)
        ),
    )
    run = rounds.train(chosen("scaffold", 100_000, rounds=3), out=tmp_path)
    sampled = {int(i) for r in run.rounds for i in run.checkpoint(r).client_ids}
    assert {at for purpose, at in made if "dirichlet" in purpose} == sampled
    assert {at for purpose, at in made if "client" in purpose} <= sampled | {
        0
    }  # one for the first look at the data
    assert len(run.states) == len(sampled)


def test_it_is_learnt(tmp_path):
    config = chosen(rounds=20, model_options={"hidden": (32,)}, stack="auto", momentum=0.5)
    run = rounds.train(config.replace(clients__per_round=10), out=tmp_path)
    accuracy = run.metrics.query("metric == 'accuracy'")["value"].tolist()
    assert accuracy[-1] > 0.6 > accuracy[0] + 0.2


@pytest.mark.slow
def test_resumed_and_diagnosed(tmp_path):
    config = chosen("scaffold", rounds=4)
    whole = rounds.train(config, out=tmp_path / "whole")

    def stop(event):
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounds.train(config, out=tmp_path / "cut", on_event=stop)
    cut = rounds.train(config, out=tmp_path / "cut", resume=True)
    assert torch.equal(cut.server_state["w"], whole.server_state["w"])
    k = whole.checkpoint().client_ids[0]
    for piece in (f"client:{k}", f"client:{k}/test", "test", "train"):
        found = fldiag.diagnose(Run.open(whole.path), "spectrum", k=1, slice=piece, samples=20)
        assert found["n_examples"].max() <= 20
    table = fldiag.diagnose(whole, "forgetting", samples=1000)
    assert table.query("metric == 'class_examples' and client == @k")["value"].sum() == EXAMPLES


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"partition__kind": "lda"}, "dirichlet, pathological, iid"),
        (
            {"partition__kind": "pathological", "partition__alpha": None, "partition__classes": 11},
            "partition.classes = 11",
        ),
        ({"clients__total": 10**8}, "10,000,000"),
        ({"data__normalise": "standard"}, "data.normalise"),
        ({"data__public": "holdout:20", "method__name": "feddf"}, "data.public=digits"),
    ],
)
def test_what_it_cannot_do_is_said(more, message, tmp_path):
    with pytest.raises(FldiagError, match=message):
        rounds.train(chosen().replace(**more), out=tmp_path)
    with pytest.raises(FldiagError, match="client by client"):
        data.take(data.load("synthetic"), "train")
