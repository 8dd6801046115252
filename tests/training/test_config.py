"""Configs: what is refused and with which help, overrides, the hash, and training in the federation of a run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fldiag
from fldiag.config import Config, build, of_run, parse_override
from fldiag.errors import FldiagError

load = Config.load
FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"round": 3}, ["'round'", "did you mean 'rounds'?"]),
        ({"lr": 3}, ["'lr'", "train.lr"]),
        ({"train": {"batchsize": 3}}, ["did you mean 'train.batch_size'?"]),
        ({"method": {"name": "fedprx"}}, ["unknown method 'fedprx'", "did you mean 'fedprox'?"]),
        ({"method": {"name": "fedprox", "muu": 1}}, ["unknown key 'muu'", "did you mean 'mu'?"]),
        ({"method": "fedprox"}, ["method = 'fedprox'", "valid dictionary"]),
        ({"train": {"lr": -1}}, ["train.lr = -1", "greater than 0"]),
        ({"train": {"lr": "high"}}, ["train.lr = 'high'"]),
        ({"clients": {"total": 3, "per_round": 4}}, ["per_round = 4 is more than total = 3"]),
        ({"partition": {"kind": "iid", "alpha": 1}}, ["alpha has no meaning"]),
        ({"partition": {"kind": "file"}}, ["needs path"]),
        ({"model": {"name": "minilm"}}, ["data.tokenizer"]),
    ],
)
def test_what_is_refused(tree, words):
    with pytest.raises(FldiagError) as caught:
        build(tree)
    assert caught.value.usage and all(word in str(caught.value) for word in words), caught.value


def test_overrides():
    assert parse_override("method.rho=2.0") == ("method.rho", 2.0)
    assert parse_override("a = b c") == ("a", "b c")
    with pytest.raises(FldiagError, match="key=value"):
        parse_override("rounds")
    with pytest.raises(FldiagError, match="did you mean 'digits'"):
        load("digts")
    prox = load("digits", method__name="fedprox", method__mu=0.3)
    assert prox.method.options == {"mu": 0.3}
    assert prox.replace(method__name="fedavg").method.options == {}
    assert build(prox.model_dump()) == prox == Config(**prox.model_dump(mode="json"))


def test_options_of_a_method_that_live_in_the_model_go_with_it():
    drop = load("digits", method__name="stochdepth", model__name="resnet8_p3")
    plain = drop.replace(method__name="fedavg")
    assert plain == load("digits", model__name="resnet8_p3")


def test_hashes_of_presets_are_in_the_fixture():
    hashes = {name: load(name).hash for name in fldiag.catalogue("presets")}
    assert hashes == json.loads((FIXTURES / "hashes.json").read_text("utf-8"))


def test_what_decides_the_hash(tmp_path):
    config = load("digits")
    same = {"name": "other", "data__root": "/x", "checkpoint__every": 7}
    assert config.replace(**same).hash == config.hash
    others = [{"seed": 1}, {"method__name": "fedprox"}, {"train__lr": 0.3}, {"model__name": "mlp"}]
    others += [{"metrics__steps": True}, {"method__name": "fedprox", "method__mu": 0.5}]
    hashes = [config.replace(**change).hash for change in others]
    assert len({config.hash, *hashes}) == 7
    # an option that says its default is no other run
    assert config.replace(method__name="fedprox", method__mu=1.0).hash == hashes[1]


def test_a_method_in_the_federation_of_a_trained_run(tmp_path):
    start = load(
        "digits", **{"rounds": 1, "clients.total": 6, "clients.per_round": 2, "train.lr": 0.3}
    )
    run = fldiag.train(start, out=tmp_path / "run")
    config = of_run(run, {"method.name": "fedprox", "rounds": 1})
    assert (config.data, config.model, config.partition) == (
        start.data,
        start.model,
        start.partition,
    )
    assert config.clients.total == 6 and config.train.lr == 0.01
    other = fldiag.train(config, out=tmp_path / "other")
    parts = [np.load(r.path / "partition.npz") for r in (run, other)]
    assert all(np.array_equal(parts[0][key], parts[1][key]) for key in parts[0].files)


def test_a_run_does_not_go_on_with_another_partition_or_other_initial_weights(tmp_path):
    parts, weights = tmp_path / "parts.json", tmp_path / "w.pt"
    parts.write_text(json.dumps([list(range(k, 300, 3)) for k in range(3)]))
    first = {"rounds": 1, "train.epochs": 1, "clients.total": 3, "clients.per_round": 2}
    start = load(
        "digits",
        **first | {"model.name": "mlp", "partition.kind": "file"} | {"partition.path": str(parts)},
    )
    state = fldiag.train(start, out=tmp_path / "first").checkpoint().state
    torch.save(state, weights)
    config = start.replace(train__initial=str(weights))
    run = fldiag.train(config, out=tmp_path / "run")
    assert fldiag.train(config.replace(rounds=2), out=run.path, resume=True).done == 2
    torch.save({name: 2 * w for name, w in state.items()}, weights)
    with pytest.raises(FldiagError, match=r"another config or other data \(initial\)"):
        fldiag.train(config.replace(rounds=3), out=run.path, resume=True)
    torch.save(state, weights)
    parts.write_text(json.dumps([list(range(k, 297, 3)) for k in range(3)]))
    with pytest.raises(FldiagError, match=r"other data \(partition\)"):
        fldiag.train(config.replace(rounds=3), out=run.path, resume=True)


def test_a_method_in_the_federation_of_a_recorded_loop(tmp_path):
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    clients = [list(range(20)), list(range(20, 60))]
    net = torch.nn.Linear(4, 3)
    with fldiag.Recorder(tmp_path / "own", net, (x, y), clients, test=(x, y)) as rec:
        for k in (0, 1):
            rec.client(k, net)
        rec.round(aggregated=net)
    with pytest.raises(FldiagError, match=r"--set model\.name"):
        of_run(rec.run, {})
    config = of_run(rec.run, {"model.name": "mlp", "rounds": 1})
    run = fldiag.train(config, out=tmp_path / "new")
    assert config.clients.total == 2 and run.status == "finished"
