"""The verbs that compare: a check for build servers, and all numbers of two sides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fldiag.cli.app import app
from fldiag.cli.options import Data, Debug, Device, Download, Format, Json, Out, Root, Width
from fldiag.console import Console, errors

Given = Annotated[list[Path] | None, typer.Argument(help="A and B: run folders, checkpoint files, quoted patterns, or folders "
                                                         "that hold the runs of one method.")]
A = Annotated[list[Path] | None, typer.Option("--a", help="Runs of one method, on side A; several times.")]
B = Annotated[list[Path] | None, typer.Option("--b", help="Runs of one method, on side B; several times.")]
Pair = Annotated[str, typer.Option(help="How runs are paired: seed, or order.")]
Level = Annotated[float, typer.Option(help="Level of the intervals.")]
Model = Annotated[str | None, typer.Option(help="Model of a plain state_dict: NAME or pkg.mod:factory.")]


@app.command()
def check(sides: Given = None, a: A = None, b: B = None,
          baseline: Annotated[list[Path] | None, typer.Option("--baseline", help="Side B; several times.")] = None,
          fail_if: Annotated[list[str] | None, typer.Option(
              "--fail-if", help="A condition such as 'accuracy < baseline - 1pt', 'loss > baseline + 5%' or 'forgetting > 0.2'; "
                                "several times (default: accuracy < baseline). fldiag diff lists the numbers.")] = None,
          pair: Pair = "seed", level: Level = 0.95,
          strict: Annotated[bool, typer.Option("--strict", help="Undecided fails too.")] = False,
          junit: Annotated[Path | None, typer.Option("--junit", help="Also write JUnit XML to this file.")] = None,
          model: Model = None, data: Data = None, root: Root = None, download: Download = False, out: Out = None,
          json: Json = False, device: Device = "auto", debug: Debug = False) -> None:
    """Is A better than B, and is a run still as good as its baseline? Exit code 3 where a condition clearly holds.

    One run or checkpoint on each side compares two given models over test examples and clients; several runs on each side compare
    methods, in pairs of equal seed. It says which of the two was asked.

    Example: fldiag check RUN --baseline MAIN --fail-if 'accuracy < baseline - 1pt' --junit check.xml
    """
    with errors(debug):
        from fldiag.verbs import check as verb

        verb.check(Console(json), verb.both(sides or [], a or [], b or [], baseline or []), fail_if or [], pair=cast(Any, pair),
                   level=level, strict=strict, xml=junit, out=out,
                   where={"model": model, "data": data, "root": root, "download": download, "device": device})


@app.command()
def diff(sides: Given = None, a: A = None, b: B = None,
         number: Annotated[list[str] | None, typer.Option("--number", help="Only this number; several times (default: "
                                                          "all).")] = None,
         pair: Pair = "seed", level: Level = 0.95, model: Model = None, data: Data = None, root: Root = None,
         download: Download = False, out: Out = None, width: Width = None, format: Format = None, json: Json = False,
         device: Device = "auto", debug: Debug = False) -> None:
    """Every number of two sides next to each other: accuracy, loss, λ1, forgetting, drift, fairness, each with its difference and
    interval, and a picture of them.

    Example: fldiag diff checkpoints/digits-fedavg-s0-1a2b3c4d checkpoints/digits-fedsol-s0-5e6f7a8b
    """
    with errors(debug):
        from fldiag.plotting import sheet
        from fldiag.verbs import check as verb

        with sheet.asked(width, format):
            verb.diff(Console(json), verb.both(sides or [], a or [], b or [], []), number or None, pair=cast(Any, pair),
                      level=level, out=out,
                      where={"model": model, "data": data, "root": root, "download": download, "device": device})
