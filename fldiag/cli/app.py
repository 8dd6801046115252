"""The command line's root, to which the modules beside it add their verbs."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fldiag import known
from fldiag.cli.derived import command
from fldiag.console import errors
from fldiag.errors import FldiagError

#: Typer 0.26 and later carry their own copy of click and do not install click; earlier ones use the installed click.
NoSuchOption: Any = importlib.import_module(typer.BadParameter.__module__).NoSuchOption


class Verbs(TyperGroup):
    """The verbs, and those of diagnostics that other packages bring: named in the help by their entry points, and imported
    when they are typed."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in known.plugins("diagnostics") if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        package = None if found else known.plugins("diagnostics").get(cmd_name)
        return (
            found
            if package is None
            else TyperCommand(cmd_name, help=f"A diagnostic of the package {package}.")
        )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if super().get_command(ctx, name) is None and name in known.plugins("diagnostics"):
            return name, command(name), args[1:]
        if name in known.FLAGS:
            with errors(debug=False):
                raise FldiagError(
                    f"{name} has no verb of its own",
                    f"use fldiag {known.FLAGS[name]}, or fldiag {known.command(name)}",
                    usage=True,
                )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except NoSuchOption as error:
            if error.ctx is None or not any(
                option.name == "set_" for option in error.ctx.command.params
            ):
                raise
            raise _explained(error) from None


def _explained(error: Any) -> Any:
    """Of a verb that takes a config: an unknown option that is one of its keys names the way to set it."""
    from fldiag import sections
    from fldiag.config import Config

    key = error.option_name.lstrip("-").replace("-", "_")
    found: list[str] = []
    for name, field in Config.model_fields.items():
        section = field.annotation
        inner = (
            section.model_fields
            if isinstance(section, type) and issubclass(section, sections.Section)
            else {}
        )
        found += (
            [f"{name}.name"] if name == key and "name" in inner else [name] if name == key else []
        )
        found += [f"{name}.{k}" for k in inner if key in (k, f"{name}_{k}")]
    if not found:
        return error
    text = f"No such option: {error.option_name}. It is a key of the config: --set {found[0]}=..."
    return NoSuchOption(error.option_name, message=text, ctx=error.ctx)


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Diagnose federated learning: train models and analyse their checkpoints.",
)
toy = typer.Typer(
    no_args_is_help=True, help="Two toy problems whose results can be checked by hand."
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from fldiag import version as own

        print(own.version())
        raise typer.Exit
