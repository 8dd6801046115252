"""Names: of what is registered, of other packages and of a user's code."""

import copy
import importlib.metadata
import pickle
import pkgutil
import sys
import types

import pytest

import fldiag
from fldiag import registry
from fldiag.errors import FldiagError
from fldiag.registry import allow, load_user


@pytest.mark.parametrize("kind", registry.KINDS)
def test_names_read_from_the_sources_are_those_registered(kind):
    entries, package = getattr(registry, kind[:-1]), f"fldiag.{registry.KINDS[kind]}"
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        importlib.import_module(module.name)
    own = [n for n, e in entries.entries.items() if e.build.__module__.startswith("fldiag.")]
    listed = registry.built_in(kind)
    assert sorted(listed) == sorted(n for n in own if ":" not in n)
    assert {n: listed[n].summary for n in own} == {n: entries.get(n).headline for n in own}
    if kind == "diagnostics":
        assert {n: listed[n].on for n in own} == {n: entries.get(n).on for n in own}


def test_a_file_is_found_by_its_name_and_names_the_nearest():
    assert "fedprox" in registry.method and "fedprx" not in registry.method
    with pytest.raises(FldiagError, match="did you mean 'fedprox'"):
        registry.method.get("fedprx")


def test_options_are_those_of_the_signature():
    entry = registry.method.get("fedprox")
    assert entry.validate({}) == {"mu": 1.0} and "Local SGD" in registry.method.get("fedavg").doc
    for wrong, word in (({"muu": 1}, "did you mean 'mu'"), ({"mu": -1}, "mu = -1")):
        with pytest.raises(FldiagError, match=word):
            entry.validate(wrong)


def test_other_packages_bring_entries_and_a_broken_one_is_one_error(monkeypatch):
    module = types.ModuleType("bumpy")
    module.build = lambda problem: registry.table([{"metric": "bumps", "value": 3.0}])
    module.build.__module__, module.build.__doc__ = "bumpy", "How many bumps."
    monkeypatch.setitem(sys.modules, "bumpy", module)
    monkeypatch.setattr(registry.diagnostic, "entries", dict(registry.diagnostic.entries))
    points = [
        importlib.metadata.EntryPoint("bumps", "bumpy:build", "fldiag.diagnostics"),
        importlib.metadata.EntryPoint("broken", "nowhere_to_be_found:build", "fldiag.diagnostics"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    assert {"bumps", "broken"} <= set(registry.diagnostic.names())
    assert "broken" in fldiag.catalogue("diagnostics")
    registry.diagnostic("bumps")(module.build)
    assert registry.diagnostic.get("bumps").headline == "How many bumps."
    with pytest.raises(FldiagError, match=r"'broken' of the package .* cannot be used"):
        registry.diagnostic.get("broken")
    assert registry.diagnostic.get("spectrum").name == "spectrum"


def test_user_code_is_imported_only_with_consent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(registry, "ALLOWED", set())
    (tmp_path / "mymod.py").write_text("open('HIT', 'w').close()\ndef build(): return 7\n")
    with pytest.raises(FldiagError, match="--allow-code mymod:build"):
        load_user("mymod:build", "model")
    allow("mymod:other", ["digits", "npz:mymod:build"], 3, None)
    with pytest.raises(FldiagError, match="does not import it because a file says so"):
        load_user("mymod:build", "model")
    assert {"mymod:other"} == registry.ALLOWED
    assert not (tmp_path / "HIT").exists() and str(tmp_path) not in sys.path
    allow({"model": {"name": "mymod:build"}})
    assert load_user("mymod:build", "model")() == 7
    for name, word in (
        ("mymod:biuld", "did you mean 'build'"),
        ("nowhere_at_all:x", "cannot import nowhere_at_all"),
    ):
        allow([name])
        with pytest.raises(FldiagError, match=word):
            load_user(name, "model")


def test_a_stored_config_gives_no_consent_and_a_config_of_the_user_does(tmp_path, monkeypatch):
    (tmp_path / "own.toml").write_text('method.name = "mine:pull"')
    started = fldiag.Config.load("digits").model_dump()
    for named, say in (
        ({"mine:net"}, lambda: fldiag.Config.load("digits", model__name="mine:net")),
        ({"mine:net"}, lambda: fldiag.Config(**started | {"model": {"name": "mine:net"}})),
        ({"mine:net"}, lambda: fldiag.Config().replace(model__name="mine:net")),
        ({"mine:pull"}, lambda: fldiag.Config.load(tmp_path / "own.toml")),
    ):
        monkeypatch.setattr(registry, "ALLOWED", set())
        own = say()
        assert named == registry.ALLOWED
        registry.ALLOWED.clear()
        stored = fldiag.Config.model_validate(own.model_dump())
        copy.deepcopy(pickle.loads(pickle.dumps(stored))).replace(rounds=3)
        assert not registry.ALLOWED
