"""What there is, in a file: names, descriptions and options of everything registered, readable without importing PyTorch.

``python -m fldiag.write_catalogue`` writes the file anew; a test holds it equal to the registry. What other packages bring stands
in no file: it is known by the names of their entry points, and imported when it is asked about.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from functools import cache
from importlib import resources
from typing import Any

from fldiag import plugins
from fldiag.errors import unknown

FILE = "catalogue.json"
#: Kind, as ``fldiag list`` and ``fldiag.catalogue`` name it -> name of its registry.
KINDS = {"methods": "method", "models": "model", "datasets": "dataset", "diagnostics": "diagnostic"}
#: What one may take for a verb -> the verb and flag that ask for it.
FLAGS = {
    "trace": "spectrum --trace",
    "diagonal": "spectrum --trace",
    "density": "spectrum --density",
}
#: What a diagnostic is on -> what is opened for it.
SUBJECTS = {
    "problem": "problem",
    "checkpoints": "problem",
    "run": "run",
    "clients": "run",
    "runs": "runs",
}
Item = dict[str, Any]


@cache
def built_in() -> dict[str, dict[str, Item]]:
    """Kind -> name -> what the file says of it; also ``presets``, and ``subjects``: the options that all diagnostics of one
    kind of subject share."""
    return dict(json.loads(resources.files("fldiag").joinpath(FILE).read_text("utf-8")))


def kinds() -> list[str]:
    """What ``fldiag list`` and ``fldiag.catalogue`` take: the kinds of the file, then the lists of other packages."""
    return list(dict.fromkeys([*KINDS, "presets", *_lists()]))


def _lists() -> dict[str, plugins.EntryPoint]:
    return {point.name: point for point in plugins.entry_points("fldiag.lists")}


def packages(kind: str) -> dict[str, str]:
    """Name -> package of what other packages bring; nothing of it is imported."""
    points = plugins.entry_points(f"fldiag.{kind}") if kind in KINDS else []
    return {point.name: plugins.package(point) for point in points}


def names(kind: str) -> dict[str, str]:
    """Name -> one line on it. Raises FldiagError for an unknown kind, and for a list that cannot be imported."""
    if kind not in kinds():
        raise unknown("kind", kind, kinds())
    if kind not in (*KINDS, "presets"):
        return dict(sorted(plugins.load(_lists()[kind], "list")().items()))
    summaries = {n: f"(from {package})" for n, package in packages(kind).items()}
    summaries |= _registered(kind)
    summaries |= {name: one_line(item) for name, item in built_in()[kind].items()}
    return dict(sorted(summaries.items()))


def one_line(item: Item) -> str:
    """The summary, and what was read of sources that were not read in full."""
    sources = item.get("meta", {}).get("read")
    return str(item["summary"]) + (f" [of its sources read: {sources}]" if sources else "")


def _registered(kind: str) -> dict[str, str]:
    """What this process has registered itself; whoever has not imported the registry has not."""
    registry = sys.modules.get("fldiag.registry")
    entries = (
        getattr(registry, KINDS[kind]).registered()
        if registry is not None and kind in KINDS
        else []
    )
    return {entry.name: entry.headline for entry in entries}


def item(kind: str, name: str) -> Item | None:
    """All that is known of a name; None for an unknown one. A plug-in is imported for it."""
    item = built_in().get(kind, {}).get(name)
    if item is None and (name in packages(kind) or name in _registered(kind)):
        from fldiag import registry

        return describe(getattr(registry, KINDS[kind]).get(name))
    return item


def settings(name: str = "settings") -> dict[str, Item]:
    """The keys of a config that a name means: all, those of a section, or a key, with or without its section.

    >>> list(settings("clients")), list(settings("sampling")), list(settings("no-key"))
    (['clients.total', 'clients.per_round', 'clients.sampling'], ['clients.sampling'], [])
    """
    keys = built_in()["settings"]
    if name == "settings":
        return keys
    return {k: v for k, v in keys.items() if name in (k, *k.partition(".")[::2])}


def command(name: str) -> str:
    """What is typed after ``fldiag`` to ask a diagnostic.

    >>> command("spectrum")
    'spectrum'
    """
    return name


def over_rounds(item: Item) -> bool:
    """Whether a diagnostic looks at all rounds of a run, rather than, by default, at the last one."""
    return bool(
        item["on"] in ("run", "clients")
        and not any(o["name"] == "every_round" for o in item["options"])
    )


def describe(entry: Any) -> Item:
    """What the file says of one registered thing."""
    meta = {k: _plain(v) for k, v in entry.meta.items()}
    item: Item = {
        "kind": entry.kind,
        "summary": entry.headline,
        "doc": entry.doc,
        "meta": meta,
        "options": [option(key, field) for key, field in entry.options.model_fields.items()],
    }
    if entry.kind == "diagnostic":
        item |= {
            "on": entry.on,
            "example": entry.example,
            "draws": bool(entry.draw),
            "fails": entry.fails is not None,
            "flags": {
                name: {"diagnostic": flag.diagnostic, "help": flag.help}
                for name, flag in entry.flags.items()
            },
        }
    return item


def option(name: str, field: Any) -> Item:
    """An option: ``type`` as the command line has it (``python`` where it cannot be typed), ``values`` in words. Where its Field
    says ``json_schema_extra={"advanced": True}``, the help shows it among the rare ones."""
    item = {
        "name": name,
        "type": typed(field.annotation),
        "values": values(field.annotation, field.metadata),
        "default": None if field.is_required() else _plain(field.default),
        "required": field.is_required(),
        "help": field.description or "",
    }
    is_rare = isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("advanced")
    return {**item, "advanced": True} if is_rare else item


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if callable(value):
        return getattr(value, "__name__", "?")
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def typed(annotation: Any) -> str:
    """``int``, ``float``, ``str``, ``bool`` or ``list[...]`` of these; ``python`` for anything else."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return typed(args[0])
    if origin is typing.Literal:
        return "str"
    if origin in (typing.Union, types.UnionType):
        kinds = {typed(a) for a in args if a is not type(None)}
        return kinds.pop() if len(kinds) == 1 else "python"
    if origin in (tuple, list) and args and (inner := typed(args[0])) != "python":
        return f"list[{inner}]"
    return annotation.__name__ if annotation in (int, float, str, bool) else "python"


def values(annotation: Any, metadata: Any = ()) -> str:
    """Type and bounds of an option in words: ``float >= 0``, ``kl | l2``."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return values(args[0], args[1:])
    if origin is typing.Literal:
        return " | ".join(map(str, args))
    if args and origin is not tuple:
        return " | ".join("none" if a is type(None) else values(a) for a in args)
    if origin is tuple:
        return f"list of {values(args[0])}"
    bounds = []
    for one in metadata:
        for part in getattr(one, "metadata", [one]):
            bounds += [
                f"{sign} {getattr(part, key):g}"
                for key, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
                if getattr(part, key, None) is not None
            ]
    return " ".join([getattr(annotation, "__name__", str(annotation)), *bounds])
