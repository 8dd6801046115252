"""Verbs that say what there is. They read the catalogue, so they answer at once."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fldiag import known
from fldiag.cli.app import app
from fldiag.cli.console import Console, errors
from fldiag.cli.options import Debug, Json
from fldiag.errors import FldiagError, unknown

NEEDS = {
    "public": "unlabelled public inputs (data.public)",
    "stages": "a model that shows its stages (a residual network)",
}


@app.command("list", rich_help_panel="Start")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            help="methods, models, datasets, diagnostics, presets, settings or figures. Default: all of them."
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List methods, models, data sets, diagnostics, presets, settings or figures, or all of them.

    Example: fldiag list methods
    """
    with errors(debug):
        console = Console(json)
        if what is not None and what not in known.kinds():
            raise unknown("list", what, known.kinds())
        for kind in known.kinds() if what is None else [what]:
            try:
                names = known.names(kind)
            except FldiagError as error:
                if what is not None:
                    raise
                console.note(str(error))  # another package's list that is broken
                continue
            if what is None:
                console.say(kind)
            kinds = {"kind": kind} if what is None else {}
            console.table(
                [{**kinds, "name": name, "what": summary} for name, summary in names.items()],
                {"name": "name", "what": "what it is"},
            )
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
        console = Console(json)
        if ":" in name:
            from fldiag.method import own_entry  # imports torch

            entry: known.Item | None = known.describe(own_entry(name, {name}))
        else:
            entry = next((item for kind in known.KINDS if (item := known.item(kind, name))), None)
        keys = known.settings(name)
        if entry is not None:
            _explain(console, name, entry)
        elif keys:
            _explain_settings(console, keys)
        else:
            sections = {key.partition(".")[0] for key in known.settings()}
            names = [n for kind in known.KINDS for n in known.names(kind)]
            raise unknown("name", name, [*names, "settings", *sections, *known.settings()])
        if json:
            console.done()


def _explain(console: Console, name: str, item: known.Item) -> None:
    meta = item["meta"]
    console.say(f"{item['kind']} {name}\n\n{item['doc']}\n")
    if meta.get("source"):
        console.say(f"Source:      {meta['source']}")
    if meta.get("read"):
        console.say(f"Of its sources read: {meta['read']}")
    if meta.get("neutral"):
        setting = ", ".join(f"{k} = {v}" for k, v in meta["neutral"].items())
        console.say(f"With {setting} it equals {meta['equals']}.")
    if meta.get("needs"):
        console.say("Needs:       " + ", ".join(NEEDS[need] for need in meta["needs"]))
    for flag_name, flag in item.get("flags", {}).items():
        console.say(f"With {flag_name} also {flag['diagnostic']} is computed.")
    console.result |= {"kind": item["kind"], "name": name, "doc": item["doc"], **meta}
    rows = [
        {
            "option": o["name"],
            "default": "(required)" if o["required"] else _show(o["default"]),
            "values": o["values"],
            "help": o["help"],
        }
        for o in item["options"]
    ]
    help_column = {"help": "what it is"} if any(row["help"] for row in rows) else {}
    console.table(
        rows, {"option": "option", "default": "default", "values": "values", **help_column}
    )


def _explain_settings(console: Console, keys: dict[str, known.Item]) -> None:
    for key, item in keys.items() if len(keys) == 1 else ():
        console.say(f"setting {key}\n\n{item['summary']}\n")
    rows = [
        {
            "key": key,
            "default": _show(item["default"]),
            "values": item["values"] + (f" ({item['unit']})" if item["unit"] else ""),
            "papers": "; ".join(f"{paper} {values}" for paper, values in item["papers"].items()),
            "help": item["summary"],
        }
        for key, item in keys.items()
    ]
    columns = {"key": "key", "default": "default", "values": "values", "papers": "papers' presets"}
    console.table(rows, columns if len(keys) == 1 else {**columns, "help": "what it is"})
    console.say(
        "Set one with --set KEY=VALUE, in a TOML file, or in Python: "
        "fldiag.Config.load(PRESET, section__key=VALUE)."
    )


def _show(value: Any) -> str:
    return (
        "none"
        if value is None
        else ", ".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )
