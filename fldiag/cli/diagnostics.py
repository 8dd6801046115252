"""The verbs of all diagnostics, and ``diagnose``, which asks any of them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fldiag import known
from fldiag.cli.app import app
from fldiag.cli.console import Console, errors
from fldiag.cli.derived import group, takes_device, verb
from fldiag.cli.options import AllowCode, Debug, Device, Format, Json, Out, TrustFile, Width
from fldiag.plotting import sheet


def add(name: str) -> None:
    """Make ``fldiag NAME`` known, for a diagnostic that is built in."""
    item = known.built_in()["diagnostics"][name]
    app.command(name, rich_help_panel=group(item))(verb(name, item))


@app.command(rich_help_panel="Weights")
def diagnose(
    name: Annotated[
        str,
        typer.Argument(
            help="A diagnostic (fldiag list diagnostics), or a function of your own: pkg.mod:function."
        ),
    ],
    targets: Annotated[list[Path], typer.Argument(help="Checkpoint files or run folders.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="option=value; may be given several times. fldiag explain NAME lists the options.",
        ),
    ] = None,
    out: Out = None,
    allow_code: AllowCode = None,
    trust_file: TrustFile = False,
    width: Width = None,
    format: Format = None,
    json: Json = False,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Run any diagnostic, including those of other packages and your own; set its options with --set.

    Example: fldiag diagnose spectrum checkpoints/example/fedsol-digits.pt --set k=3
    """
    with errors(debug):
        from fldiag.cli import asking
        from fldiag.config import parse_override
        from fldiag.diagnosis.question import find_diagnostic

        options = dict(parse_override(text) for text in set_ or [])
        if takes_device(known.describe(find_diagnostic(name))):
            options.setdefault("device", device)
        with sheet.use_sheet(width, format):
            asking.ask(Console(json), name, targets, options, out, allow_code=allow_code or [])
