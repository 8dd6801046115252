"""Imports go one way: what each package may know, read from the source."""

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "fldiag"
GROUND = {
    "errors",
    "execution",
    "device",
    "config",
    "sections",
    "seeding",
    "params",
    "registry",
    "losses",
}
#: What diagnostics, their answers and their tables stand on.
MIDDLE = GROUND | {
    "data",
    "models",
    "results",
    "problem",
    "runs",
    "plotting",
    "diagnosis",
}
TOP = MIDDLE | {"api", "method", "training", "diagnostics"}
#: Package -> what it may import of fldiag besides itself. "": the public face.
MAY = {
    "errors": set(),
    "seeding": set(),
    "device": {"errors"},
    "params": {"errors"},
    "losses": {"errors", "seeding", "params", "sections"},
    "registry": {"errors", "results", "sections"},
    "execution": {"errors", "device", "registry"},
    "config": {
        "errors",
        "registry",
        "sections",
    },
    "sections": {"errors"},
    "data": GROUND,
    "data/text": GROUND | {"data", "models"},
    "data/given": GROUND | {"data", "problem"},
    "models": GROUND,
    "results": GROUND,
    "local": GROUND | {"models"},
    "step": GROUND | {"local", "models", "data"},
    "method": GROUND | {"local", "step", "data", "models"},
    "parts": GROUND | {"method", "local", "step", "data", "models"},
    "methods": GROUND | {"method", "local", "step", "parts", "data", "models"},
    "training": GROUND | {"method", "local", "step", "data", "models", "results", "runs"},
    "curvature": GROUND | {"models", "results"},
    "problem": GROUND | {"data", "models", "results", "curvature"},
    "landscape": GROUND | {"models", "results", "curvature", "problem"},
    "runs": GROUND | {"data", "models", "results", "curvature", "problem"},
    "plotting": {"errors", "results"},
    "diagnostics": GROUND
    | {
        "data",
        "models",
        "results",
        "curvature",
        "problem",
        "landscape",
        "runs",
        "plotting",
    },
    "diagnostics/personalise": MIDDLE | {"method", "training", "diagnostics"},
    "diagnosis": GROUND | {"data", "models", "results", "problem", "runs", "plotting"},
    "compare": MIDDLE | {"diagnostics"},
    "presets": set(),
    "api": MIDDLE | {"training", "compare"},
    "report": MIDDLE | {"api"},
    "integrations": MIDDLE | {"api", "training"},
    "cli": TOP | {"compare", "report", "integrations"},
    "": {
        "errors",
        "config",
        "api",
        "integrations",
        "method",
        "problem",
        "runs",
        "training",
    },
}
#: Files that may more than their package: one trains, one reads trees, one knows the word pieces of a model.
ALONE = (("diagnostics", "personalise"), ("data", "given"), ("data", "text"))
FILES = sorted(ROOT.rglob("*.py"))


@cache
def tree_of(file):
    return ast.parse(file.read_text("utf-8"))


@cache
def nodes_of(file):
    return list(ast.walk(tree_of(file)))


