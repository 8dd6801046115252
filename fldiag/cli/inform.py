"""Verbs that say what there is."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any

import typer

from fldiag import names
from fldiag.cli.app import app
from fldiag.cli.console import Console, errors
from fldiag.cli.options import Debug, Json
from fldiag.errors import unknown

NEEDS = {
    "public": "unlabelled public inputs (data.public)",
    "stages": "a model that shows its stages (a residual network)",
}


@app.command("list", rich_help_panel="Start")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            help="methods, models, datasets, diagnostics, presets or figures. Default: all of them."
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List methods, models, data sets, diagnostics, presets or figures, or all of them.

    Example: fldiag list methods
    """
    with errors(debug):
        console = Console(json)
        for kind in names.kinds() if what is None else [what]:
            if what is None:
                console.say(kind)
            about = {"kind": kind} if what is None else {}
            rows = [{**about, "name": n, "what": line} for n, line in names.of(kind).items()]
            console.table(rows, {"name": "name", "what": "what it is"})
        if json:
            console.done()


@app.command(rich_help_panel="Start")
def explain(
    name: Annotated[
        str,
        typer.Argument(
            help="A method, model, data set or diagnostic, settings, or a section (partition) or key (clients.sampling) of these."
        ),
    ],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Describe a method, model, data set or diagnostic: equations, options with defaults, source; or the settings of a run.

    Example: fldiag explain fedsol
    """
    with errors(debug):
        from fldiag import registry
        from fldiag.config import settings
        from fldiag.method import own_entry

        console = Console(json)
        kinds: list[registry.Registry[Any]] = [
            registry.method,
            registry.model,
            registry.dataset,
            registry.diagnostic,
        ]
        entries: list[Any] = [own_entry(name, {name})] if ":" in name else []
        entries += [kind.get(name) for kind in kinds if ":" not in name and name in kind]
        fields = {
            key: field
            for key, field in settings().items()
            if name in ("settings", key, *key.partition(".")[::2])
        }
        if entries:
            _explain(console, entries[0])
        elif fields:
            _options(console, fields)
            console.say(
                "Set one with --set KEY=VALUE, in a TOML file, or in Python with KEY=VALUE."
            )
        else:
            sections = {key.partition(".")[0] for key in settings()}
            listed = [n for kind in kinds for n in kind.names()]
            raise unknown("name", name, [*listed, "settings", *sections, *settings()])
        if json:
            console.done()


def _explain(console: Console, entry: Any) -> None:
    meta = {k: v for k, v in entry.meta.items() if not callable(v)}
    console.say(f"{entry.kind} {entry.name}\n\n{entry.doc}\n")
    if meta.get("source"):
        console.say(f"Source:      {meta['source']}")
    if meta.get("neutral"):
        setting = ", ".join(f"{k} = {v}" for k, v in meta["neutral"].items())
        console.say(f"With {setting} it equals {meta['equals']}.")
    if meta.get("needs"):
        console.say("Needs:       " + ", ".join(NEEDS[need] for need in meta["needs"]))
    console.result |= {"kind": entry.kind, "name": entry.name, "doc": entry.doc, **meta}
    _options(console, entry.options.model_fields)


def _options(console: Console, fields: dict[str, Any]) -> None:
    rows = [
        {
            "option": key,
            "default": "(required)" if field.is_required() else _show(field.default),
            "values": _values(field.annotation, field.metadata),
            "help": field.description or "",
        }
        for key, field in fields.items()
    ]
    console.table(
        rows, {"option": "option", "default": "default", "values": "values", "help": "what it is"}
    )


def _show(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)


def _values(annotation: Any, metadata: Any = ()) -> str:
    """Type and bounds of an option in words: ``float >= 0``, ``kl | l2``."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _values(args[0], args[1:])
    if origin is typing.Literal:
        return " | ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " | ".join("none" if a is type(None) else _values(a) for a in args)
    if origin in (tuple, list):
        return f"list of {_values(args[0])}"
    bounds = [bound for one in metadata for bound in getattr(one, "metadata", [one])]
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [
        f"{sign} {getattr(bound, key):g}"
        for bound in bounds
        for key, sign in signs.items()
        if getattr(bound, key, None) is not None
    ]
    return " ".join([getattr(annotation, "__name__", str(annotation)), *limits])
