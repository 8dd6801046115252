"""``fldiag list`` and ``fldiag explain``: what there is and what it means, from the signatures themselves."""

from __future__ import annotations

import typing
from typing import Any

from fldiag import config, registry
from fldiag.console import Console
from fldiag.errors import unknown

KINDS = {"methods": registry.method, "models": registry.model, "datasets": registry.dataset, "diagnostics": registry.diagnostic}


def listing(console: Console, what: str) -> None:
    if what == "presets":
        found = config.presets()
    elif what in KINDS:
        found = KINDS[what].describe()
    elif what == "figures":
        from fldiag.figures import reported

        found = {name: f"{study.title} ({study.source})" for name, study in reported.studies().items()}
    else:
        raise unknown("list", what, [*KINDS, "presets", "figures"])
    console.table([{"name": n, "what": d} for n, d in found.items()], {"name": "name", "what": "what it is"})
    if console.machine:
        console.done()


def explain(console: Console, name: str) -> None:
    entry = next((kind.get(name) for kind in KINDS.values() if name in kind), None)
    if entry is None:
        raise unknown("name", name, [n for kind in KINDS.values() for n in kind.names()])
    options = [{"option": key, "default": _show(field.default) if not field.is_required() else "(required)",
                "values": values(field.annotation, field.metadata)} for key, field in entry.options.model_fields.items()]
    console.say(f"{entry.kind} {entry.name}\n\n{entry.doc}\n")
    if entry.meta.get("source"):
        console.say(f"Source:      {entry.meta['source']}")
    if entry.meta.get("neutral"):
        setting = ", ".join(f"{k} = {v}" for k, v in entry.meta["neutral"].items())
        console.say(f"With {setting} it equals {entry.meta['equals']}.")
    console.result |= {"kind": entry.kind, "name": entry.name, "doc": entry.doc, **entry.meta}
    console.table(options, {"option": "option", "default": "default", "values": "values"})
    if console.machine:
        console.done()


def _show(value: Any) -> str:
    return "none" if value is None else str(value)


def values(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
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
    for item in metadata:
        for part in getattr(item, "metadata", [item]):
            bounds += [f"{sign} {getattr(part, key):g}" for key, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
                       if getattr(part, key, None) is not None]
    return " ".join([getattr(annotation, "__name__", str(annotation)), *bounds])
