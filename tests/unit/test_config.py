"""Configs: what is refused and with which help, overrides, the hash, and the way to TOML and back."""

import pytest
from helpers import config as small

from fldiag import config
from fldiag.config import Config, build, load, parse_override, presets
from fldiag.data import load as load_data
from fldiag.errors import FldiagError


def refused(tree, overrides=None):
    with pytest.raises(FldiagError) as caught:
        build(tree, overrides)
    assert caught.value.usage
    return str(caught.value)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"round": 3}, ["'round'", "did you mean 'rounds'?"]),
        (
            {"train": {"batchsize": 3}},
            ["'train.batchsize'", "did you mean 'train.batch_size'?", "fldiag explain settings"],
        ),
        ({"clients": {"per_rounds": 3}}, ["did you mean 'clients.per_round'?"]),
        ({"method": {"name": "fedprx"}}, ["unknown method 'fedprx'", "did you mean 'fedprox'?"]),
        (
            {"method": {"name": "fedprox", "muu": 1}},
            ["method 'fedprox'", "'muu'", "did you mean 'mu'?"],
        ),
        ({"method": {"name": "fedavg", "mu": 1}}, ["method 'fedavg'", "unknown key 'mu'"]),
        ({"model": {"name": "mpl"}}, ["unknown model 'mpl'", "did you mean 'mlp'?"]),
        ({"model": {"name": "mlp", "hiden": [3]}}, ["did you mean 'hidden'?"]),
        ({"rounds": 0}, ["rounds = 0", "greater than or equal to 1"]),
        ({"rounds": 2.5}, ["rounds = 2.5"]),
        ({"seed": -1}, ["seed = -1"]),
        ({"seed": 2**63}, ["seed = 9223372036854775808", "less than"]),
        ({"name": "../x"}, ["name"]),
        ({"train": {"lr": 0}}, ["train.lr = 0", "greater than 0"]),
        ({"train": {"lr": float("nan")}}, ["train.lr"]),
        ({"train": {"lr": float("inf")}}, ["train.lr"]),
        ({"train": {"momentum": 1.0}}, ["train.momentum", "less than 1"]),
        ({"train": {"weight_decay": -1}}, ["train.weight_decay = -1"]),
        ({"train": {"epochs": -1}}, ["train.epochs"]),
        ({"train": {"batch_size": 0}}, ["train.batch_size"]),
        ({"train": {"precision": "fp16"}}, ["train.precision", "'fp32', 'bf16' or 'fp64'"]),
        ({"train": {"nesterov": True, "momentum": 0}}, ["nesterov needs momentum"]),
        ({"clients": {"total": 3, "per_round": 5}}, ["per_round = 5 is more than total = 3"]),
        ({"partition": {"kind": "lda", "shards": 2}}, ["shards has no meaning for kind = 'lda'"]),
        ({"partition": {"path": "a.json"}}, ["or set partition.kind = 'file'"]),
        ({"partition": {"kind": "dirichlets"}}, ["partition.kind"]),
        ({"method": {"name": "fedprox", "mu": -1}}, ["method 'fedprox'", "mu = -1"]),
        ({"method": {"name": "fedprox", "mu": "a"}}, ["mu = 'a'"]),
        (
            {"method": {"name": "fedsol", "part": "tail"}},
            ["part = 'tail'", "'full', 'body' or 'head'"],
        ),
        ({"model": {"name": "mlp", "hidden": [0]}}, ["hidden"]),
        ({"checkpoint": {"every": 0}}, ["checkpoint.every"]),
        ({"checkpoint": {"clients": "some"}}, ["checkpoint.clients"]),
        ({"train": 3}, ["train = 3"]),
        ({"method": "fedprox"}, ["method = 'fedprox'"]),
    ],
)
def test_unknown_names_suggest_the_nearest_and_values_out_of_range_are_named(tree, words):
    message = refused(tree)
    assert all(word in message for word in words), message


def test_an_unknown_data_set_suggests_the_nearest():
    with pytest.raises(FldiagError, match=r"or npz:PATH"):
        load_data("data.npz")
    with pytest.raises(FldiagError, match=r"unknown data set 'digit', .*; did you mean 'digits'\?"):
        load_data("digit")


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(FldiagError, match=r"unknown preset 'digit'; did you mean 'digits'\?"):
        load("digit")
    with pytest.raises(FldiagError, match=r"config file 'mine\.toml' is not there"):
        load("mine.toml")


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("method.rho=2.0", ("method.rho", 2.0)),
        ("rounds=3", ("rounds", 3)),
        ("train.nesterov = true", ("train.nesterov", True)),
        ("method.name=fedprox", ("method.name", "fedprox")),
        ('data.root="/a b"', ("data.root", "/a b")),
        ("model.hidden=[3, 4]", ("model.hidden", [3, 4])),
        ("data.name=npz:a=b.npz", ("data.name", "npz:a=b.npz")),
        ("train.lr=1e-3", ("train.lr", 1e-3)),
    ],
)
def test_overrides_are_read_as_toml_else_as_text(text, pair):
    assert parse_override(text) == pair


