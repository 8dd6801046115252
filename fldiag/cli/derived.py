"""The verbs of diagnostics, made from the registry: a diagnostic's file says its options, and nobody types them again."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fldiag.cli.console import Console
from fldiag.cli.options import Out, parameter, signed
from fldiag.registry import Diagnostic, diagnostic, entry_points, load_entry_point

#: Options of subjects that only Python has.
UNTYPED = ("round",)


def command(name: str) -> Any:
    """The verb of a diagnostic, or what another package brings as one: a function or a Typer."""
    point = entry_points("fldiag.verbs").get(name)
    target = load_entry_point(point, "verb") if point else verb(diagnostic.get(name))
    if not isinstance(target, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name)(target)
        target = app
    command: Any = typer.main.get_command(target)
    command.name, panel = name, getattr(target, "rich_help_panel", None)
    command.rich_help_panel = command.rich_help_panel or panel
    return command


def verb(entry: Diagnostic) -> Callable[..., None]:
    """The function behind ``fldiag NAME``: its signature is the diagnostic's options and those that all share."""
    from fldiag.diagnosis.options import BY_SUBJECT

    of_weights = entry.on in ("problem", "checkpoints")
    text = f"Run folders{', or checkpoint files (.pt, .safetensors)' if of_weights else ''}."
    fields = {**entry.options.model_fields}
    fields |= {n: f for n, f in BY_SUBJECT[entry.on].model_fields.items() if n not in fields}
    parameters = [
        parameter("targets", Annotated[list[Path], typer.Argument(help=text)]),
        *(_option(name, field) for name, field in fields.items() if name not in UNTYPED),
        parameter("out", Out, None),
    ]

    def run(console: Console, **values: Any) -> None:
        own = {name: values.pop(name) for name in fields if name in values}
        options = {name: value for name, value in own.items() if value is not None}
        ask(console, entry.name, options=options, **values)

    run.__name__ = entry.name
    run.__doc__ = f"{entry.headline}\n\nExample: fldiag {entry.name} {entry.example or '…'}"
    shared = ("width", "format", "allow_code", *["strict"] * (entry.fails is not None))
    return signed(run, parameters, shared)


def ask(
    console: Console,
    name: str,
    targets: Sequence[Path],
    options: Mapping[str, Any],
    *,
    out: Path | None,
    strict: bool = False,
) -> None:
    """Open, ask, write, and say what a person reads first; with ``strict`` exit code 3 where a check failed."""
    from fldiag.diagnosis.diagnose import diagnose

    answer = diagnose(name, targets, options, out=out, **console.listeners)
    console.show(answer.summary())
    console.done(*answer.files)
    fails = answer.entry.fails
    if strict and fails and fails(answer.table):
        sys.exit(3)


def _option(name: str, field: Any) -> inspect.Parameter:
    """An option as text, which the diagnostic's schema reads: one that is not typed is None. A bool is a flag."""
    flag, text, default = f"--{name.replace('_', '-')}", field.description or "", field.default
    flags = [flag, f"-{name}"] if len(name) == 1 else [flag]
    kind: Any = str
    if bool in (field.annotation, *typing.get_args(field.annotation)):
        kind, flags = bool, [f"{flag}/--no-{flag[2:]}"] if default else flags
    elif isinstance(default, (list, tuple)):  # values that are typed replace it and are not added
        kind, text = list[str], f"{text} May be given several times; default {list(default)}."
    elif default is not None and not field.is_required():
        text = f"{text} Default: {default}."
    option = typer.Option(*flags, help=text)
    if field.is_required():
        return parameter(name, Annotated[kind, option])
    return parameter(name, Annotated[kind | None, option], None)
