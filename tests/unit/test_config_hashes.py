"""The hash of a config names its runs: what was hashed on 22 November 2026 has the same hash today.

``tests/fixtures/config_hashes.json`` holds the hashes of every preset, of every method and of some other settings as the code
of that day gave them. A key that is new has to leave them as they are at its default. Two changes are meant to come:

- ``checkpoint.*`` will not be part of a run's identity. All configs here have the default ``[checkpoint]`` section (that is
  tested too), so their hashes stay when the default section is hashed whatever a config says. A run whose section is another
  carries a hash that is no longer that of its config: what it was trained with is then to be compared otherwise
  (``test_yesterday.py`` resumes such a run).
- A method whose formula changes gets a version, which enters the hash when it is not the first, and only where the change
  changes the training. Only then, its line here is written anew, in the same commit.
- Files of one's own were standardised on that day and had no say in it: that is ``data.normalise = "standard"`` now.
"""

import json
from pathlib import Path

import pytest

from fldiag import registry
from fldiag.config import load, presets
from fldiag.sections import CheckpointSection

#: Presets that have changed since, as they were.
FIXTURES = Path(__file__).parents[1] / "fixtures"
FORMER = {
    name: FIXTURES / f"{name}.toml"
    for name in ("digits", "fedsol-mnist-lda0.1", "fedsol-mnist-shard2")
}
HASHES = json.loads((FIXTURES / "config_hashes.json").read_text())


def config(entry):
    former = load(FORMER.get(entry["preset"], entry["preset"]), entry["overrides"])
    if entry["preset"].startswith("fedsol-") and former.method.name == "fedsol":
        return former.replace(method__lambda_norm="layer")  # the presets did not say which
    return former


@pytest.mark.parametrize("entry", HASHES, ids=lambda e: " ".join([e["preset"], *e["overrides"]]))
def test_a_hash_is_what_it_was(entry):
    assert config(entry).hash == entry["hash"]


@pytest.mark.parametrize("entry", HASHES, ids=lambda e: " ".join([e["preset"], *e["overrides"]]))
def test_all_have_the_default_checkpoint_section(entry):
    """So that they need not change when that section leaves the hash."""
    assert config(entry).checkpoint == CheckpointSection()


def test_every_preset_and_every_method_is_there():
    of_presets = {e["preset"] for e in HASHES if not e["overrides"]}
    of_methods = {
        e["overrides"][0].removeprefix("method.name=")
        for e in HASHES
        if e["overrides"] and e["overrides"][0].startswith("method.name=")
    }
    assert of_presets <= set(presets()) and of_methods <= set(registry.method.names())
    assert len(of_presets) == 46 and len(of_methods) == 40


def test_different_configs_have_different_hashes():
    assert (
        len({e["hash"] for e in HASHES}) >= len(HASHES) - 1
    )  # method.name=fedavg is what the preset digits says
