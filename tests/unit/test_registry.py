"""The registry: schemas from signatures, and entries from a user's own installed package."""

import doctest
import os
import re
import subprocess
import sys
import textwrap
import typing
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from fldiag import known, registry
from fldiag.errors import FldiagError, nearest

ROOT = Path(__file__).parents[2]


def entry(build, given=()):
    return registry.Entry("thing", "it", build, given)


def sample(
    problem, k: Annotated[int, Field(ge=1)] = 5, mode: Literal["a", "b"] = "a", *, scale: float
):
    """Says what it does.

    More of it.
    """


def test_a_signature_is_a_schema():
    it = entry(sample, ("problem",))
    assert it.headline == "Says what it does."
    assert list(it.options.model_fields) == ["k", "mode", "scale"]
    assert it.validate({"scale": 2}) == {"k": 5, "mode": "a", "scale": 2.0}
    for wrong, message in (
        ({}, "scale"),
        ({"scale": 1, "k": 0}, "k = 0"),
        ({"scale": 1, "mode": "c"}, "mode = 'c'"),
        ({"scale": 1, "problem": 1}, "unknown key 'problem'"),
        ({"scale": 1, "kk": 1}, "did you mean 'k'?"),
    ):
        with pytest.raises(FldiagError) as caught:
            it.validate(wrong)
        assert message in str(caught.value)
        assert caught.value.usage


@pytest.mark.parametrize("kind", ["diagnostic", "method", "model", "dataset"])
def test_what_a_description_offers_can_be_chosen(kind):
    """Choices named as "a, b or c" at the end of an option's description."""
    entries = getattr(registry, kind)
    for name in entries.names():
        for option, about in entries.get(name).options.model_fields.items():
            offered = re.search(
                r"(?:^|[ :])((?:\w+, )*\w+,? or \w+)\.$",
                re.sub(r" \([^)]*\)", "", about.description or ""),
            )
            if typing.get_origin(about.annotation) is Literal and offered:
                assert set(re.split(r",? or |, ", offered[1])) <= set(
                    typing.get_args(about.annotation)
                ), f"{name}: {option}"


def test_two_functions_cannot_have_one_name():
    mine = registry.Registry("thing", "fldiag.presets", entry=registry.Entry)

    def build():
        """A thing."""

    def other():
        """Another."""

    other.__module__ = "elsewhere"
    mine("x")(build)
    mine("x")(build)  # the same module read twice is the same entry
    with pytest.raises(FldiagError, match="thing 'x' is registered twice"):
        mine("x")(other)


def test_names_are_sorted_and_described():
    names = registry.method.names()
    assert names == sorted(names)
    assert "fedavg" in registry.method
    assert "nothing" not in registry.method
    assert all(registry.method.get(name).headline for name in names)


def test_a_diagnostic_names_its_subject_as_it_likes():
    def roughness(anything, told=None, *, power: int = 2):
        """How rough."""

    assert list(registry.Diagnostic("diagnostic", "it", roughness).options.model_fields) == [
        "power"
    ]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Installs made-up packages that bring diagnostics: name -> source. Returns a fresh registry of one built-in, ``plain``."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "__init__.py").touch()
    fresh = registry.Registry("diagnostic", "house", entry=registry.Diagnostic)
    monkeypatch.setattr(registry, "diagnostic", fresh)
    header = "from fldiag.registry import diagnostic\n"
    (tmp_path / "house" / "plain.py").write_text(
        header + "@diagnostic('plain')\ndef plain(problem):\n    'Built in.'\n"
    )

    def install(**sources):
        for name, source in sources.items():
            info = tmp_path / f"{name}_package-1.0.dist-info"
            info.mkdir()
            (tmp_path / f"module_of_{name}.py").write_text(header + source)
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1.0\n"
            )
            (info / "entry_points.txt").write_text(
                f"[fldiag.diagnostics]\n{name} = module_of_{name}\n"
            )
        return fresh

    yield install
    for name in [n for n in sys.modules if n.startswith(("module_of_", "house"))]:
        del sys.modules[name]


GOOD = "@diagnostic('good')\ndef good(problem):\n    'Good.'\n"


def test_a_package_that_cannot_be_imported_stops_only_itself(packages):
    found = packages(
        good=GOOD,
        bad="@diagnostic('half')\ndef half(problem):\n    ''\nimport nothing_of_that_name\n",
    )
    for _ in range(2):
        assert found.get("plain").headline == "Built in." and found.get("good").headline == "Good."
        with pytest.raises(
            FldiagError,
            match=r"'bad' of the package bad-package cannot be used .*nothing_of_that_name",
        ):
            found.get("bad")
    with pytest.warns(UserWarning, match="bad-package") as told:
        assert found.names() == ["good", "plain"] and "bad" not in found and "good" in found
    assert {str(w.message) for w in told} == {str(told[0].message)}