@pytest.mark.parametrize("text", ["rounds", "=3", ""])
def test_overrides_without_a_value(text):
    with pytest.raises(FldiagError, match="is not of the form key=value") as caught:
        parse_override(text)
    assert caught.value.usage


def test_overrides_win_and_a_new_name_drops_the_old_options():
    base = {
        "method": {"name": "fedprox", "mu": 3.0},
        "partition": {"kind": "sharding", "shards": 4, "seed": 7},
    }
    assert build(base, {"method.mu": 5.0}).method.options == {"mu": 5.0}
    changed = build(base, {"method.name": "scaffold", "partition.kind": "lda"})
    assert changed.method.options == {"server_lr": 1.0}
    assert changed.partition.options == {"alpha": 0.1, "min_size": 10}
    assert changed.partition.seed == 7
    assert "nested too deeply" in refused(base, {"a.b.c": 1})
    assert "is not a section" in refused({"rounds": 3}, {"rounds.x": 1})
    assert "did you mean 'train.lr'?" in refused({}, {"train.lrr": 1})


def test_every_default_is_filled_in():
    tree = build({"method": {"name": "fedsol"}}).model_dump(mode="json")
    assert tree["method"] == {
        "name": "fedsol",
        "rho": 1.5,
        "loss": "kl",
        "tau": 3.0,
        "tau_moon": 0.5,
        "part": "auto",
        "strength": "adaptive",
        "lambda_norm": "layer",
        "gp_floor": None,
        "official_eps": False,
    }
    assert tree["partition"]["alpha"] == 0.1
    assert tree["train"]["momentum"] == 0.9


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"method": {"name": "fedsol", "rho": 0.3}, "model": {"name": "mlp", "hidden": [3]}},
        {"checkpoint": {"clients": [1, 2]}, "partition": {"kind": "iid"}},
    ],
)
def test_a_config_survives_json(tree):
    import json

    made = build(tree)
    again = Config.model_validate(json.loads(json.dumps(made.model_dump(mode="json"))))
    assert again == made
    assert again.hash == made.hash


def test_a_config_survives_toml(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\nrounds = 7\n[method]\nname = "fedprox"\nmu = 0.25\n[model]\nname = "mlp"\nhidden = [4]\n'
    )
    made = load(file)
    assert (made.name, made.rounds, made.method.options) == ("mine", 7, {"mu": 0.25})
    assert made.model.options.items() >= {"hidden": (4,), "bias": True}.items()
    assert load(str(file), ["rounds=9", "method.name=fedavg"]).rounds == 9
    assert made == build(
        {
            "name": "mine",
            "rounds": 7,
            "method": {"name": "fedprox", "mu": 0.25},
            "model": {"name": "mlp", "hidden": [4]},
        }
    )
    file.write_text("rounds = = 3\n")
    with pytest.raises(FldiagError, match="not valid TOML"):
        load(file)


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_valid_and_described(name):
    assert presets()[name]
    assert load(name) == load(f"presets/{name}") == load(f"{name}.toml")


def test_the_hash_is_of_what_decides_the_bits():
    made = build({})
    assert len(made.hash) == 16
    assert made.hash == build({"name": "other", "data": {"root": "/somewhere"}}).hash
    assert (
        made.hash == build({"train": {"lr": 0.01}, "rounds": 30}).hash
    )  # said or left to the default
    others = [
        build(t).hash
        for t in (
            {"seed": 1},
            {"rounds": 31},
            {"train": {"lr": 0.02}},
            {"method": {"name": "fedprox"}},
            {"partition": {"seed": 1}},
            {"train": {"stack": "off"}},
            {"data": {"name": "iris"}},
        )
    ]
    assert len({made.hash, *others}) == 8


def test_a_config_cannot_be_changed_in_place():
    made = small()
    with pytest.raises(Exception, match="frozen"):
        made.rounds = 3
    with pytest.raises(Exception, match="frozen"):
        made.train.lr = 3.0
    assert made.replace(train__lr=0.5).train.lr == 0.5
    assert made.train.lr == 0.1


def test_options_of_users_models_are_their_own_business():
    made = build({"model": {"name": "pkg.mod:factory", "whatever": 3}})
    assert made.model.options == {"whatever": 3}


def test_the_config_module_needs_no_torch():
    """The command line answers --help quickly because configs do not load it."""
    import subprocess
    import sys

    code = "import sys, fldiag.config; print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )
    assert config.Config.__doc__
