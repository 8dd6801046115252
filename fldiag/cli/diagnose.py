"""``diagnose`` asks any diagnostic by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fldiag.cli.app import app
from fldiag.cli.console import Console, errors
from fldiag.cli.derived import ask, takes_device
from fldiag.cli.options import AllowCode, Debug, Device, Format, Json, Out, TrustFile, Width


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
        from fldiag.config import parse_override
        from fldiag.diagnosis.diagnose import find_diagnostic

        options = dict(map(parse_override, set_ or []))
        if takes_device(find_diagnostic(name)):
            options.setdefault("device", device)
        sheet = {"width": width, "format": format}
        ask(Console(json), name, targets, options, out, allow_code=allow_code or [], sheet=sheet)
