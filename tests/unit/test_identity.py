"""What is the same run: hashes that outlive new keys and settings of checkpoints, versions of formulas, yesterday's runs."""

import json

import pytest
import torch
from helpers import config as small

from fldiag import identity, registry
from fldiag.config import Config, build, load
from fldiag.errors import FldiagError
from fldiag.results import files
from fldiag.runs.run import Run
from fldiag.training import train

#: As fldiag 0.1.0 hashed them: with the checkpoint section, and before train.local_decay and versions of methods.
DEFAULT, KEEPING, TOGA, PRESET = (
    "48948c58d1f31d52",
    "01255e0b0e044893",
    "42dbe7dec7a44d05",
    "aeb8ced6904b3e5e",
)
KEEP = {
    "checkpoint": {"every": 10, "clients": "sampled"},
    "metrics": {"steps": True, "every": 10, "proximal": "kl"},
}


def test_hashes_are_yesterdays():
    assert build({}).hash == DEFAULT
    assert load("fedsol-cifar10-lda0.1", ["method.lambda_norm=layer"]).hash == PRESET
    assert build({"method": {"name": "fedtoga"}}).fingerprint(version=1) == TOGA


def test_what_checkpoints_hold_is_no_part_of_a_run():
    kept = build(KEEP)
    assert kept.hash == build({"metrics": KEEP["metrics"]}).hash != DEFAULT
    assert kept.fingerprint(checkpoint=True) == KEEPING
    assert build({"checkpoint": {"every": 7, "clients": [1]}}).hash == DEFAULT


def test_a_later_key_counts_when_it_is_not_what_runs_had_before():
    assert build({"train": {"local_decay": 1.0}}).hash == DEFAULT
    decayed = build({"train": {"local_decay": 0.1}}).hash
    assert (
        len(
            {
                DEFAULT,
                decayed,
                build({"train": {"local_decay": 0.1, "local_decay_after": 0.7}}).hash,
            }
        )
        == 3
    )


def test_every_later_key_is_a_key_of_the_config():
    for dotted in identity.ADDED_KEYS:
        section, *name, key = dotted.split(".")
        known = (
            Config.model_fields[section].annotation.model_fields
            if not name
            else (
                {"method": registry.method, "model": registry.model}[section]
                .get(name[0])
                .options.model_fields
            )
        )
        assert key in known, dotted


def test_later_options_belong_to_their_method(monkeypatch):
    monkeypatch.setitem(identity.ADDED_KEYS, "method.fedprox.mu", 1.0)
    assert identity.as_stored({"method": {"name": "fedprox"}})["method"] == {
        "name": "fedprox",
        "mu": 1.0,
    }
    assert identity.as_stored({"method": {"name": "fedavg"}})["method"] == {"name": "fedavg"}
    prox = build({"method": {"name": "fedprox", "mu": 1.0}}).model_dump(mode="json")
    without = {**prox, "method": {"name": "fedprox"}}
    assert identity.fingerprint(prox) == identity.fingerprint(without)
    assert identity.fingerprint(
        {**prox, "method": {"name": "fedprox", "mu": 2.0}}
    ) != identity.fingerprint(without)


def test_a_stored_config_means_what_it_meant(monkeypatch):
    """A default that changes later (here: of local_decay) is not the default of runs that were stored before."""
    monkeypatch.setitem(identity.ADDED_KEYS, "train.local_decay", 0.3)
    tree = build({}).model_dump(mode="json")
    del tree["train"]["local_decay"]
    assert Config.from_stored(tree).train.local_decay == 0.3
    assert "local_decay" not in tree["train"], "what was stored is left alone"
    assert build(tree).train.local_decay == 1.0, "a user's own file gets the default of today"
    assert identity.as_stored({"train": {}, "data": {}}) == {"train": {}, "data": {}}


def forget(config):
    """A stored config without later keys, as far as its method and model have them."""
    for dotted in identity.ADDED_KEYS:
        section, *name, key = dotted.split(".")
        if not name or name == [config[section]["name"]]:
            config[section].pop(key)


@pytest.mark.parametrize(
    "name, before",
    [
        ("npz:own.npz", "standard"),
        ("a-file-under-the-folder", "standard"),
        ("digits", None),
        ("pkg.mod:factory", None),
    ],
)
def test_a_stored_run_saw_its_inputs_as_they_were_normalised_then(name, before):
    config = build({"data": {"name": name}})
    tree = config.model_dump(mode="json")
    del tree["data"]["normalise"]
    assert Config.from_stored(tree).data.normalise == before
    assert (Config.from_stored(tree).hash == config.hash) == (before is None)


def chosen(method="scaffold", **more):
    return small(
        method, rounds=4, per_round=2, checkpoint={"every": 2, "clients": "sampled"}, **more
    )


def stopped(config, out, after=2):
    def stop(event):
        if event.get("round") == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.train(config, out=out, on_event=stop)


def weights(run):
    return torch.cat([t.flatten() for t in run.checkpoint().state.values()])


def test_a_resumed_run_may_keep_other_things_from_then_on(tmp_path):
    stopped(chosen(), tmp_path / "run")
    more = chosen().replace(checkpoint__every=1, checkpoint__clients="none")
    run = train.train(more, out=tmp_path / "run", resume=True)
    assert run.rounds == [2, 3, 4]
    assert run.checkpoint(2).clients is not None and run.checkpoint(4).clients is None
    assert run.config.checkpoint == more.checkpoint and run.hash == more.hash
    whole = train.train(chosen(), out=tmp_path / "whole")
    assert torch.equal(weights(run), weights(whole))
    assert train.train(chosen(), out=tmp_path / "run", resume=True).status == "finished"


def test_rounds_are_not_missed_where_another_spacing_was_wanted(tmp_path):
    from fldiag.runs.history import History

    start = chosen().replace(checkpoint__every=1)
    stopped(start, tmp_path / "run")
    run = train.train(chosen(), out=tmp_path / "run", resume=True)
    history = History.of(run)
    assert run.rounds == [1, 2, 4] and len(list(history.each())) == 3 and not history.notes


def test_a_version_of_the_formulas_enters_the_hash_when_it_is_not_the_first():
    toga = build({"method": {"name": "fedtoga"}})
    assert toga.method_version == 2 and build({}).method_version == 1
    assert toga.hash == toga.fingerprint(version=2) != toga.fingerprint(version=1)
    assert build({}).fingerprint(version=1) == DEFAULT != build({}).fingerprint(version=2)


def test_a_run_says_its_version_and_another_version_does_not_go_on_with_it(tmp_path):
    config = chosen("fedtoga")
    stopped(config, tmp_path / "run")
    assert Run.open(tmp_path / "run").method_version == 2
    assert Run.open(tmp_path / "run").checkpoint().manifest["provenance"]["method_version"] == 2
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    del about["digest"]
    about["provenance"]["method_version"] = 1
    (tmp_path / "run" / "run.json").write_text(json.dumps(files.with_digest(about)))
    run = Run.open(tmp_path / "run")
    assert (
        run.method_version == 1
        and run.config == config
        and len(run.metrics)
        and run.checkpoint().round == 2
    )
    with pytest.raises(FldiagError, match="method's version: 1 there") as caught:
        train.train(config, out=tmp_path / "run", resume=True)
    assert caught.value.usage and "--out" in caught.value.remedy
    assert Run.open(tmp_path / "run").about == run.about, "it was only looked at"
