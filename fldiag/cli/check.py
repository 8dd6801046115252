"""The verbs that compare: a check for build servers, and all numbers of two sides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fldiag.cli.app import app
from fldiag.cli.options import (
    AllowCode,
    Data,
    Debug,
    Device,
    Download,
    Format,
    Json,
    Out,
    Root,
    Width,
)
from fldiag.console import Console, errors

Given = Annotated[
    list[Path] | None,
    typer.Argument(
        help="A and B: run folders, checkpoint files, quoted patterns, or folders "
        "with the runs of one method."
    ),
]
A = Annotated[
    list[Path] | None,
    typer.Option("--a", help="Runs of one method, on side A; may be given several times."),
]
B = Annotated[
    list[Path] | None,
    typer.Option("--b", help="Runs of one method, on side B; may be given several times."),
]
Pair = Annotated[
    str, typer.Option(help="How to pair the runs of both sides: by seed, or by order.")
]
Level = Annotated[float, typer.Option(help="Confidence level of the intervals.")]
Model = Annotated[
    str | None, typer.Option(help="Model of a plain state_dict: NAME or pkg.mod:factory.")
]


@app.command()
def check(
    sides: Given = None,
    a: A = None,
    b: B = None,
    baseline: Annotated[
        list[Path] | None, typer.Option("--baseline", help="Side B; may be given several times.")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            help="A condition such as 'accuracy < baseline - 1pt', 'loss > baseline + 5%' or 'forgetting > 0.2'; "
            "may be given several times (default: accuracy < baseline). fldiag diff lists the available "
            "numbers.",
        ),
    ] = None,
    pair: Pair = "seed",
    level: Level = 0.95,
    strict: Annotated[
        bool, typer.Option("--strict", help="Also fail if a condition is undecided.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", help="Also write JUnit XML to this file.")
    ] = None,
    model: Model = None,
    data: Data = None,
    allow_code: AllowCode = None,
    root: Root = None,
    download: Download = False,
    out: Out = None,
    json: Json = False,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Test whether A is better than B, or a run still as good as its baseline. Exit code 3 if a condition clearly holds, 2 if
    a number could not be computed.

    One run or checkpoint per side: compares these two models over test examples and clients. Several runs per side: compares two
    methods over pairs of runs with equal seeds. The output says which of the two questions it answers.

    Example: fldiag check RUN --baseline MAIN --fail-if 'accuracy < baseline - 1pt' --junit check.xml
    """
    with errors(debug):
        from fldiag.verbs import check as verb

        verb.check(
            Console(json),
            verb.both(sides or [], a or [], b or [], baseline or []),
            fail_if or [],
            pair=cast(Any, pair),
            level=level,
            strict=strict,
            xml=junit,
            out=out,
            allow_code=allow_code or [],
            subject_options={
                "model": model,
                "data": data,
                "root": root,
                "download": download,
                "device": device,
            },
        )


@app.command()
def diff(
    sides: Given = None,
    a: A = None,
    b: B = None,
    number: Annotated[
        list[str] | None,
        typer.Option(
            "--number", help="Only this number; may be given several times (default: all)."
        ),
    ] = None,
    pair: Pair = "seed",
    level: Level = 0.95,
    model: Model = None,
    data: Data = None,
    allow_code: AllowCode = None,
    root: Root = None,
    download: Download = False,
    out: Out = None,
    width: Width = None,
    format: Format = None,
    json: Json = False,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Compare all numbers of two sides in a table and a picture: accuracy, loss, λ1, forgetting, drift and fairness, each with
    its difference and interval.

    Example: fldiag diff checkpoints/digits-fedavg-s0-1a2b3c4d checkpoints/digits-fedsol-s0-5e6f7a8b
    """
    with errors(debug):
        from fldiag.plotting import sheet
        from fldiag.verbs import check as verb

        with sheet.use_sheet(width, format):
            verb.diff(
                Console(json),
                verb.both(sides or [], a or [], b or [], []),
                number or None,
                pair=cast(Any, pair),
                level=level,
                out=out,
                allow_code=allow_code or [],
                subject_options={
                    "model": model,
                    "data": data,
                    "root": root,
                    "download": download,
                    "device": device,
                },
            )