def package(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    if parts[:2] in ALONE:
        return "/".join(parts)
    return "" if parts == ("__init__",) else parts[0]


def imported(file):
    """Names of fldiag's packages a file imports, wherever in it (also for type checking only)."""
    found = set()
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("fldiag.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            module = (node.module or "").split(".")
            if module == ["fldiag"]:
                found |= {a.name for a in node.names} - {"__version__"}
            elif module[0] == "fldiag":
                found.add(module[1])
    return found


def test_arrows_go_one_way():
    upwards = {
        file.relative_to(ROOT).as_posix(): imported(file) - MAY[package(file)] - {package(file)}
        for file in FILES
    }
    assert not {file: names for file, names in upwards.items() if names}


def test_the_table_names_packages_that_exist():
    assert {package(f) for f in FILES} == MAY.keys()


PAPERS = sorted((ROOT.parent / "analyses" / "papers").rglob("*.py"))


def test_fldiag_does_not_know_the_papers_package():
    """Nothing names it, not even as text: its verbs and its list come through entry points, as any package's do."""
    assert PAPERS and not [file.name for file in FILES if "fldiag_papers" in file.read_text()]


def test_type_hints_are_the_only_way_up():
    """method names types of data and models; at run time it needs the registry, errors and the vocabulary of a step only."""
    tree = tree_of(ROOT / "method.py")
    now = {
        n.module
        for n in tree.body
        if isinstance(n, ast.ImportFrom) and n.module.startswith("fldiag")
    }
    assert now <= {"fldiag", "fldiag.errors", "fldiag.local", "fldiag.step"}


def module(file):
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(file): file for file in FILES}


def modules_imported(file):
    """The modules of fldiag that a file imports, wherever in it: in functions and for type checking too."""
    found = set()
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{a.name}" for a in node.names}
            found |= {name if name in MODULES else node.module for name in whole}
    return (found & MODULES.keys()) - {module(file)}


def circles(arrows):
    """The sets of modules that all reach one another, each as a frozenset."""
    reached = {}
    for start in arrows:
        seen, ahead = set(), [start]
        while ahead:
            for name in arrows[ahead.pop()] - seen:
                seen.add(name)
                ahead.append(name)
        reached[start] = seen
    return {frozenset(b for b in reached[a] if a in reached[b]) for a in arrows if a in reached[a]}


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle():
    """Also through type checking and imports inside functions."""
    assert not circles({name: modules_imported(file) for name, file in MODULES.items()})


def test_circles_are_found():
    arrows = {
        "a": {"b"},
        "b": {"c"},
        "c": {"a", "d"},
        "d": {"e"},
        "e": {"d"},
        "f": {"a"},
        "g": set(),
    }
    assert circles(arrows) == {frozenset("abc"), frozenset("de")}


#: Imported name -> the dependency that brings it, where they differ.
BROUGHT_BY = {
    "sklearn": "scikit-learn",
    "mpl_toolkits": "matplotlib",
    "numpy": "pandas",
    "click": "typer",
}


def test_what_a_module_imports_at_once_is_a_dependency():
    """A package that only the development environment holds would stop fldiag from starting anywhere else."""
    declared = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    names = (
        {re.split(r"[<>=\[ ]", line)[0] for line in declared} | sys.stdlib_module_names | {"fldiag"}
    )
    for file in FILES:
        for node in tree_of(file).body:
            found = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            tops = {name.split(".")[0] for name in found}
            assert {BROUGHT_BY.get(t, t) for t in tops} <= names, (
                f"{file.relative_to(ROOT)} imports {tops}"
            )


BELOW = [f for f in FILES if package(f) not in {"cli"}]


def test_nothing_is_unpickled_and_no_global_seed_is_set():
    """torch.load says weights_only=True and no other value; numpy never allows pickles."""
    for file in BELOW:
        for call in (n for n in nodes_of(file) if isinstance(n, ast.Call)):
            name, place = ast.unparse(call.func), f"{file}:{call.lineno}"
            keywords = {k.arg: ast.unparse(k.value) for k in call.keywords}
            assert name not in {"pickle.load", "pickle.loads", "np.random.seed"}, place
            assert name != "torch.load" or keywords.get("weights_only") == "True", place
            assert keywords.get("allow_pickle", "False") == "False", place


def test_the_library_never_prints():
    for file in BELOW:
        calls = [
            n for n in nodes_of(file) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        ]
        assert not [n.lineno for n in calls if n.func.id == "print"], file


def test_no_two_files_of_one_name_among_what_shows_results():
    names = [
        f.name
        for f in FILES
        if f.parent.name in {"report", "integrations", "plotting"} and f.name != "__init__.py"
    ]
    assert len(names) == len(set(names))
