"""A user's own method is named as ``pkg.mod:function``, in training, sweeps, tuning and what trains on from a run."""

import sys
import textwrap

import pytest
import torch
from commands import run as typed
from helpers import config

import fldiag
from fldiag import Config, FldiagError, registry
from fldiag.training import train
from fldiag.training.setup import Setup

MINE = """
    from fldiag.method import Method, Part, method
    from fldiag.parts.proximal import Proximal

    class Pull(Part):
        def __init__(self, force):
            self.force = force

        def correct(self, step, g):
            return g + self.force * (step.w - step.local.w_g)

    def pull(force: float = 0.5) -> Method:
        '''A pull towards the received model.'''
        return Method(Pull(force))

    def nothing() -> Method:
        return Method()

    def fails() -> Method:
        raise RuntimeError("no")

    def number():
        return 3
"""
SHORT = ["--set", "rounds=1", "--set", "model.name=mlp", "--set", "train.epochs=1"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_methods.py").write_text(textwrap.dedent(MINE))
    yield tmp_path
    sys.modules.pop("mine_methods", None)


def weights(run):
    return torch.cat([t.reshape(-1) for t in run.checkpoint().state.values()])


@pytest.mark.parametrize(
    ("name", "options", "registered", "registered_options"),
    [
        ("mine_methods:nothing", {}, "fedavg", {}),
        ("mine_methods:pull", {"force": 0.0}, "fedavg", {}),
        ("fldiag.methods.fedprox:fedprox", {"mu": 0.3}, "fedprox", {"mu": 0.3}),
    ],
)
def test_it_trains_as_a_registered_method_does(
    folder, name, options, registered, registered_options
):
    mine = train.train(config(name, options), out=folder / "mine")
    same = train.train(config(registered, registered_options), out=folder / "same")
    assert torch.equal(weights(mine), weights(same))
    assert mine.about["config"]["method"] == {"name": name, **options}


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mine_methods:absent", {}, ["no function 'absent'", "known:"]),
        ("no_module:pull", {}, ["cannot import no_module", "install it"]),
        ("mine_methods:Pull", {}, ["force: Field required"]),
        ("mine_methods:number", {}, ["returned a int", "return a fldiag.Method"]),
        ("mine_methods:fails", {}, ["RuntimeError", "no"]),
        ("mine_methods:pull", {"forc": 1}, ["unknown key 'forc'", "did you mean 'force'?"]),
        ("mine_methods:pull", {"force": "much"}, ["force = 'much'"]),
    ],
)
def test_what_is_no_method_is_one_error(folder, name, options, words):
    with pytest.raises(FldiagError) as caught:
        Setup(config(name, options))
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_override_of_the_name_drops_the_options_of_the_former(folder):
    start = Config.load("digits", method__name="fedprox", method__mu=3.0)
    assert start.replace(method__name="mine_methods:pull").method.options == {}
    own = start.replace(method__name="mine_methods:pull", method__force=2.0)
    assert own.method.options == {"force": 2.0} and own.method_version == 1
    assert own.replace(method__name="fedavg").method.options == {}
    assert own.hash != own.replace(method__force=3.0).hash
    assert ":" not in train.run_path(own).name and "pull" in train.run_path(own).name


def test_a_registered_function_brings_what_it_was_registered_with(folder):
    registry.allow("fldiag.methods.fedprox:fedprox")
    entry = registry.method.get("fldiag.methods.fedprox:fedprox")
    assert entry.meta == registry.method.get("fedprox").meta
    assert entry.name == "fldiag.methods.fedprox:fedprox"


def test_a_run_that_names_it_is_data(folder, monkeypatch):
    run = train.train(config("mine_methods:pull"), out=folder / "run")
    sys.modules.pop("mine_methods")
    monkeypatch.setattr(registry, "ALLOWED", set())
    stored = fldiag.load(run.path)
    fldiag.diagnose(stored, "forgetting")  # needs the weights only
    for ask in (
        lambda: fldiag.train(stored.config.replace(rounds=3), out=run.path, resume=True),
        lambda: fldiag.diagnose(stored, "personalise", epochs=[0]),
    ):
        with pytest.raises(FldiagError, match="method 'mine_methods:pull' is user code"):
            ask()
    assert "mine_methods" not in sys.modules
    allowed = fldiag.load(run.path, allow_code="mine_methods:pull")
    longer = fldiag.train(allowed.config.replace(rounds=3), out=run.path, resume=True)
    unbroken = train.train(config("mine_methods:pull", rounds=3), out=folder / "unbroken")
    assert torch.equal(weights(longer), weights(unbroken))
    monkeypatch.setattr(registry, "ALLOWED", set())
    again = fldiag.load(run.path)
    assert len(fldiag.diagnose(again, "personalise", epochs=[0], allow_code="mine_methods:pull"))


def test_the_doctor_supposes_nothing_of_a_method_that_it_may_not_import(folder):
    from fldiag.diagnostics.doctor.facts import about_run

    run = train.train(config("mine_methods:pull"), out=folder / "run")
    assert about_run(run).rule == "other"


def test_sweeps_take_it(folder):
    start = config("fedavg", data="digits", rounds=1)
    names = ["fedavg", "mine_methods:pull"]
    runs = fldiag.sweep(start, {"method.name": names}, out=folder / "runs")
    assert [run.config.method.name for run in runs] == names


@pytest.mark.slow
def test_worker_processes_load_it(folder, monkeypatch):
    start = config("mine_methods:pull", data="digits", rounds=1, per_round=3)
    one = fldiag.train(start, out=folder / "one")
    many = fldiag.train(start, out=folder / "many", executor="processes:2")
    assert torch.equal(weights(one), weights(many))
    runs = fldiag.sweep(start, {"seed": [0, 1]}, out=folder / "sweep", executor="processes:2")
    assert [run.status for run in runs] == ["finished"] * 2


def test_the_command_line_takes_it(folder):
    typed("train", "digits", "--set", "method.name=mine_methods:pull", *SHORT, "--out", "run")
    assert "A pull towards the received model." in typed("explain", "mine_methods:pull").stdout
    refused = typed("personalise", "run", "--epochs", 0, code=1)
    assert "--allow-code mine_methods:pull" in refused.stderr
    typed("personalise", "run", "--epochs", 0, "--allow-code", "mine_methods:pull")
    assert "has no function 'push'" in typed("explain", "mine_methods:push", code=2).stderr
