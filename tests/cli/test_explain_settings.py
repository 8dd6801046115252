"""``fldiag explain`` says every key of a config, and what a wrong key may have meant."""

import json

import pytest
from commands import run

from fldiag import config, known

KEYS = [
    f"{name}.{key}" if hasattr(field.annotation, "model_fields") else name
    for name, field in config.Config.model_fields.items()
    for key in getattr(field.annotation, "model_fields", [""])
]


def test_every_key_has_a_meaning():
    settings = known.settings()
    assert list(settings) == KEYS
    assert all(
        item["summary"] and item["values"] and "{" not in item["summary"]
        for item in settings.values()
    )


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("settings", KEYS),
        ("partition", [key for key in KEYS if key.startswith("partition.")]),
        ("clients.sampling", ["clients.sampling"]),
        ("lr", ["train.lr"]),
        ("seed", ["seed", "partition.seed"]),
    ],
)
def test_a_section_or_a_key(name, keys):
    rows = json.loads(run("explain", name, "--json").stdout)["rows"]
    assert [row["key"] for row in rows] == keys


def test_a_papers_value_is_that_of_its_presets():
    lr = {config.load(name).train.lr for name in config.presets() if name.startswith("fedsol-")}
    assert known.settings()["train.lr"]["papers"]["FedSOL"] == ", ".join(map(str, sorted(lr)))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("explain", "clients.sampeling"), "clients.sampling"),
        (("explain", "partitions"), "partition"),
        (("train", "digits", "--set", "train.per_round=3"), "clients.per_round"),
        (("train", "digits", "--set", "epoch=3"), "train.epochs"),
        (("train", "digits", "--set", "train.epoch=3"), "train.epochs"),
    ],
)
def test_a_wrong_key_names_the_right_one(words, hint):
    assert f"did you mean '{hint}'" in run(*words, code=2).output
