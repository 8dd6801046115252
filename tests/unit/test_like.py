"""``Config.like``: another method on data, partition, model and settings of a recorded or trained run."""

import shutil

import numpy as np
import pytest
import torch
from helpers import config
from torch import nn

import fldiag
from fldiag import Config, FldiagError
from fldiag.compare.evidence import unlike
from fldiag.config import RECIPE, TrainSection, like
from fldiag.data import load, partition
from fldiag.results.numbers import numbers
from fldiag.runs.same_model import same_model
from fldiag.training import rounds
from fldiag.training.setup import Setup

SIZES = (50, 40, 30)
PARTS = np.split(np.arange(120), np.cumsum(SIZES)[:-1])


def net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def first():
    """The model with the weights from which the recorded loop starts: not those that a config's seed draws."""
    torch.manual_seed(7)
    return net()


def other():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


class Words(nn.Module):
    """A model of several inputs."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 4), nn.Linear(4, 2)

    def forward(self, input_ids, attention_mask):
        return self.head((self.embedding(input_ids) * attention_mask[..., None]).sum(1))


def frozen():
    """A model whose first layer is not trained."""
    module = net()
    module[0].requires_grad_(False)
    return module


def record(out, *, model=None, clients=PARTS, named=False, received=True, test=True):
    """A loop of two rounds whose clients 0 and 2 take part."""
    iris, module = load("iris"), first()
    x, y = iris.normalise(iris.train_x), iris.train_y
    data = {"data": (x, y), "test": (iris.normalise(iris.test_x), iris.test_y) if test else None}
    if named:
        data = {"data": "iris"}
    with fldiag.Recorder(out, model or module, clients=clients, seed=3, **data) as recorder:
        for _ in range(2):
            before = {n: t.clone() for n, t in module.state_dict().items()}
            for p in module.parameters():
                p.data += 0.01
            recorder.round(
                received=before if received else None,
                clients={0: module, 2: module},
                aggregated=module,
            )
    return fldiag.load(out)


def row(state):
    return torch.cat([state[n].reshape(-1).double() for n in net().state_dict()])


@pytest.mark.parametrize("named", [False, True])
def test_a_recorded_run_gives_all_that_it_knows(tmp_path, named):
    run = record(tmp_path / "mine", named=named)
    resolved, remarks = like(
        run, {"model.name": "test_like:net", "method.name": "fedprox", "train.lr": 0.3}
    )
    assert (resolved.seed, resolved.rounds, resolved.name) == (3, 2, "mine")
    assert (resolved.clients.total, resolved.clients.per_round) == (3, 2)
    assert resolved.train == TrainSection(
        lr=0.3,
        initial=str(run.path / "rounds/0000.pt"),
        initial_digest=resolved.train.initial_digest,
    )
    assert resolved.method.options == {"mu": 1.0}
    said = " ".join(remarks)
    assert "train.epochs = 5" in said and "train.lr =" not in said and "received first" in said
    chosen = {f"train.{key}": value for key, value in TrainSection() if key in RECIPE}
    _, remarks = like(run, {"model.name": "test_like:net", **chosen})
    assert "by default" not in " ".join(remarks)
    setup = Setup(resolved)
    assert partition.same(setup.parts, PARTS)
    assert setup.dataset.fingerprint() == run.index["provenance"]["data"]
    assert torch.equal(setup.initial().double(), row(first().state_dict()))


def test_training_is_from_the_weights_that_the_clients_received_first(tmp_path):
    run = record(tmp_path / "mine")
    keys = {"model__name": "test_like:net", "train__precision": "fp64"}
    new = fldiag.train(Config.like(run, **keys), out=tmp_path / "new")
    begun = new.checkpoint(1)
    assert torch.equal(begun.received.double(), row(first().state_dict()))
    drawn = fldiag.train(
        Config.like(run, train__initial="none", **keys), out=tmp_path / "drawn"
    ).checkpoint(1)
    assert not torch.equal(drawn.received, begun.received)
    assert Config.like(run, **keys).hash != Config.like(run, train__initial="none", **keys).hash


def test_a_run_keeps_its_initial_weights(tmp_path):
    """It is resumed, personalised and taken as a model again without the recording."""
    run = record(tmp_path / "mine", named=True)
    keys = {"model__name": "test_like:net", "method__name": "fedlesam", "rounds": 2}
    start = Config.like(run, **keys)
    whole = fldiag.train(start.replace(rounds=3), out=tmp_path / "whole")
    part = fldiag.train(start, out=tmp_path / "part")
    asked = [fldiag.diagnose(part, name, allow_code="test_like:net") for name in TRAINERS]
    expected = start.replace(rounds=3)
    shutil.move(run.path, tmp_path / "elsewhere")
    moved = Config.like(fldiag.load(tmp_path / "elsewhere"), **keys).replace(rounds=3)
    assert moved.hash == expected.hash
    part = fldiag.train(moved, out=part.path, resume=True)
    assert all(torch.equal(a, b) for a, b in states(whole, part))
    shutil.rmtree(tmp_path / "elsewhere")
    again = Config.like(part, model__name="test_like:net")
    assert again.hash == moved.hash
    fresh = fldiag.train(again, out=tmp_path / "fresh")
    assert all(torch.equal(a, b) for a, b in states(whole, fresh))
    shorter = fldiag.train(again.replace(rounds=2), out=tmp_path / "shorter")
    for name, table in zip(TRAINERS, asked, strict=True):
        frame = fldiag.diagnose(shorter, name, allow_code="test_like:net")
        assert frame["value"].tolist() == table["value"].tolist()


TRAINERS = ("personalise",)


def states(a, b):
    one, two = a.checkpoint().state, b.checkpoint().state
    return [(one[n], two[n]) for n in one]


def test_a_trained_run_is_repeated_to_the_bit(tmp_path):
    run = rounds.train(config("fedprox", {"mu": 0.1}, seed=5), out=tmp_path / "run")
    assert Config.like(run) == run.config and Config.like(run).hash == run.config.hash
    other_method = Config.like(run, method__name="scaffold")
    assert other_method.method.options == {"server_lr": 1.0}
    assert other_method.replace(method__name="fedprox", method__mu=0.1).hash == run.config.hash


@pytest.mark.parametrize(
    ("how", "keys", "words"),
    [
        ({}, {}, ["without a name of its model", "--set model.name="]),
        ({"clients": None}, {"model__name": "test_like:net"}, ["which examples", "clients="]),
        ({"test": False}, {"model__name": "test_like:net"}, ["no test examples"]),
        ({}, {"model__name": "test_like:other"}, ["5, 4", "6, 4"]),
        ({"model": "mlp"}, {"train__lr": -1}, ["train.lr"]),
    ],
)
def test_what_a_recording_lacks_is_one_error(tmp_path, how, keys, words):
    if how.get("model"):
        how = {**how, "named": True}
        run = fldiag.Recorder(
            tmp_path / "mine", "mlp", data="iris", clients=PARTS, evaluate=False
        ).run
    else:
        run = record(tmp_path / "mine", **how)
    with pytest.raises(FldiagError) as caught:
        Setup(Config.like(run, **keys))
    assert caught.value.remedy and all(word in str(caught.value) for word in words), caught.value


def test_other_things_are_no_run():
    for thing in ("runs/mine", None, Config()):
        with pytest.raises(FldiagError, match=r"is no run; give a run, such as fldiag\.load"):
            Config.like(thing)


def test_weights_alone_need_their_data_named(tmp_path):
    with fldiag.Recorder(tmp_path / "bare", net(), clients=PARTS) as recorder:
        recorder.round(received=net(), clients={0: net()}, aggregated=net())
    run = fldiag.load(tmp_path / "bare")
    with pytest.raises(FldiagError, match=r"without a name of its data.*--set data\.name="):
        Config.like(run, model__name="test_like:net")
    assert Config.like(run, model__name="test_like:net", data__name="iris").data.name == "iris"
    dealt = Config.like(run, model__name="test_like:net", data__name="iris", partition__kind="iid")
    assert dealt.partition.kind == "iid" and dealt.clients.total == 3


def test_frozen_weights_are_those_of_the_recording(tmp_path):
    torch.manual_seed(5)
    module = frozen()
    with fldiag.Recorder(
        tmp_path / "mine", module, data="iris", clients=PARTS, trainable=True
    ) as recorder:
        recorder.round(received=module, clients={0: module}, aggregated=module)
    recorded = fldiag.load(tmp_path / "mine")
    new = fldiag.train(Config.like(recorded, model__name="test_like:frozen"), out=tmp_path / "new")
    assert new.checkpoint().state.keys() == {"2.weight", "2.bias"}
    assert new.index["provenance"]["base"] == recorded.index["provenance"]["base"]
    shutil.rmtree(recorded.path)
    for name in ("forgetting", "personalise"):
        assert len(fldiag.diagnose(new, name, allow_code="test_like:frozen"))


def test_initial_weights_that_changed_are_refused(tmp_path):
    torch.save(first().state_dict(), tmp_path / "w.pt")
    start = config(model="test_like:net", model_options={}, initial=str(tmp_path / "w.pt"))
    assert torch.equal(Setup(start).initial(), row(first().state_dict()))
    torch.save(other().state_dict(), tmp_path / "w.pt")
    with pytest.raises(FldiagError, match="have changed since the config was made"):
        Setup(start)
    assert start.replace(train__initial=str(tmp_path / "w.pt")).hash != start.hash
    with pytest.raises(FldiagError, match="there is no file"):
        start.replace(train__initial=str(tmp_path / "none.pt"))


@pytest.mark.parametrize(
    ("name", "keys", "same"),
    [
        ("the same architecture under another name", {"model__name": "test_like:net"}, True),
        ("another width", {"model__name": "mlp", "model__hidden": [6]}, False),
    ],
)
def test_models_are_compared_by_their_tensors(tmp_path, name, keys, same):
    run = record(tmp_path / "mine")
    keys = {**keys, **({} if same else {"train__initial": "none"})}
    new = fldiag.train(Config.like(run, **keys), out=tmp_path / "new")
    assert same_model(run, new) is same and same_model(run.checkpoint(), new.checkpoint()) is same
    assert same_model(run, run) and same_model(new, new)
    needy = [n for n in numbers().values() if {"model", "partition"} <= set(n.needs)]
    assert needy and all((unlike(number, new, run) == "") is same for number in needy)
