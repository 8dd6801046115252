"""The verb that puts everything known about runs into one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fldiag.cli.app import app
from fldiag.cli.options import AllowCode, Debug, Device, Download, Json, Out, Root
from fldiag.console import Console, errors
from fldiag.device import device_of


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="One or more run folders.")],
    from_: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="Also use the tables in this folder and its "
            "subfolders, or this table; may be given several "
            "times.",
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    compute: Annotated[
        bool,
        typer.Option(
            "--compute", help="First compute what the first table lacks: λ₁, drift and forgetting."
        ),
    ] = False,
    allow_code: AllowCode = None,
    root: Root = None,
    download: Download = False,
    out: Out = None,
    json: Json = False,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Write one HTML file that compares runs. It works offline in any browser.

    It shows the tables that the other verbs have written: those in the runs' own folders, beside them, in fldiag-out here and
    in --from. What is missing is named with the command that makes it.

    Example: fldiag report checkpoints/digits-fedavg-s0-1a2b3c4d checkpoints/digits-fedsol-s0-5e6f7a8b
    """
    with errors(debug):
        from fldiag.verbs import report as verb

        verb.report(
            Console(json),
            runs,
            out,
            title=title,
            places=from_ or [],
            compute=compute,
            allow_code=allow_code or [],
            subject_options={
                "root": root,
                "download": download,
                "device": device_of(device) if compute else "cpu",
            },
        )
