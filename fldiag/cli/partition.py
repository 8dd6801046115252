"""The verb that draws the label distribution per client."""

from __future__ import annotations

from typing import Annotated

import typer

from fldiag.cli.app import app
from fldiag.cli.options import AllowCode, Debug, Download, Format, Json, Out, Width
from fldiag.console import Console, errors


@app.command()
def partition(
    config: Annotated[str, typer.Argument(help="A preset, a TOML file or a run folder.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Override a setting: section.key=value; may be given several times."
        ),
    ] = None,
    allow_code: AllowCode = None,
    download: Download = False,
    out: Out = None,
    width: Width = None,
    format: Format = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw the label distribution per client as a bubble chart of classes and clients.

    Example: fldiag partition digits --set partition.alpha=0.5
    """
    with errors(debug):
        from fldiag.plotting import sheet
        from fldiag.verbs import partition as verb

        with sheet.use_sheet(width, format):
            verb.partition(Console(json), config, set_ or [], out, download, allow_code or [])
