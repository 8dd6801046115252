"""Options that several verbs share, spelled once."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer


def _sheet(ctx: typer.Context, param: typer.CallbackParam, value: str | None) -> None:
    """What the verb draws has this width, or this format."""
    from fldiag.plotting.style import use_sheet

    ctx.with_resource(use_sheet(**{str(param.name): value}))


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
    bool,
    typer.Option("--debug", help="On an error, show the traceback.", expose_value=False),
]
Data = Annotated[str | None, typer.Option(help="Data: NAME, npz:PATH, csv:PATH or pkg.mod:loader.")]
Width = Annotated[
    str | None,
    typer.Option(
        help="Width of pictures: single or double (a journal's columns of 85 and 175 mm), or "
        "millimetres. Default: each picture's own.",
        callback=_sheet,
        expose_value=False,
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        help="Picture formats, separated by commas: pdf, png, svg (default: pdf,png).",
        callback=_sheet,
        expose_value=False,
    ),
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
Model = Annotated[
    str | None, typer.Option(help="Model of a plain state_dict: NAME or pkg.mod:factory.")
]
#: Options that a verb takes together, as ``**options``, or that count for whatever it calls: annotation and default.
SHARED: dict[str, tuple[Any, Any]] = {
    "executor": (Executor, "serial"),
    "model": (Model, None),
    "data": (Data, None),
    "allow_code": (AllowCode, ()),
    "download": (Download, False),
    "device": (Device, "auto"),
    "width": (Width, None),
    "format": (Format, None),
    "trust_file": (TrustFile, False),
    "debug": (Debug, False),
}
#: Options of all verbs, and those that are not handed to a verb.
EVERYWHERE = ("trust_file", "debug")
ASIDE = ("width", "format", *EVERYWHERE)


def parameter(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    """A parameter of a verb."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def signed(
    function: Callable[..., None], own: Iterable[inspect.Parameter], shared: Iterable[str]
) -> Callable[..., None]:
    """The function with these parameters and shared options. Those that count by themselves it is not given."""

    @functools.wraps(function)
    def run(**values: Any) -> None:
        function(**{name: value for name, value in values.items() if name not in ASIDE})

    parameters = [*own, *(parameter(name, *SHARED[name]) for name in (*shared, *EVERYWHERE))]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
