"""What there is, read from the source files: names and first lines without an import, so that lists and help answer at once."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from fldiag.errors import unknown
from fldiag.registry import entry_points, load_entry_point, package

#: Kind, as ``fldiag list`` and ``fldiag.catalogue`` name it -> name of its registry, and the folders of its files.
KINDS = {
    "methods": ("method", "methods"),
    "models": ("model", "models"),
    "datasets": ("dataset", "data"),
    "diagnostics": ("diagnostic", "diagnostics"),
}
#: What one may take for a verb -> the verb and flag that ask for it.
FLAGS = {
    "trace": "spectrum --trace",
    "diagonal": "spectrum --trace",
    "density": "spectrum --density",
}


@dataclass(frozen=True)
class Item:
    """The first line of what is registered; of a diagnostic also what it is on."""

    summary: str
    on: str = "problem"


def kinds() -> list[str]:
    """What ``fldiag list`` and ``fldiag.catalogue`` take: methods to presets, then the lists of other packages."""
    return [*KINDS, "presets", *entry_points("fldiag.lists")]


def of(kind: str) -> dict[str, str]:
    """Name -> one line on it; for what another package brings, the package's name.

    Raises:
        FldiagError: an unknown kind, or a list that cannot be imported.

    >>> of("methods")["fedavg"]
    'Local SGD, then the weighted mean.'
    """
    if kind not in kinds():
        raise unknown("kind", kind, kinds())
    if kind == "presets":
        return presets()
    if kind not in KINDS:
        return dict(sorted(load_entry_point(entry_points("fldiag.lists")[kind], "list")().items()))
    of_packages = {n: f"(from {package(p)})" for n, p in entry_points(f"fldiag.{kind}").items()}
    registry = sys.modules["fldiag.registry"]
    imported = getattr(registry, KINDS[kind][0]).entries
    of_this_process = {name: entry.headline for name, entry in imported.items()}
    of_fldiag = {name: item.summary for name, item in built_in(kind).items()}
    return dict(sorted((of_packages | of_this_process | of_fldiag).items()))


@cache
def built_in(kind: str) -> dict[str, Item]:
    """What the source files register, by name."""
    registry, *folders = KINDS[kind]
    root = Path(__file__).parent
    files = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    return dict(item for path in files for item in _registered(path, registry))


def presets() -> dict[str, str]:
    """Name -> first comment line of every preset."""
    return {name: text.split("\n", 1)[0].lstrip("# ") for name, text in preset_texts().items()}


@cache
def preset_texts() -> dict[str, str]:
    """Name -> text of every preset."""
    files = sorted(resources.files("fldiag.presets").iterdir(), key=lambda file: file.name)
    return {f.name[:-5]: f.read_text("utf-8") for f in files if f.name.endswith(".toml")}


def _registered(path: Path, registry: str) -> Iterator[tuple[str, Item]]:
    """Functions decorated with ``@REGISTRY("name", ...)``, and of data sets the tables SETS."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and _last(call.func) == registry:
                    options = {k.arg: k.value for k in call.keywords}
                    on = _texts(options["on"])[0] if "on" in options else "problem"
                    summary = (ast.get_docstring(node) or "").split("\n")[0]
                    yield _texts(call)[0], Item(summary, on)
        if registry == "dataset" and isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if _last(target) == "SETS" and isinstance(node.value, ast.Dict):
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    if key is not None:
                        yield _texts(key)[0], Item(_texts(value)[0])


def _last(node: ast.AST) -> str:
    """``registry.method`` and ``method`` -> "method"."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _texts(node: ast.AST) -> list[str]:
    """The strings of an expression, outer ones first."""
    return [
        n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
