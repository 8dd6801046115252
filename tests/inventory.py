"""What fldiag offers, as plain values: verbs, Python names, plug-in points, config keys, the ledger's rows, and hashes.

``python tests/inventory.py`` writes ``tests/fixtures/inventory.json`` anew; ``tests/cli/test_inventory.py`` holds that everything in it
still answers, but for what goes.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import typer

import fldiag
from fldiag import registry
from fldiag.cli import app
from fldiag.config import Config, presets

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "fixtures" / "inventory.json"
#: Kind, as ``fldiag list`` names it -> registry.
REGISTRIES = {
    "methods": registry.method,
    "models": registry.model,
    "datasets": registry.dataset,
    "diagnostics": registry.diagnostic,
}
#: What plug-ins import beside ``fldiag.__all__``, by module (docs/how_to/extend.md).
PLUGIN_NAMES = {
    "fldiag.method": ("Method", "Neighbours", "Part", "Personal", "method"),
    "fldiag.registry": ("dataset", "diagnostic", "method", "model"),
    "fldiag.step": ("Perturbation",),
    "fldiag.params": ("cosine", "dot", "flatten", "norm", "ratio"),
    "fldiag.results.table": ("table",),
}
#: What a plug-in's functions receive: fldiag alone constructs them, so only the attributes count.
ARGUMENTS_OF_PLUGINS = {
    "fldiag.method": ("Round",),
    "fldiag.local": ("Local",),
    "fldiag.step": ("Output", "Step"),
}
#: Documented members that fldiag itself calls, and nobody else.
INTERNAL = {
    "Run": {
        "add_metrics",
        "append",
        "clean",
        "commit",
        "common",
        "create",
        "drop_metrics",
        "forget",
        "has_metrics",
        "metrics_digest",
        "put",
        "put_checkpoint",
        "put_clients",
        "put_metrics",
        "put_state",
        "put_steps",
        "put_tensors",
        "recorded",
        "round_file",
        "some_rounds",
        "stored_rows",
        "verified",
    },
    "Problem": {
        "criterion",
        "executor",
        "guarded",
        "in_memory",
        "loaded",
        "read",
        "recall",
        "estimator_name",
        "targets",
    },
    "History": {"alone", "executor", "finite", "note", "pool", "recipe"},
    "Recorder": {"state", "store"},
    "Local": {"views_by_rows", "notes"},
    "Output": {"bound", "by_hand"},
    "Config": {"fingerprint", "stored"},
}
#: What names a row of the ledger, the scale last: a number that no run has measured has none.
LEDGER_KEY = (
    "paper",
    "id",
    "kind",
    "source",
    "setting",
    "data",
    "model",
    "method",
    "metric",
    "scale",
)
LEDGER = "figures/ledger.csv"
RECORDS = "figures/**/run.json"


def verbs(root: typer.Typer = app) -> dict[str, list[dict[str, Any]]]:
    """ "verb" or "verb sub-verb" -> its parameters; "" are the options before any verb."""
    table = {}
    pending = [("", typer.main.get_command(root))]
    while pending:
        path, command = pending.pop(0)
        table[path] = [parameter(p) for p in command.params]
        if hasattr(
            command, "list_commands"
        ):  # also a group that imports its verbs only when it runs
            context = typer.Context(command)
            pending += [
                (f"{path} {name}".strip(), command.get_command(context, name))
                for name in command.list_commands(context)
            ]
    return dict(sorted(table.items()))


def parameter(p: Any) -> dict[str, Any]:
    """A parameter of the command line; what is false or empty is left out."""
    full = {
        "kind": p.param_type_name,
        "names": list(p.opts),
        "off": list(p.secondary_opts),
        "type": p.type.name,
        "default": plain(p.default),
        "flag": bool(getattr(p, "is_flag", False)),
        "multiple": bool(getattr(p, "multiple", False)),
        "nargs": 0 if p.nargs == 1 else p.nargs,
        "required": bool(p.required),
    }
    return {
        key: value
        for key, value in full.items()
        if value not in (None, False, [], 0, "option") or (key == "default" and value is not None)
    }


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def arguments(function: Callable[..., Any]) -> list[str]:
    """The parameters by name and in their order; ``*`` before the first keyword-only one, ``=`` after those with a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # Python has no signature for some built-in constructors
        return []
    names, keyword_only = [], False
    for p in parameters:
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.VAR_POSITIONAL or (p.kind is p.KEYWORD_ONLY and not keyword_only):
            names += [f"*{p.name}"] if p.kind is p.VAR_POSITIONAL else ["*"]
            keyword_only = True
        if p.kind is p.VAR_KEYWORD:
            names.append(f"**{p.name}")
        elif p.kind is not p.VAR_POSITIONAL:
            names.append(p.name + ("=" if p.default is not p.empty else ""))
    return names


