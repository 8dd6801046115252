"""Options that several verbs share, spelled once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path | None, typer.Option(help="Folder to write to.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Seed = Annotated[int | None, typer.Option(help="Seed of what is random here.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Model = Annotated[str | None, typer.Option(help="Model of a plain state_dict: NAME or pkg.mod:factory.")]
Data = Annotated[str | None, typer.Option(help="Its data: NAME, npz:PATH or pkg.mod:loader.")]
Root = Annotated[str | None, typer.Option(help="Folder that holds the data (default $FLDIAG_DATA).")]
Download = Annotated[bool, typer.Option("--download", help="Fetch a missing public data set.")]
Slice = Annotated[str, typer.Option("--slice", help="train, test, client:7, client:7/test (its class mixture) or client:7/own "
                                                    "(its classes).")]
Samples = Annotated[int | None, typer.Option(help="At most this many examples, classes kept in proportion.")]
Client = Annotated[int | None, typer.Option(help="The trained weights of this client, not the global ones.")]
Precision = Annotated[str, typer.Option(help="fp32 or fp64.")]
Memory = Annotated[str | None, typer.Option(help="Memory for batches, graphs and bases of vectors, such as 500M (default 2G); "
                                                 "model, data and single vectors come on top.")]
Rounds = Annotated[str | None, typer.Option(help="Only these rounds: 5, 1,5,20-30, every:10 or last.")]
Checkpoints = Annotated[list[Path], typer.Argument(help="Checkpoint files (.pt, .safetensors) or run folders.")]


_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def room_of(memory: str | None) -> dict[str, int]:
    """The option ``memory`` in bytes, of such as 500M, 2GiB or 1500000000; nothing where it is not given."""
    if memory is None:
        return {}
    match = re.fullmatch(r"([\d.]+)\s*([kmg]?)i?b?", memory.strip().lower())
    try:
        found = int(float(match.group(1)) * _UNITS[match.group(2)]) if match else 0
    except ValueError:
        found = 0
    if found < 1:
        from fldiag.errors import FldiagError

        raise FldiagError(f"memory = {memory!r} is not a size", "give bytes, or such as 500M or 2G", usage=True)
    return {"memory": found}


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
