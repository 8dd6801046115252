"""The verbs of diagnostics, made from the registry: a diagnostic's file says its options, and nobody types them again."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fldiag.cli.console import Console, errors
from fldiag.cli.options import AllowCode, Debug, Device, Format, Json, Out, TrustFile, Width
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
#: Options of subjects that only Python has, and the device, which all verbs have.
UNTYPED = ("device", "round", "stack", "name")


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
    return command


def verb(entry: Diagnostic) -> Callable[..., None]:
    """The function behind ``fldiag NAME``: its signature is the diagnostic's options and those that all share."""
    from fldiag.diagnosis.options import BY_SUBJECT

    argument, kind, text = TARGETS[entry.on]
    own, shared = entry.options.model_fields, BY_SUBJECT[entry.on].model_fields
    options = {n: _parameter(n, f) for n, f in own.items() if n != "device" and typed(f.annotation)}
    options |= {n: _parameter(n, f) for n, f in shared.items() if n not in (*own, *UNTYPED)}
    pictured = {"width": Width, "format": Format} if entry.draw else {}
    pictured = {n: kind for n, kind in pictured.items() if n not in options}
    others: dict[str, tuple[Any, Any]] = {
        **({"strict": (Strict, False)} if entry.fails else {}),
        "out": (Out, None),
        **{n: (kind, None) for n, kind in pictured.items()},
        "allow_code": (AllowCode, None),
        "trust_file": (TrustFile, False),
        "json": (Json, False),
        "device": (Device, "auto"),
        "debug": (Debug, False),
    }
    parameters = [
        _keyword(argument, Annotated[kind, typer.Argument(help=text)]),
        *options.values(),
        *(_keyword(n, kind, default) for n, (kind, default) in others.items()),
    ]

    def run(**values: Any) -> None:
        with errors(values["debug"]):
            targets = values[argument]
            changes = {n: values[n] for n, p in options.items() if values[n] != p.default}
            if takes_device(entry):
                changes["device"] = values["device"]
            ask(
                Console(values["json"]),
                entry.name,
                targets if isinstance(targets, list) else [targets],
                changes,
                values["out"],
                strict=entry.fails is not None and values["strict"],
                allow_code=values["allow_code"] or [],
                sheet={n: values[n] for n in pictured},
            )

    run.__name__ = entry.name
    run.__doc__ = f"{entry.headline}\n\nExample: fldiag {entry.name} {entry.example or '…'}"
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def ask(
    console: Console,
    name: str,
    paths: Sequence[Path],
    options: Mapping[str, Any],
    out: Path | None,
    *,
    strict: bool = False,
    allow_code: Sequence[str] = (),
    sheet: Mapping[str, Any],
) -> None:
    """Open, ask, write, and say what a person reads first; with ``strict`` exit code 3 where a check failed."""
    from fldiag.diagnosis.diagnose import diagnose
    from fldiag.plotting.sheet import use_sheet

    with use_sheet(**sheet):
        answer = diagnose(
            name,
            paths,
            options,
            out=out,
            allow_code=allow_code,
            bar=console.progress,
            tell=console.note,
        )
    console.show(answer.summary())
    console.done(*answer.files)
    if strict and answer.entry.fails is not None and answer.entry.fails(answer.table):
        sys.exit(3)


def takes_device(entry: Diagnostic) -> bool:
    """Whether the diagnostic computes on a device: its subjects are put there, or it has an option for it."""
    return entry.on != "runs" or "device" in entry.options.model_fields


def _keyword(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _parameter(name: str, field: Any) -> inspect.Parameter:
    """An option; what Python takes as any object is text when it is typed."""
    kind = typed(field.annotation) or str
    flag, text, default = f"--{name.replace('_', '-')}", field.description or "", field.default
    flags = [flag, f"-{name}"] if len(name) == 1 else [flag]
    if kind is bool and default:
        flags = [f"{flag}/--no-{flag[2:]}"]
    if isinstance(default, (list, tuple)):  # values that are typed replace it and are not added
        values = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in default)
        text, default = f"{text} May be given several times; default {values}.", None
    option = typer.Option(*flags, help=text)
    if field.is_required():
        return _keyword(name, Annotated[kind, option])
    return _keyword(name, Annotated[kind | None if default is None else kind, option], default)


def typed(annotation: Any) -> Any:
    """The type of an option on the command line; None where it cannot be typed.

    >>> typed(int | None), typed(typing.Literal["kl", "l2"]), typed(tuple[float, ...]), typed(dict)
    (<class 'int'>, <class 'str'>, list[float], None)
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return typed(args[0])
    if origin is typing.Literal:
        return str
    if origin in (typing.Union, types.UnionType):
        kinds = {typed(a) for a in args if a is not type(None)}
        return kinds.pop() if len(kinds) == 1 else None
    if origin in (tuple, list):
        inner = typed(args[0])
        return None if inner is None else list[inner]  # type: ignore[valid-type]
    return annotation if annotation in (int, float, str, bool) else None
