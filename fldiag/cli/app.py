"""The command line's root, to which the modules beside it add their verbs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fldiag import __version__
from fldiag.cli import derived
from fldiag.cli.console import errors
from fldiag.cli.options import signed
from fldiag.errors import FldiagError, unknown
from fldiag.registry import built_in, entry_points


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
                return derived.command(cmd_name)
        return TyperCommand(cmd_name, help="Of another package.")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *rest = args
        if name not in self.list_commands(ctx):
            raise unknown("command", name, self.list_commands(ctx))
        return name, self.commands.get(name) or derived.command(name), rest

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
        own = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        app.command(name, rich_help_panel=panel)(signed(function, own, shared))
        return function

    return register
