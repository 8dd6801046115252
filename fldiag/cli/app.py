"""What the command line shows; options that several verbs share; and its root, to which the modules beside it add their verbs.
Verbs of diagnostics are made from the registry: a diagnostic's file says its options, and nobody types them again."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import os
import signal
import sys
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from click.exceptions import Abort, ClickException, Exit
from typer.core import TyperCommand, TyperGroup

from fldiag.errors import FldiagError, __version__, error_text, printable, unknown
from fldiag.registry import (
    Diagnostic,
    Progress,
    allow,
    built_in,
    diagnostic,
    entry_points,
    load_entry_point,
)


class Console:
    """Results go to stdout (as JSON with ``machine``), progress and remarks to stderr."""

    def __init__(self, machine: bool = False):
        self.machine = machine
        self.result: dict[str, Any] = {}

    def progress(self, title: str) -> contextlib.AbstractContextManager[Progress]:
        """A bar on a terminal."""
        from fldiag.results.table import progress_bar

        return progress_bar(title)

    def say(self, text: str) -> None:
        if not self.machine:
            print(printable(text))

    def note(self, text: str) -> None:
        print(printable(text), file=sys.stderr)

    def table(self, rows: list[dict[str, Any]], columns: dict[str, str] | None = None) -> None:
        """Rows as an aligned table; ``columns`` maps keys to headings (default: all keys)."""
        self.result.setdefault("rows", []).extend(rows)
        if self.machine or not rows:
            return
        from rich.console import Console as Rich
        from rich.table import Table

        from fldiag.results.table import cell

        columns = columns or {key: key for row in rows for key in row}
        table = Table(*columns.values(), box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(printable(cell(row.get(key))) for key in columns))
        width = None if sys.stdout.isatty() else 160
        Rich(width=width, highlight=False, markup=False, emoji=False).print(table)

    def show(self, summary: Iterable[Any]) -> None:
        """The summary of a table; for machines its rows, and what the notes are about."""
        from fldiag.results.table import Sentence, SmallTable

        for item in summary:
            if isinstance(item, SmallTable):
                self.table(list(item.rows), dict(item.columns))
                continue
            (self.say if isinstance(item, Sentence) else self.note)(item.text)
            for key, value in (item.about or {}).items():
                self.result.setdefault(key, []).append(value)

    def done(self, *paths: Path) -> None:
        """The paths of what was written, a line each; the main file last."""
        self.result["paths"] = [str(p) for p in paths]
        if self.machine:
            print(json.dumps(self.result, default=_plain))
        for path in paths:
            self.say(str(path))


def _plain(value: Any) -> Any:
    """What JSON has no form for: numbers of numpy, missing entries of pandas, paths."""
    if type(value).__name__ == "NAType":
        return None
    return value.item() if hasattr(value, "item") else str(value)


@contextlib.contextmanager
def errors(debug: bool) -> Iterator[None]:
    """One message with the remedy instead of a traceback. Exit codes: 1 failed or stopped, 2 wrong use."""
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = lambda text, *place: _line("warning:", text)  # type: ignore[assignment]
            yield
    except BrokenPipeError:  # fldiag list | head -1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (Exception, KeyboardInterrupt) as error:
        if debug or isinstance(error, (Abort, ClickException, Exit)):
            raise
        if isinstance(error, KeyboardInterrupt):
            error = FldiagError(
                "stopped; finished work is kept",
                "to continue, run the same command again (a training with --resume)",
            )
        elif not isinstance(error, FldiagError):
            error = FldiagError(
                f"unexpected {error_text(error)}", "run again with --debug for the traceback"
            )
        _line("error:", error.what)
        if error.remedy:
            _line("  →", error.remedy)
        sys.exit(2 if error.usage else 1)


def _line(mark: str, text: Any) -> None:
    print(mark, " ".join(printable(str(text)).splitlines()), file=sys.stderr)


# Options that several verbs share, or hand on as they are, spelled once

Out = Annotated[Path | None, typer.Option(help="Folder to write to.")]
Seed = Annotated[int | None, typer.Option(help="Random seed.")]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or mps.")]
Download = Annotated[bool, typer.Option("--download", help="Download a missing public data set.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override a setting: section.key=value; may be given several times."
    ),
]


def _sheet(ctx: typer.Context, param: typer.CallbackParam, value: str | None) -> None:
    """What the verb draws has this width, or this format."""
    from fldiag.plotting.style import use_sheet

    ctx.with_resource(use_sheet(**{str(param.name): value}))


def _text(help: str, **more: Any) -> tuple[Any, Any]:
    """An option that is a text, or not given."""
    return Annotated[str | None, typer.Option(help=help, **more)], None


#: Options that a verb takes as ``**options``, or that count for whatever it calls.
SHARED: dict[str, tuple[Any, Any]] = {
    "executor": (
        Annotated[
            str, typer.Option(help="Where work runs: serial, processes[:N] or dask[:ADDRESS].")
        ],
        "serial",
    ),
    "device": (Device, "auto"),
    "model": _text("Model of a plain state_dict: NAME or pkg.mod:factory."),
    "data": _text("Data: NAME, npz:PATH, csv:PATH or pkg.mod:loader."),
    "download": (Download, False),
    "allow_code": (
        Annotated[
            list[str] | None,
            typer.Option(
                metavar="PKG.MOD:NAME",
                help="Import this code although only the run or checkpoint names it; may be given several times.",
                callback=lambda value: allow(value),
                expose_value=False,
            ),
        ],
        (),
    ),
    "strict": (
        Annotated[
            bool,
            typer.Option(
                "--strict", help="Exit with code 3 if there is a fault, or something is undecided."
            ),
        ],
        False,
    ),
    "shard": _text(
        "Run only the I-th of N parts (I/N), for job arrays; a final call without --shard combines the results."
    ),
    "pattern": _text(
        "The clients' files, such as 'round_{round}/client_{client}.pt' (* stands for any text)."
    ),
    "global_pattern": _text(
        "The global models after each round, such as 'round_{round}/global.pt'."
    ),
    "partition": _text("Which examples belong to which client: npz or JSON, client -> indices."),
    "method": (Annotated[str, typer.Option(help="Name of the method in tables.")], "foreign"),
    "key": _text("Set of weights of files that hold several, such as model_ema."),
    "width": _text(
        "Width of pictures: single or double (a journal's columns of 85 and 175 mm), or millimetres (default: each its own).",
        callback=_sheet,
        expose_value=False,
    ),
    "format": _text(
        "Picture formats, separated by commas: pdf, png, svg (default: pdf,png).",
        callback=_sheet,
        expose_value=False,
    ),
    "json": (
        Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")],
        False,
    ),
    "trust_file": (
        Annotated[
            bool,
            typer.Option(
                "--trust-file",
                help="The .pt files are your own. Torch before 2.10 cannot read those of strangers safely, so that fldiag "
                "refuses them there without this.",
                callback=lambda value: os.environ.update(FLDIAG_TRUST_FILES="1") if value else None,
                expose_value=False,
            ),
        ],
        False,
    ),
    "debug": (
        Annotated[
            bool,
            typer.Option("--debug", help="On an error, show the traceback.", expose_value=False),
        ],
        False,
    ),
}
#: Options of all verbs, and those that no verb is given.
EVERYWHERE = ("json", "trust_file", "debug")
ASIDE = ("width", "format", "allow_code", "trust_file", "debug")


def signed(
    function: Callable[..., None], own: Mapping[str, tuple[Any, Any]], shared: Iterable[str]
) -> Callable[..., None]:
    """The function of a Console, with parameters of its own (annotation and default of each) and shared ones."""

    @functools.wraps(function)
    def run(json: bool, **values: Any) -> None:
        options = {name: value for name, value in values.items() if name not in ASIDE}
        function(Console(json), **options)

    options = {**own, **{name: SHARED[name] for name in (*shared, *EVERYWHERE)}}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for name, (kind, default) in options.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


# Verbs


class Verbs(TyperGroup):
    """The verbs of fldiag, then those of other packages. One of a diagnostic is made when it is typed: its options are those of
    the diagnostic, which is imported for them."""

    def list_commands(self, ctx: Any) -> list[str]:
        others = {**entry_points("fldiag.verbs"), **entry_points("fldiag.diagnostics")}
        return list(dict.fromkeys([*self.commands, *built_in("diagnostics"), *others]))

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


def main() -> None:
    """What the command ``fldiag`` calls."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a λ that the terminal lacks is a question mark
    # who ends a job says it this way; finished work is kept as with Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()


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
        function, target = target, typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        target.command(name)(function)
    click_command: Any = typer.main.get_command(target)
    click_command.name, panel = name, getattr(target, "rich_help_panel", None)
    click_command.rich_help_panel = click_command.rich_help_panel or panel
    return click_command


def of_diagnostic(entry: Diagnostic) -> Callable[..., None]:
    """The function behind ``fldiag NAME``: its signature is the diagnostic's options and those that all share."""
    from fldiag.diagnosis.diagnose import BY_SUBJECT

    of_weights = entry.on in ("problem", "checkpoints")
    text = f"Run folders{', or checkpoint files (.pt, .safetensors)' if of_weights else ''}."
    own = entry.options.model_fields
    fields = {**own, **BY_SUBJECT[entry.on].model_fields, **own}
    parameters = {
        "targets": (Annotated[list[Path], typer.Argument(help=text)], ...),
        # which round is Python's to say: a checkpoint file has one
        **{name: _option(name, field) for name, field in fields.items() if name != "round"},
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