def members(kind: type) -> dict[str, list[str] | None]:
    """Fields, documented methods (-> arguments) and documented properties of a class that fldiag itself defines."""
    table: dict[str, list[str] | None] = {}
    for ancestor in reversed(kind.__mro__):
        if not ancestor.__module__.startswith("fldiag"):
            continue
        table |= dict.fromkeys(ancestor.__annotations__)
        for name, value in vars(ancestor).items():
            function = getattr(value, "__func__", value)
            if inspect.isfunction(function) and function.__doc__:
                table[name] = arguments(function)
            elif isinstance(value, (property, cached_property)) and value.__doc__:
                table[name] = None
    return {
        name: table[name]
        for name in sorted(table)
        if not name.startswith("_") and name not in INTERNAL.get(kind.__name__, ())
    }


def python() -> dict[str, list[str] | None]:
    """Dotted name -> arguments of a function, constructor or method; None for an attribute."""
    table: dict[str, list[str] | None] = {}
    for module, names in {"fldiag": tuple(fldiag.__all__), **PLUGIN_NAMES}.items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            table[f"{module}.{name}"] = arguments(value)
            if inspect.isclass(value) and not (module != "fldiag" and name in fldiag.__all__):
                table |= {
                    f"{module}.{name}.{member}": signature
                    for member, signature in members(value).items()
                }
    for module, names in ARGUMENTS_OF_PLUGINS.items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            table |= {
                f"{module}.{name}.{member}": signature
                for member, signature in members(value).items()
            }
    table["fldiag.registry.diagnostic"] = [
        "name",
        "*",
        *(f"{key}=" for key in sorted(registry.Diagnostic.__annotations__)),
    ]
    return dict(sorted(table.items()))


def registered() -> dict[str, dict[str, dict[str, Any]]]:
    """Kind -> name -> option -> default (``...`` for one that must be given)."""
    return {
        kind: {
            name: {
                key: "..." if field.is_required() else plain(field.default)
                for key, field in entries.get(name).options.model_fields.items()
            }
            for name in entries.names()
            if entries.get(name).build.__module__.startswith("fldiag.")
        }
        for kind, entries in REGISTRIES.items()
    }


def ledger() -> pd.DataFrame:
    return pd.read_csv(ROOT / LEDGER, dtype=str, keep_default_na=False)


def tree(rows: Sequence[Sequence[str]]) -> Any:
    """Rows of texts as nested dicts, the last column as lists."""
    if len(rows[0]) == 1:
        return [row[0] for row in rows]
    branches: dict[str, list[Sequence[str]]] = {}
    for first, *rest in rows:
        branches.setdefault(first, []).append(rest)
    return {first: tree(branch) for first, branch in branches.items()}


def leaves(branch: Any, *path: str) -> list[tuple[str, ...]]:
    """The rows of a ``tree``."""
    if isinstance(branch, list):
        return [(*path, leaf) for leaf in branch]
    return [row for key, value in branch.items() for row in leaves(value, *path, key)]


def records() -> dict[str, dict[str, str]]:
    """Folder of a committed record -> the hash of its config today, and the one that it states."""
    contents = {path: json.loads(path.read_text()) for path in sorted(ROOT.glob(RECORDS))}
    return {
        path.parent.relative_to(ROOT).as_posix(): {
            "hash": Config.from_stored(content["config"]).hash,
            "stated": content["hash"],
        }
        for path, content in contents.items()
    }


def inventory() -> dict[str, Any]:
    rows = ledger()
    return {
        "verbs": verbs(),
        "python": python(),
        "registered": registered(),
        "config": plain(Config().model_dump()),
        "ledger columns": list(rows.columns),
        "ledger rows": tree(rows[list(LEDGER_KEY)].values.tolist()),
        "figures": sorted(fldiag.catalogue("figures")),
        "preset hashes": {name: Config.load(name).hash for name in sorted(presets())},
        "records": records(),
    }


def text(value: Any, depth: int = 2, indent: int = 0) -> str:
    """JSON with one line for what lies ``depth`` levels deep."""
    if not depth or not isinstance(value, (dict, list)) or not value:
        return json.dumps(value, ensure_ascii=False)
    pad = "\n" + " " * (indent + 1)
    if isinstance(value, list):
        return "[" + ",".join(pad + text(v, depth - 1, indent + 1) for v in value) + "]"
    return (
        "{"
        + ",".join(
            f"{pad}{json.dumps(k, ensure_ascii=False)}: {text(v, depth - 1, indent + 1)}"
            for k, v in value.items()
        )
        + "}"
    )


if __name__ == "__main__":
    FILE.write_text(text(inventory(), depth=3) + "\n")
    print(FILE)
