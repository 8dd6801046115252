"""The command line's root, to which the modules beside it add their verbs."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fldiag import names
from fldiag.cli import derived
from fldiag.cli.console import errors
from fldiag.errors import FldiagError, unknown
from fldiag.registry import entry_points, load_entry_point, package, unusable
from fldiag.version import version as installed_version

#: The groups of ``fldiag --help`` in their order, and what people ask most in the order within them.
GROUPS = ("Start", "Weights", "Clients", "Compare", "Papers", "Files", "Other packages")
FIRST = (
    *("demo", "train", "sweep", "list", "explain"),
    *("landscape", "spectrum", "paths", "sharpness", "diagnose"),
    *("matching", "forgetting", "drift", "fairness", "flatness", "geometry", "account", "lora"),
)


class Verbs(TyperGroup):
    """The verbs of fldiag, then those of other packages. A verb of a diagnostic is made when it is typed: its options are those
    of the diagnostic, which is imported for them."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = [*super().list_commands(ctx), *names.built_in("diagnostics")]
        others = [*entry_points("fldiag.verbs"), *entry_points("fldiag.diagnostics")]
        verbs = list(dict.fromkeys([*own, *others]))
        panels = {name: self.get_command(ctx, name).rich_help_panel for name in verbs}
        groups, first = [*GROUPS, *panels.values()], [*FIRST, *verbs]
        return sorted(verbs, key=lambda name: (groups.index(panels[name]), first.index(name)))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if command := super().get_command(ctx, cmd_name):
            return command
        if item := names.built_in("diagnostics").get(cmd_name):
            group = "Weights" if item.on in ("problem", "checkpoints") else "Clients"
            return TyperCommand(cmd_name, help=item.summary, rich_help_panel=group)
        if point := entry_points("fldiag.verbs").get(cmd_name):
            return _verb(point)
        if point := entry_points("fldiag.diagnostics").get(cmd_name):
            summary = f"A diagnostic of the package {package(point)}."
            return TyperCommand(cmd_name, help=summary, rich_help_panel=GROUPS[-1])
        return None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        with errors(debug=False):
            if not name.startswith("-") and self.get_command(ctx, name) is None:
                raise unknown("command", name, self.list_commands(ctx))
            is_verb = name in self.commands or name in entry_points("fldiag.verbs")
            if not is_verb and not name.startswith("-"):
                return name, derived.command(name), args[1:]
        return super().resolve_command(ctx, args)


def _verb(point: EntryPoint) -> Any:
    """The command behind an entry point: a function with typer's annotations, or a Typer with several. Of one that cannot be
    imported a command that says so."""
    try:
        target = load_entry_point(point, "verb")
        try:
            command = derived.command_of(point.name, target)
        except Exception as cause:  # no function, or annotations that typer does not take
            raise unusable(point, "verb", cause) from cause
    except FldiagError as error:
        return _broken(point.name, error)
    command.rich_help_panel = command.rich_help_panel or GROUPS[-1]
    if not isinstance(command.rich_help_panel, str):
        command.rich_help_panel = GROUPS[-1]
    return command


def _broken(name: str, error: FldiagError) -> Any:
    def complain() -> None:
        with errors(debug=False):
            raise error

    return TyperCommand(
        name,
        callback=complain,
        help=f"{error}.",
        rich_help_panel=GROUPS[-1],
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


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
        print(installed_version())
        raise typer.Exit
