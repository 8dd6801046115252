"""Options that several verbs share, spelled once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path | None, typer.Option(help="Folder to write to.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or mps.")]
Seed = Annotated[int | None, typer.Option(help="Random seed.")]
Executor = Annotated[
    str, typer.Option(help="Where work runs: serial, processes[:N] or dask[:ADDRESS].")
]
Shard = Annotated[
    str | None,
    typer.Option(
        help="Run only the I-th of N parts (I/N), for job arrays; a final call without "
        "--shard combines the results."
    ),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="On an error, show the traceback and the versions.")
]
Data = Annotated[str | None, typer.Option(help="Data: NAME, npz:PATH, csv:PATH or pkg.mod:loader.")]
Root = Annotated[
    str | None, typer.Option(help="Folder that holds the data (default $FLDIAG_DATA).")
]
Width = Annotated[
    str | None,
    typer.Option(
        help="Width of pictures: single or double (a journal's columns of 85 and 175 mm), or "
        "millimetres. Default: each picture's own."
    ),
]
Format = Annotated[
    str | None,
    typer.Option(help="Picture formats, separated by commas: pdf, png, svg (default: pdf,png)."),
]
AllowCode = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PKG.MOD:NAME",
        help="Import this code although only the run or "
        "checkpoint names it; may be given several times.",
    ),
]
TrustFile = Annotated[
    bool,
    typer.Option(
        "--trust-file",
        help="The .pt files are your own. Torch before 2.10 cannot read those of strangers safely, so that fldiag refuses them "
        "there without this.",
        callback=lambda value: os.environ.update(FLDIAG_TRUST_FILES="1") if value else None,
        expose_value=False,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override a setting: section.key=value; may be given several times."
    ),
]
Download = Annotated[bool, typer.Option("--download", help="Download a missing public data set.")]
