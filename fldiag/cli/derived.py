"""The verb of a diagnostic, made from the catalogue: a diagnostic's file says its options, and nobody types them again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fldiag import known
from fldiag.cli.console import Console, errors
from fldiag.cli.options import AllowCode, Debug, Device, Format, Json, Out, TrustFile, Width
from fldiag.plotting import sheet

Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with code 3 if there is a fault or a warning.")
]
TARGETS = {
    "problem": ("checkpoints", list[Path], "Checkpoint files (.pt, .safetensors) or run folders."),
    "checkpoints": (
        "checkpoints",
        list[Path],
        "Checkpoint files (.pt, .safetensors) or run folders.",
    ),
    "run": ("run", Path, "A run folder."),
    "clients": ("run", Path, "A run folder with client weights."),
    "runs": ("runs", list[Path], "Run folders."),
}
#: Options of subjects that only Python has, and the device, which all verbs have.
UNTYPED = ("device", "round", "stack", "name")
TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "list[int]": list[int],
    "list[float]": list[float],
    "list[str]": list[str],
}


def verb(name: str, item: known.Item) -> Callable[..., None]:
    """The function behind ``fldiag NAME``: its signature is the diagnostic's options and those that all share."""
    argument, kind, text = TARGETS[item["on"]]
    typed = {o["name"]: o for o in item["options"] if o["type"] in TYPES and o["name"] != "device"}
    own_names = [o["name"] for o in item["options"]]
    shared = {
        o["name"]: o
        for o in known.built_in()["subjects"][known.SUBJECTS[item["on"]]]["options"]
        if o["name"] not in (*own_names, *UNTYPED)
    }
    flags = {
        name: {"name": name, "type": "bool", "default": False, "help": flag["help"]}
        for name, flag in item["flags"].items()
    }
    options = {**typed, **flags, **shared}
    pictured = {
        n: kind
        for n, kind in (("width", Width), ("format", Format))
        if item["draws"] and n not in options
    }
    parameters = [
        _parameter(argument, Annotated[kind, typer.Argument(help=text)]),
        *(_parameter(n, Annotated[_kind(o), _option(o)], _default(o)) for n, o in options.items()),
        *([_parameter("strict", Strict, False)] if item["fails"] else []),
        _parameter("out", Out, None),
        *(_parameter(n, kind, None) for n, kind in pictured.items()),
        _parameter("allow_code", AllowCode, None),
        _parameter("trust_file", TrustFile, False),
        _parameter("json", Json, False),
        _parameter("device", Device, "auto"),
        _parameter("debug", Debug, False),
    ]

    def run(**values: Any) -> None:
        with errors(values.pop("debug")):
            from fldiag.cli import asking

            targets, out, console = (
                values.pop(argument),
                values.pop("out"),
                Console(values.pop("json")),
            )
            allow_code = values.pop("allow_code") or []
            # of a diagnostic that cannot fail, such as spectrum, it is an option like others
            strict = values.pop("strict") if item["fails"] else False
            changes = {
                n: v
                for n, v in values.items()
                if n in options and v is not None and v != _default(options[n])
            }
            if takes_device(item):
                changes["device"] = values["device"]
            with sheet.use_sheet(**{n: values[n] for n in pictured}):
                asking.ask(
                    console,
                    name,
                    targets if isinstance(targets, list) else [targets],
                    changes,
                    out,
                    strict,
                    allow_code,
                )

    run.__name__, run.__doc__ = (
        name,
        f"{item['summary']}\n\nExample: fldiag {name} {item['example'] or '…'}",
    )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def group(item: known.Item) -> str:
    """The group of ``fldiag --help`` that the verb belongs to."""
    return "Weights" if item["on"] in ("problem", "checkpoints") else "Clients"


def takes_device(item: known.Item) -> bool:
    """Whether the diagnostic computes on a device: its subjects are put there, or it has an option for it."""
    return item["on"] != "runs" or any(o["name"] == "device" for o in item["options"])


def _parameter(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _default(option: known.Item) -> Any:
    """A list's default stands in its help: given values replace it and are not added."""
    return None if option["type"].startswith("list") else option["default"]


def _kind(option: known.Item) -> Any:
    kind = TYPES[option["type"]]
    return kind | None if _default(option) is None else kind


def _option(option: known.Item) -> Any:
    name = f"--{option['name'].replace('_', '-')}"
    panel = "Advanced" if option.get("advanced") else None
    if option["type"] == "bool" and option["default"]:
        return typer.Option(f"{name}/--no-{name[2:]}", help=option["help"], rich_help_panel=panel)
    default = option["default"]
    several = (
        ""
        if not isinstance(default, list)
        else f" May be given several times; default {', '.join(f'{v:g}' if isinstance(v, float) else str(v) for v in default)}."
    )
    names = [name, f"-{option['name']}"] if len(option["name"]) == 1 else [name]
    return typer.Option(*names, help=option["help"] + several, rich_help_panel=panel)


def command(name: str) -> Any:
    """The verb of another package's diagnostic, which is imported for it."""
    with errors(debug=False):
        item = known.item("diagnostics", name)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(verb(name, item or {}))
    return typer.main.get_command(alone)
