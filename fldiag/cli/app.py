"""The command line's root, to which the modules beside it add their verbs; those of diagnostics are made from the registry: a
diagnostic's file says its options, and nobody types them again."""

from __future__ import annotations

import contextlib
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fldiag.cli.console import Console, errors
from fldiag.cli.options import Out, signed
from fldiag.errors import FldiagError, __version__, unknown
from fldiag.registry import (
    Diagnostic,
    built_in,
    diagnostic,
    entry_points,
    load_entry_point,
)

#: Options of subjects that only Python has.
UNTYPED = ("round",)


class Verbs(TyperGroup):
    """The verbs of fldiag, then those of other packages. One of a diagnostic is made when it is typed: its options are those of
    the diagnostic, which is imported for them."""

    def list_commands(self, ctx: Any) -> list[str]:
        others = [*entry_points("fldiag.verbs"), *entry_points("fldiag.diagnostics")]
        verbs = [*self.commands, *built_in("diagnostics"), *others]
        return list(dict.fromkeys(verbs))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What the list shows; of a diagnostic, and of what cannot be imported, no more than that."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if item := built_in("diagnostics").get(cmd_name):
            group = "Weights" if item.on in ("problem", "checkpoints") else "Clients"
            return TyperCommand(cmd_name, help=item.summary, rich_help_panel=group)
        if cmd_name in entry_points("fldiag.verbs"):
            with contextlib.suppress(FldiagError):
                return command(cmd_name)
        return TyperCommand(cmd_name, help="Of another package.")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *rest = args
        if name not in self.list_commands(ctx):
            raise unknown("command", name, self.list_commands(ctx))
        return name, self.commands.get(name) or command(name), rest

    def invoke(self, ctx: Any) -> Any:
        with errors(debug="--debug" in ctx.args):
            return super().invoke(ctx)


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Diagnose federated learning: train models and analyse their checkpoints.",
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def verb(
    panel: str, *shared: str, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a verb; it gets a Console, and the shared options of these names as ``**options``."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        _, *parameters = inspect.signature(function, eval_str=True).parameters.values()
        own = {p.name: (p.annotation, p.default) for p in parameters if p.kind != p.VAR_KEYWORD}
        app.command(name, rich_help_panel=panel)(signed(function, own, shared))
        return function

    return register


def command(name: str) -> Any:
    """The verb of a diagnostic, or what another package brings as one: a function or a Typer."""
    point = entry_points("fldiag.verbs").get(name)
    target = load_entry_point(point, "verb") if point else of_diagnostic(diagnostic.get(name))
    if not isinstance(target, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name)(target)
        target = app
    command: Any = typer.main.get_command(target)
    command.name, panel = name, getattr(target, "rich_help_panel", None)
    command.rich_help_panel = command.rich_help_panel or panel
    return command


def of_diagnostic(entry: Diagnostic) -> Callable[..., None]:
    """The function behind ``fldiag NAME``: its signature is the diagnostic's options and those that all share."""
    from fldiag.diagnosis.subjects import BY_SUBJECT

    of_weights = entry.on in ("problem", "checkpoints")
    text = f"Run folders{', or checkpoint files (.pt, .safetensors)' if of_weights else ''}."
    own = entry.options.model_fields
    fields = {**own, **BY_SUBJECT[entry.on].model_fields, **own}
    parameters = {
        "targets": (Annotated[list[Path], typer.Argument(help=text)], ...),
        **{name: _option(name, field) for name, field in fields.items() if name not in UNTYPED},
        "out": (Out, None),
    }

    def run(console: Console, **values: Any) -> None:
        options = {n: v for n in fields if (v := values.pop(n, None)) is not None}
        ask(console, entry.name, options=options, **values)

    run.__name__ = entry.name
    run.__doc__ = f"{entry.headline}\n\nExample: fldiag {entry.name} {entry.example or '…'}"
    shared = ("width", "format", "allow_code", *["strict"] * (entry.fails is not None))
    return signed(run, parameters, shared)


def ask(
    console: Console,
    name: str,
    targets: Sequence[Any],
    options: Mapping[str, Any],
    *,
    out: Path | None,
    strict: bool = False,
) -> None:
    """Open, ask, write, and say what a person reads first; with ``strict`` exit code 3 where a check failed."""
    from fldiag.diagnosis.diagnose import diagnose

    answer = diagnose(name, targets, options, out=out, bar=console.progress, tell=console.note)
    console.show(answer.summary())
    console.done(*answer.files)
    fails = answer.entry.fails
    if strict and fails and fails(answer.table):
        sys.exit(3)


def _option(name: str, field: Any) -> tuple[Any, Any]:
    """Annotation and default of an option as text, which the diagnostic's schema reads: one that is not typed is None. A bool is
    a flag."""
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
        return Annotated[kind, option], ...
    return Annotated[kind | None, option], None
