"""The public names: what the command line can do, Python can do, with the same names; each is itself whatever was imported."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import fldiag

PUBLIC = [
    "Checkpoint",
    "Config",
    "FldiagError",
    "History",
    "Method",
    "Part",
    "Problem",
    "Recorder",
    "Run",
    "catalogue",
    "check",
    "convert",
    "diagnose",
    "diff",
    "draw",
    "load",
    "sweep",
    "train",
]


def test_the_names_are_those_of_the_contract():
    assert sorted(fldiag.__all__) == PUBLIC and dir(fldiag) == PUBLIC


@pytest.mark.slow
def test_no_public_name_is_a_module_whatever_was_imported():
    """In a process of its own: a submodule replaces an attribute of the package when it is first imported."""
    script = """
import importlib, pkgutil, types, fldiag
for module in pkgutil.walk_packages(fldiag.__path__, "fldiag."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in fldiag.__all__:
    assert not isinstance(getattr(fldiag, name), types.ModuleType), name
    assert callable(getattr(fldiag, name)), name
assert fldiag.catalogue("methods") and fldiag.Config.load("digits").rounds == 20
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]
    assert not {m.name for m in pkgutil.iter_modules(fldiag.__path__)} & set(PUBLIC)


@pytest.mark.parametrize("name", ["train", "convert", "load", "draw", "catalogue"])
def test_signatures_say_their_options(name):
    parameters = inspect.signature(getattr(fldiag, name)).parameters.values()
    assert not [p.name for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


@pytest.mark.parametrize(
    "module",
    [
        "api",
        "runs.run",
        "config",
        "errors",
        "execution",
        "method",
        "problem.problem",
        "training.train",
        "training.sweep",
        "integrations.importer",
    ],
)
def test_examples_of_classes_run(module):
    failed, tried = doctest.testmod(importlib.import_module(f"fldiag.{module}"))
    assert tried and not failed


PROBLEM = (torch.nn.Linear(2, 3), F.cross_entropy, (torch.eye(2), torch.tensor([0, 2])))


def test_a_picture_of_a_table():
    table = fldiag.diagnose(fldiag.Problem(*PROBLEM), "spectrum", k=2)
    assert type(fldiag.draw(table)).__name__ == "Figure"
    plain = type(table)(table.to_dict("list"))
    with pytest.raises(fldiag.FldiagError, match="does not say which diagnostic"):
        fldiag.draw(plain)
    assert fldiag.draw(plain, name="spectrum") is not None


@pytest.mark.parametrize(
    "ask, says",
    [
        (lambda: fldiag.diagnose([], "spectrum"), "give a run, a checkpoint"),
        (lambda: fldiag.diagnose(None, "spectrum"), "NoneType"),
        (
            lambda: fldiag.diagnose(PROBLEM[0], "spectrum"),
            r"fldiag\.Problem\(net, loss, \(x, y\)\)",
        ),
        (lambda: fldiag.diagnose([fldiag.Problem(*PROBLEM), 3], "spectrum"), "int cannot be"),
        (lambda: fldiag.diagnose(fldiag.Problem(*PROBLEM), 5), "unknown diagnostic 5"),
        (lambda: fldiag.train("digits"), r"Config\.load\('digits'\)"),
        (lambda: fldiag.load(123), "run folder or a checkpoint"),
        (lambda: fldiag.draw("x"), "does not say which diagnostic"),
        (lambda: fldiag.catalogue(5), "unknown kind 5"),
    ],
)
def test_what_is_of_the_wrong_kind_is_one_error_with_a_remedy(ask, says):
    with pytest.raises(fldiag.FldiagError, match=says) as caught:
        ask()
    assert caught.value.usage and caught.value.remedy


def test_a_type_checker_sees_the_public_names():
    """The imports for type checkers are those that ``fldiag.NAME`` makes."""
    tree = ast.parse(Path(fldiag.__file__).read_text())
    (block,) = [
        n for n in tree.body if isinstance(n, ast.If) and n.body[0].__class__ is ast.ImportFrom
    ]
    visible = {alias.name: node.module for node in block.body for alias in node.names}
    assert sorted(visible) == sorted(fldiag.__all__)
    for name, module in visible.items():
        assert getattr(importlib.import_module(module), name) is getattr(fldiag, name)
