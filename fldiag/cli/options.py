"""Options that several verbs share, or hand on as they are, spelled once."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fldiag import user_code
from fldiag.cli.console import Console

Out = Annotated[Path | None, typer.Option(help="Folder to write to.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Seed = Annotated[int | None, typer.Option(help="Random seed.")]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or mps.")]
Download = Annotated[bool, typer.Option("--download", help="Download a missing public data set.")]
Executor = Annotated[
    str, typer.Option(help="Where work runs: serial, processes[:N] or dask[:ADDRESS].")
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="On an error, show the traceback.", expose_value=False),
]
AllowCode = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PKG.MOD:NAME",
        help="Import this code although only the run or checkpoint names it; may be given several times.",
        callback=lambda value: user_code.allow(value),
        expose_value=False,
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


def _sheet(ctx: typer.Context, param: typer.CallbackParam, value: str | None) -> None:
    """What the verb draws has this width, or this format."""
    from fldiag.plotting.style import use_sheet

    ctx.with_resource(use_sheet(**{str(param.name): value}))


def _text(help: str, **more: Any) -> tuple[Any, Any]:
    """An option that is a text, or not given."""
    return Annotated[str | None, typer.Option(help=help, **more)], None


#: Options that a verb takes as ``**options``, or that count for whatever it calls.
SHARED: dict[str, tuple[Any, Any]] = {
    "executor": (Executor, "serial"),
    "device": (Device, "auto"),
    "model": _text("Model of a plain state_dict: NAME or pkg.mod:factory."),
    "data": _text("Data: NAME, npz:PATH, csv:PATH or pkg.mod:loader."),
    "download": (Download, False),
    "allow_code": (AllowCode, ()),
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
    "json": (Json, False),
    "trust_file": (TrustFile, False),
    "debug": (Debug, False),
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
