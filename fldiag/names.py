"""What there is, read from the source files: names and first lines without an import, so that lists and help answer at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fldiag.errors import unknown
from fldiag.registry import entry_points, load_entry_point, package

#: What is registered, as ``fldiag list`` and ``fldiag.catalogue`` name it. The name without s is the registry's.
KINDS = ("methods", "models", "datasets", "diagnostics")
#: Diagnostics without a verb of their own: flags of ``spectrum`` ask for them.
FLAGS = ("trace", "diagonal", "density")


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
        return {n: text.split("\n", 1)[0].lstrip("# ") for n, text in preset_texts().items()}
    if kind not in KINDS:
        return dict(sorted(load_entry_point(entry_points("fldiag.lists")[kind], "list")().items()))
    of_packages = {n: f"(from {package(p)})" for n, p in entry_points(f"fldiag.{kind}").items()}
    of_fldiag = {name: item.summary for name, item in built_in(kind).items()}
    return dict(sorted((of_packages | of_fldiag).items()))


@cache
def built_in(kind: str) -> dict[str, Item]:
    """What the source files register, by name."""
    folder = Path(__file__).parent / ("data" if kind == "datasets" else kind)
    files = sorted(folder.rglob("*.py"))
    return dict(item for path in files for item in _registered(path, kind[:-1]))


@cache
def preset_texts() -> dict[str, str]:
    """Name -> text of every preset."""
    files = sorted(resources.files("fldiag.presets").iterdir(), key=lambda file: file.name)
    return {f.name[:-5]: f.read_text("utf-8") for f in files if f.name.endswith(".toml")}


def _registered(path: Path, registry: str) -> Iterator[tuple[str, Item]]:
    """Functions decorated with ``@REGISTRY("name", ...)``, and of data sets the tables SETS."""
    node: Any
    for node in ast.parse(path.read_text("utf-8")).body:
        for call in getattr(node, "decorator_list", []):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(registry):
                on = [ast.literal_eval(k.value) for k in call.keywords if k.arg == "on"]
                summary = (ast.get_docstring(node) or "").split("\n")[0]
                yield ast.literal_eval(call.args[0]), Item(summary, *on)
        targets = getattr(node, "targets", [])
        if [getattr(target, "id", "") for target in targets] == ["SETS"]:
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                texts = [n.value for n in ast.walk(value) if isinstance(n, ast.Constant)]
                yield key.value, Item(str(texts[0]))
