"""The public names: what the command line can do, Python can do, with the same names; each is itself whatever was imported."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from torch.nn import functional as F

import fldiag
from fldiag import api, registry

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


@pytest.mark.parametrize("name", ["train", "convert", "load", "draw", "catalogue", "check", "diff"])
def test_signatures_say_their_options(name):
    parameters = inspect.signature(getattr(fldiag, name)).parameters.values()
    assert not [p.name for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


@pytest.mark.parametrize(
    "name",
    ["train", "convert", "load", "diagnose", "draw", "catalogue", "check", "diff"],
)
def test_docstrings_say_what_goes_in_and_out(name):
    text = inspect.getdoc(getattr(fldiag, name))
    assert all(part in text for part in ("Args:", "Raises:")) and "Returns:" in text


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_have_one_line_that_sums_up_and_name_every_parameter(name):
    public = getattr(fldiag, name)
    text = inspect.getdoc(public)
    summary, *rest = text.splitlines()
    assert summary.endswith(".") and not any(rest[:1])
    if name == "Config":  # its sections are those of a file
        return
    args = text.partition("Args:\n")[2].partition("\n\n")[0]
    heads = re.findall(r"^    (\S[^:\n]*):", args, re.MULTILINE)
    documented = {part.lstrip("*") for head in heads for part in head.split(", ")}
    parameters = set(inspect.signature(public).parameters)
    assert parameters <= documented or "__init__" not in vars(public)


@pytest.mark.parametrize("kind", ["method", "model", "dataset", "diagnostic"])
def test_what_is_registered_has_one_line_that_sums_up(kind):
    for entry in (getattr(registry, kind).get(n) for n in getattr(registry, kind).names()):
        summary, *rest = entry.doc.splitlines()
        assert summary.endswith(".") and not any(rest[:1]), entry.name


def of_the_class(cls):
    """Name -> function of the public methods and properties, also the inherited ones."""
    found = {}
    for base in reversed([b for b in cls.__mro__ if b.__module__.startswith("fldiag.")]):
        for name, member in vars(base).items():
            member = (
                getattr(member, "fget", None)
                or getattr(member, "func", None)
                or getattr(member, "__func__", member)
            )
            if not name.startswith("_") and inspect.isfunction(member):
                found[name] = member
    return found


@pytest.mark.parametrize(
    "name",
    [
        "Checkpoint",
        "Config",
        "FldiagError",
        "History",
        "Method",
        "Part",
        "Problem",
        "Recorder",
        "Run",
    ],
)
def test_docstrings_of_classes_and_their_methods(name):
    cls = getattr(fldiag, name)
    text = inspect.getdoc(cls)
    assert "Args:" in text or "__init__" not in vars(cls)
    assert "Raises:" in text or name in ("FldiagError", "Part")
    assert [n for n, member in of_the_class(cls).items() if not member.__doc__] == []


@pytest.mark.parametrize(
    "module",
    [
        "runs.run",
        "config",
        "errors",
        "execution",
        "method",
        "problem.problem",
        "training.train",
        "training.sweep",
        "integrations.convert",
    ],
)
def test_examples_of_classes_run(module):
    failed, tried = doctest.testmod(importlib.import_module(f"fldiag.{module}"))
    assert tried and not failed


def test_examples_run():
    assert doctest.testmod(api).failed == 0


def test_an_object_is_one_informative_line(tmp_path):
    net = torch.nn.Linear(2, 3)
    problem = fldiag.Problem(
        net, F.cross_entropy, (torch.eye(2), torch.tensor([0, 2])), name="mine"
    )
    config = fldiag.Config.load(
        "digits", rounds=1, clients__per_round=2, train__epochs=1, checkpoint__clients="sampled"
    )
    run = fldiag.train(config, out=tmp_path / "run")
    history = fldiag.History.of(run)
    lines = [
        repr(x)
        for x in (
            problem,
            run,
            run.checkpoint(),
            history,
            registry.method.get("fedavg").build(),
            config,
        )
    ]
    assert all("\n" not in line and len(line) < 200 for line in lines), lines
    assert (
        "9 parameters" in lines[0]
        and "mine" in lines[0]
        and "1 round)" in lines[1]
        and "fedavg" in lines[2]
    )
    assert "1 round" in lines[3] and "fedavg" in lines[5]


PROBLEM = (torch.nn.Linear(2, 3), F.cross_entropy, (torch.eye(2), torch.tensor([0, 2])))


def test_a_picture_in_axes_that_are_there():
    fig, (left, right) = plt.subplots(1, 2)
    table = fldiag.diagnose(fldiag.Problem(*PROBLEM), "spectrum", k=2)
    assert fldiag.draw(table, ax=right) is right and fig.axes == [left, right]
    assert (
        right.has_data()
        and right.get_legend() is not None
        and not left.has_data()
        and not fig.legends
    )
    plt.close(fig)


def test_axes_for_a_picture_of_several_are_refused(monkeypatch):
    table = fldiag.diagnose(fldiag.Problem(*PROBLEM), "landscape", directions="random")
    fig, ax = plt.subplots()
    with pytest.raises(fldiag.FldiagError, match="several axes"):
        fldiag.draw(table, ax=ax)

    class Line:  # what draws need not be a function
        def __call__(self, table, ax=None):
            ax.plot(table["value"])

    monkeypatch.setitem(
        registry.diagnostic.entries,
        "landscape",
        dataclasses.replace(registry.diagnostic.get("landscape"), draw=Line()),
    )
    assert fldiag.draw(table, ax=ax) is ax and ax.lines
    plt.close(fig)


def test_a_picture_of_a_table(tmp_path):
    problem = fldiag.Problem(
        torch.nn.Linear(2, 3), F.cross_entropy, (torch.eye(2), torch.tensor([0, 2]))
    )
    table = fldiag.diagnose(problem, "spectrum", k=2)
    assert type(fldiag.draw(table)).__name__ == "Figure"
    with pytest.raises(fldiag.FldiagError, match="does not say which diagnostic"):
        fldiag.draw(
            table.drop(columns=[]).assign(value=1.0).pipe(lambda t: type(t)(t.to_dict("list")))
        )
    assert fldiag.draw(type(table)(table.to_dict("list")), name="spectrum") is not None


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
        (lambda: fldiag.draw("x"), "what fldiag.diagnose returned"),
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