def test_only_the_package_that_is_asked_about_is_imported(packages):
    found = packages(good=GOOD, other="@diagnostic('other')\ndef other(problem):\n    ''\n")
    found.get("good")
    assert "module_of_other" not in sys.modules
    with pytest.raises(FldiagError, match="did you mean 'other'"):
        found.get("othr")
    assert found.names() == ["good", "other", "plain"]


def test_a_package_cannot_take_the_name_of_another_diagnostic(packages):
    found = packages(
        plain="@diagnostic('plain')\ndef plain(problem):\n    'Mine.'\n", misnamed=GOOD
    )
    assert found.get("plain").headline == "Built in."
    with pytest.warns(UserWarning, match=r"plain-package.*is registered twice"):
        assert found.names() == ["plain"]
    with pytest.raises(FldiagError, match="registers no diagnostic of that name"):
        found.get("misnamed")


def test_the_nearest_name():
    assert nearest("fedsole", ["fedsol", "fedavg"]).startswith("did you mean 'fedsol'?")
    assert nearest("zzz", ["fedsol", "fedavg"]) == "known: fedavg, fedsol"


MODULE = '''
import torch
from fldiag.method import Method, Part, method
from fldiag import registry

class Halve(Part):
    def __init__(self, by): self.by = by
    def correct(self, step, g): return g * self.by
    def client_init(self, w0): return {"rounds_seen": torch.zeros(1)}
    def finish(self, local):
        local.state["rounds_seen"] = local.state["rounds_seen"] + 1
        return {}

@method("mine", source="my own paper, Eq. 1", neutral={"by": 1.0}, equals="fedavg")
def mine(by: float = 0.5) -> Method:
    """Smaller steps.

    Server: as FedAvg.
    Cost: 1 P a step.
    """
    return Method(Halve(by))

@registry.model("my_net")
def my_net(shape, classes):
    """A net of mine."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[0], classes))
'''
USE = """
import sys, torch
from fldiag import config, registry
from fldiag.training import train
assert "mine" in registry.method.names() and "my_net" in registry.model.names()
tree = {"rounds": 2, "data": {"name": "iris"}, "partition": {"kind": "iid"}, "clients": {"total": 3, "per_round": 2},
        "model": {"name": "my_net"}, "train": {"epochs": 1, "batch_size": 10, "momentum": 0.0, "weight_decay": 0.0, "lr": 0.1}}
def end(lr=0.1, **method):
    chosen = config.build({**tree, "method": method, "train": {**tree["train"], "lr": lr}})
    run = train.train(chosen, out=f"{sys.argv[1]}/{method['name']}-{lr}-{method.get('by')}")
    assert run.status == "finished"
    return torch.cat([v.flatten() for v in run.checkpoint().state.values()])
assert torch.equal(end(name="mine", by=1.0), end(name="fedavg"))
torch.testing.assert_close(end(name="mine"), end(name="fedavg", lr=0.05))
try:
    config.build({**tree, "method": {"name": "mine", "bye": 1}})
except Exception as error:
    print(error)
"""


@pytest.mark.slow
def test_a_method_and_a_model_of_an_installed_package(tmp_path):
    package = tmp_path / "site"
    info = package / "mypackage-1.0.dist-info"
    info.mkdir(parents=True)
    (package / "mymethods.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        textwrap.dedent("""
        [fldiag.methods]
        mine = mymethods:mine
        [fldiag.models]
        my_net = mymethods:my_net
        """)
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(package)]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "method 'mine': unknown key 'bye'; did you mean 'by'?" in done.stdout


def test_the_example_in_the_docstring():
    assert doctest.testmod(registry).failed == 0


def test_an_unknown_name_that_is_a_file_here_says_how_own_code_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FldiagError, match="did you mean 'strategy'"):
        registry.method.get("steady")
    (tmp_path / "steady.py").touch()
    for name in ("steady", "steady.py"):
        with pytest.raises(FldiagError, match="your own: steady:FUNCTION; fldiag list methods"):
            registry.method.get(name)
    with pytest.raises(FldiagError, match="your own: fldiag diagnose stride:FUNCTION"):
        registry.diagnostic.get("stride:stride")


def test_lists_say_of_diagnostics_which_sources_were_read_in_part():
    listed = known.names("diagnostics")
    for entry in registry.diagnostics():
        if entry.build.__module__.startswith("fldiag."):
            text = f"{entry.doc} {sys.modules[entry.build.__module__].__doc__}"
            read = entry.meta.get("read", "")
            assert read or not re.search("abstract|excerpts|as quoted by", text), entry.name
            assert listed[entry.name].endswith(f"[of its sources read: {read}]") == bool(read)
