"""Options that several verbs share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path | None, typer.Option(help="Folder to write to.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Seed = Annotated[int | None, typer.Option(help="Random seed.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Data = Annotated[str | None, typer.Option(help="Its data: NAME, npz:PATH or pkg.mod:loader.")]
Root = Annotated[str | None, typer.Option(help="Folder that holds the data (default $FLDIAG_DATA).")]
Download = Annotated[bool, typer.Option("--download", help="Fetch a missing public data set.")]


def device_of(name: str) -> str:
    if name == "cpu":
        return name
    import torch

    from fldiag.errors import FldiagError, unknown

    if name not in ("auto", "cuda"):
        raise unknown("device", name, ("auto", "cpu", "cuda"))
    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise FldiagError("no CUDA device is available", "use --device cpu", usage=True)
    return "cpu"
