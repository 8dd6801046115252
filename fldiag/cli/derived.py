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
from fldiag.cli.options import Json, Out, parameter, signed
from fldiag.registry import Diagnostic, diagnostic

Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with code 3 if there is a fault or a warning.")
]
FILES = ("checkpoints", list[Path], "Checkpoint files (.pt, .safetensors) or run folders.")
#: What a diagnostic is on -> its argument.
TARGETS: dict[str, tuple[str, Any, str]] = {
    "problem": FILES,
    "checkpoints": FILES,
    "run": ("run", Path, "A run folder."),
    "clients": ("run", Path, "A run folder with client weights."),
    "runs": ("runs", list[Path], "Run folders."),
}
#: Options of subjects that only Python has.
UNTYPED = ("round", "name")


def command(name: str) -> Any:
    """The verb of a diagnostic."""
    return command_of(name, verb(diagnostic.get(name)))


def command_of(name: str, target: Any) -> Any:
    """A verb's function, or a Typer, as a command."""
    if not isinstance(target, typer.Typer):
        verb = target
        target = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        target.command(name)(verb)
    command: Any = typer.main.get_command(target)
    command.name = name
    command.rich_help_panel = command.rich_help_panel or getattr(target, "rich_help_panel", None)
    return command


def verb(entry: Diagnostic) -> Callable[..., None]:
    """The function behind ``fldiag NAME``: its signature is the diagnostic's options and those that all share."""
    from fldiag.diagnosis.options import BY_SUBJECT

    argument, kind, text = TARGETS[entry.on]
    fields = {**entry.options.model_fields}
    fields |= {n: f for n, f in BY_SUBJECT[entry.on].model_fields.items() if n not in fields}
    parameters = [
        parameter(argument, Annotated[kind, typer.Argument(help=text)]),
        *(_option(name, field) for name, field in fields.items() if name not in UNTYPED),
        parameter("out", Out, None),
        parameter("json", Json, False),
        *([parameter("strict", Strict, False)] if entry.fails else []),
    ]

    def run(**values: Any) -> None:
        targets = values.pop(argument)
        options = {n: v for n, v in values.items() if n in fields and v is not None}
        others = {n: v for n, v in values.items() if n not in fields}
        ask(entry.name, targets if isinstance(targets, list) else [targets], options, **others)

    run.__name__ = entry.name
    run.__doc__ = f"{entry.headline}\n\nExample: fldiag {entry.name} {entry.example or '…'}"
    shared = {"width", "format", "allow_code"} - {*fields}
    return signed(run, parameters, sorted(shared))


def ask(
    name: str,
    targets: Sequence[Path],
    options: Mapping[str, Any],
    *,
    out: Path | None,
    allow_code: Sequence[str],
    json: bool,
    strict: bool = False,
) -> None:
    """Open, ask, write, and say what a person reads first; with ``strict`` exit code 3 where a check failed."""
    from fldiag.diagnosis.diagnose import diagnose

    console = Console(json)
    seen: dict[str, Any] = {"bar": console.progress, "tell": console.note}
    answer = diagnose(name, targets, options, out=out, allow_code=allow_code, **seen)
    console.show(answer.summary())
    console.done(*answer.files)
    if strict and answer.entry.fails is not None and answer.entry.fails(answer.table):
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
