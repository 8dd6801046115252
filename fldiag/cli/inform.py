"""Verbs that say what there is."""

from __future__ import annotations

import inspect
import re
from typing import Annotated, Any

import typer

from fldiag import names, user_code
from fldiag.cli.app import verb
from fldiag.cli.console import Console
from fldiag.errors import unknown


@verb("Start", name="list")
def list_(
    console: Console,
    what: Annotated[
        str | None,
        typer.Argument(
            help="methods, models, datasets, diagnostics, presets or figures. Default: all of them."
        ),
    ] = None,
) -> None:
    """List methods, models, data sets, diagnostics, presets or figures, or all of them.

    Example: fldiag list methods
    """
    for kind in [what] if what else names.kinds():
        console.table([{"name": n, kind: line} for n, line in names.of(kind).items()])
    console.done()


@verb("Start")
def explain(
    console: Console,
    name: Annotated[
        str,
        typer.Argument(
            help="A method, model, data set or diagnostic, settings, or a section (partition) or key (clients.sampling) of these."
        ),
    ],
) -> None:
    """Describe a method, model, data set or diagnostic: equations, options with defaults, source; or the settings of a run.

    Example: fldiag explain fedsol
    """
    from fldiag import registry
    from fldiag.config import settings
    from fldiag.method import own_entry

    user_code.allow(name)
    fields = settings()
    kinds = [getattr(registry, kind[:-1]) for kind in names.KINDS]
    entries = (kind.get(name) for kind in kinds if name in kind)
    if entry := own_entry(name) if ":" in name else next(entries, None):
        meta = {k: v for k, v in entry.meta.items() if v and not callable(v)}
        console.result |= {"kind": entry.kind, "name": entry.name, "doc": entry.doc, **meta}
        console.say(f"{entry.kind} {entry.name}\n\n{entry.doc}\n")
        for key, value in meta.items():
            console.say(f"{key}: {value}")
        fields = entry.options.model_fields
    elif name != "settings":
        fields = {k: f for k, f in fields.items() if name in (k, k.partition(".")[0])}
    if not entry and not fields:
        raise unknown("name", name, [*settings(), *(n for kind in kinds for n in kind.names())])
    console.table([about(key, field) for key, field in fields.items()])
    console.done()


def about(key: str, field: Any) -> dict[str, str]:
    """An option in words: its default, type and bounds, and what it is."""
    kind = inspect.formatannotation(field.annotation)
    kind = re.sub(r"Annotated\[(\w+), FieldInfo\(.*?metadata=\[(.*?)\]\)\]", r"\1 \2", kind)
    bounds = [str(m) for m in field.metadata if type(m).__module__ == "annotated_types"]
    return {
        "option": key,
        "default": "(required)" if field.is_required() else str(field.default),
        "values": " ".join([kind, *bounds]),
        "what it is": field.description or "",
    }
