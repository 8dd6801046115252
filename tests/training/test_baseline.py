"""What every preset and method resolves to, and who gets which examples, is what it was at commit 35863d3.

``python tests/training/test_baseline.py`` writes both fixtures; it was run with that commit's code.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import fldiag
from fldiag import registry
from fldiag.data import partition

FIXTURES = Path(__file__).parents[1] / "fixtures"
#: Keys that went since, or whose default changed; CHANGELOG.md names them.
GONE = {"checkpoint.keep", "partition.digest", "train.initial_digest"}
CLASSES = {"cifar100": 100, "pathmnist": 9, "tissuemnist": 8, "imagenet200": 200}
CLASSES |= {"sst2": 2, "mnli": 3, "marc": 5}


def resolved(preset, **options):
    """The settings by dotted key."""
    sections = fldiag.Config.load(preset, **options).model_dump(mode="json")
    return {
        f"{section}.{key}" if key else section: value
        for section, values in sections.items()
        for key, value in (values.items() if isinstance(values, dict) else {"": values}.items())
    }


def beyond_digits(settings):
    """The settings in which a config differs from the preset digits."""
    plain = resolved("digits")
    return {key: value for key, value in settings.items() if plain.get(key) != value}


def configs():
    presets = {
        f"preset {name}": beyond_digits(resolved(name)) for name in fldiag.catalogue("presets")
    }
    methods = {
        f"method {name}": beyond_digits(resolved("digits", method__name=name))
        for name in registry.method.names()
    }
    return {"digits": resolved("digits")} | presets | methods


def partition_digest(preset):
    """Of every client's examples, when 50,000 labels (1,500 of digits) stand in a fixed order."""
    config = fldiag.Config.load(preset)
    data, section = config.data.name, config.partition
    n, classes = 1500 if data == "digits" else 50_000, CLASSES.get(data, 10)
    labels = np.random.default_rng(0).permutation(np.arange(n) % classes)
    dealt = section.kind, labels, config.clients.total, section.seed
    parts = partition.make(*dealt, **section.options)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.asarray(part, np.int64).tobytes() + b"|")
    return digest.hexdigest()[:16]


def fixture(name):
    return json.loads((FIXTURES / name).read_text("utf-8"))


@pytest.mark.parametrize("name", fixture("configs.json"))
def test_a_config_resolves_as_before(name):
    kind, _, value = name.partition(" ")
    settings = {
        "digits": lambda: resolved("digits"),
        "preset": lambda: resolved(value),
        "method": lambda: resolved("digits", method__name=value),
    }[kind]()
    then = fixture("configs.json")["digits"] | fixture("configs.json")[name]
    shared = {key: value for key, value in then.items() if key not in GONE}
    assert {key: settings.get(key) for key in shared} == shared


def test_every_preset_and_method_is_in_the_fixture():
    names = {f"preset {name}" for name in fldiag.catalogue("presets")}
    names |= {f"method {name}" for name in registry.method.names()}
    assert names == set(fixture("configs.json")) - {"digits"}


@pytest.mark.parametrize("preset", fixture("partitions.json"))
def test_a_partition_is_as_before(preset):
    assert partition_digest(preset) == fixture("partitions.json")[preset]


if __name__ == "__main__":
    for name, content in (
        ("configs.json", configs()),
        ("partitions.json", {name: partition_digest(name) for name in fldiag.catalogue("presets")}),
    ):
        (FIXTURES / name).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
