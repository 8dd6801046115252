"""How examples are dealt to clients."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fldiag.cli.app import app
from fldiag.cli.console import Console, errors
from fldiag.cli.options import (
    AllowCode,
    Debug,
    Download,
    Format,
    Json,
    Out,
    Set,
    TrustFile,
    Width,
)
from fldiag.errors import FldiagError


@app.command(rich_help_panel="Clients")
def partition(
    config: Annotated[
        str,
        typer.Argument(help="A preset, a TOML file or a run folder; with --data a partition file."),
    ],
    set_: Set = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Check a partition file (npz or JSON) against these data: NAME, npz:PATH, csv:PATH or "
            "pkg.mod:loader. Exit code 3 if training would refuse it."
        ),
    ] = None,
    allow_code: AllowCode = None,
    trust_file: TrustFile = False,
    download: Download = False,
    out: Out = None,
    width: Width = None,
    format: Format = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw the label distribution per client, and measure how far clients are from alike.

    Example: fldiag partition digits --set partition.alpha=0.5
    """
    from fldiag.diagnosis.diagnose import FALLBACK, Answer, diagnose, prepare, write_files
    from fldiag.diagnostics import partition as partitions
    from fldiag.plotting.sheet import use_sheet
    from fldiag.registry import diagnostic
    from fldiag.results.provenance import provenance

    with errors(debug), use_sheet(width, format):
        console, fault = Console(json), ""
        if data is not None and set_:
            remedy = "--set partition.kind=file --set partition.path=FILE"
            raise FldiagError(
                "--set is for a preset, --data for a partition file", remedy, usage=True
            )
        if os.path.isfile(Path(config) / "run.json"):
            options = {"download": download}
            answer = diagnose("partition", [config], options, out=out, allow_code=allow_code or [])
        else:
            if data is not None:
                table, fault = partitions.of_file(config, data, download)
            elif Path(config).suffix in (".json", ".npz"):
                what = f"{config} does not say of which data it is"
                raise FldiagError(what, f"fldiag partition {config} --data NAME", usage=True)
            else:
                table = partitions.of_config(config, set_ or [], download)
            answer = Answer(diagnostic.get("partition"), table, {})
            path = prepare(out or FALLBACK) / partitions.file_name(table)
            write_files(answer, path, provenance())
        console.show(answer.summary())
        if fault:
            console.alarm(f"fault: {fault}")
        console.result["faults"] = [fault] if fault else []
        console.done(*answer.files)
        if fault:
            sys.exit(3)
