"""The command line's root, to which the modules beside it add their verbs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fldiag import known, plugins
from fldiag.cli import derived
from fldiag.cli.console import errors
from fldiag.cli.interrupt import work_begins
from fldiag.errors import FldiagError, unknown
from fldiag.version import version as installed_version

#: Typer 0.26 and later carry their own copy of click and do not install click; earlier ones use the installed click.
NoSuchOption: Any = importlib.import_module(typer.BadParameter.__module__).NoSuchOption


#: The groups of ``fldiag --help`` in their order. Verbs that name none of them come last.
GROUPS = ("Start", "Weights", "Clients", "Compare", "Papers", "Files")
OTHER = "Other packages"
#: Options that typer gives the Typer of a program, which a verb is not.
COMPLETION = ("install_completion", "show_completion")


class Verbs(TyperGroup):
    """The verbs of fldiag, then those of other packages and of their diagnostics.

    A verb of another package is imported for the help and when it is typed; a diagnostic only when it is typed. Neither
    replaces a verb of fldiag, and one that cannot be imported stops only itself.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        commands = super().list_commands(ctx)
        names = dict.fromkeys([*commands, *plugin_verbs(), *known.packages("diagnostics")])
        groups = {name: self.get_command(ctx, name).rich_help_panel for name in names}
        order = (*GROUPS, OTHER, *groups.values())  # a package may name a further group
        return sorted(names, key=lambda name: order.index(groups[name]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if command := super().get_command(ctx, cmd_name):
            return command
        if cmd_name in plugin_verbs():
            return plugin_verb(plugin_verbs()[cmd_name])
        package = known.packages("diagnostics").get(cmd_name)
        if package is None:
            return None
        summary = f"A diagnostic of the package {package}."
        return TyperCommand(cmd_name, help=summary, rich_help_panel=OTHER)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if super().get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        if name in known.FLAGS:
            with errors(debug=False):
                raise FldiagError(
                    f"{name} has no verb of its own",
                    f"use fldiag {known.FLAGS[name]}",
                    usage=True,
                )
        if name not in plugin_verbs() and name in known.packages("diagnostics"):
            return name, derived.command(name), args[1:]
        if name not in plugin_verbs() and not name.startswith("-"):
            with errors(debug=False):
                raise unknown("command", name, self.list_commands(ctx))
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


def plugin_verbs() -> dict[str, EntryPoint]:
    """The verbs of other packages by name, as docs/how_to/extend.md describes them."""
    points = plugins.entry_points("fldiag.verbs")
    return {point.name: point for point in points if point.name not in known.FLAGS}


def plugin_verb(point: EntryPoint) -> Any:
    """The command behind an entry point: a function with typer's annotations, or a Typer with several. Of one that cannot be
    imported a command that says so."""
    try:
        target = plugins.load(point, "verb")
        try:
            command = _command(point.name, target)
        except Exception as cause:  # no function, or annotations that typer does not take
            raise plugins.unusable(point, "verb", cause) from cause
    except FldiagError as error:
        return _broken(point.name, error)
    if plugins.package(point) != "fldiag":
        command.invoke = working(command.invoke)
    return command


def working(invoke: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A verb that may not know ``fldiag.cli.interrupt``: Ctrl-C raises KeyboardInterrupt in all of it, and is one line."""

    def invoke_working(context: Any) -> Any:
        work_begins()
        try:
            return invoke(context)
        except KeyboardInterrupt:
            print("error: stopped", file=sys.stderr)
            raise typer.Exit(1) from None

    return invoke_working


def _command(name: str, target: Any) -> Any:
    if not isinstance(target, typer.Typer):
        verb = target
        target = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        target.command(name)(verb)
    command: Any = typer.main.get_command(target)
    command.name = name
    panels = (command.rich_help_panel, target.rich_help_panel)  # the second is a group's
    command.rich_help_panel = next((panel for panel in panels if isinstance(panel, str)), OTHER)
    command.params = [p for p in command.params if p.name not in COMPLETION]
    return command


def _broken(name: str, error: FldiagError) -> Any:
    def complain() -> None:
        with errors(debug=False):
            raise error

    return TyperCommand(
        name,
        callback=complain,
        help=f"{error}.",
        rich_help_panel=OTHER,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


def _explained(error: Any) -> Any:
    """Of a verb that takes a config: an unknown option that is one of its keys names the way to set it."""
    from fldiag import sections
    from fldiag.config import Config

    key = error.option_name.lstrip("-").replace("-", "_")
    config_keys: list[str] = []
    for name, field in Config.model_fields.items():
        section = field.annotation
        inner = (
            section.model_fields
            if isinstance(section, type) and issubclass(section, sections.ConfigSection)
            else {}
        )
        config_keys += (
            [f"{name}.name"] if name == key and "name" in inner else [name] if name == key else []
        )
        config_keys += [f"{name}.{k}" for k in inner if key in (k, f"{name}_{k}")]
    if not config_keys:
        return error
    text = f"No such option: {error.option_name}. It is a key of the config: --set {config_keys[0]}=..."
    return NoSuchOption(error.option_name, message=text, ctx=error.ctx)


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
