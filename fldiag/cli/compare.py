"""The verbs that compare: a check for build servers, all numbers of two sides, and a report of runs."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fldiag.cli.app import Console, Out, verb
from fldiag.errors import FldiagError

if TYPE_CHECKING:
    import pandas as pd

A = Annotated[
    str,
    typer.Argument(
        help="A run folder, a checkpoint file, or the runs of one method: a folder that holds them, or a quoted pattern."
    ),
]
B = Annotated[str | None, typer.Argument(help="The baseline, likewise.")]
Level = Annotated[float, typer.Option(help="Confidence level of the intervals.")]
#: Options of both sides.
OPENED = ("model", "data", "allow_code", "download", "device")


@verb("Compare", *OPENED, "strict")
def check(
    console: Console,
    a: A,
    b: B = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            help="A condition such as 'accuracy < baseline - 1pt', 'loss > baseline + 5%' or 'forgetting > 0.2'; "
            "may be given several times (default: accuracy < baseline). fldiag diff lists the available "
            "numbers.",
        ),
    ] = None,
    level: Level = 0.95,
    out: Out = None,
    **options: Any,
) -> None:
    """Test whether A is better than B, or a run still as good as its baseline. Exit code 3 if a condition clearly holds, 2 if
    a number could not be computed.

    One run or checkpoint per side: compares these two models over test examples and clients. Several runs per side: compares two
    methods over pairs of runs with equal seeds. The output says which of the two questions it answers.

    Example: fldiag check RUN MAIN --fail-if 'accuracy < baseline - 1pt'
    """
    from fldiag.compare.check import check
    from fldiag.compare.sides import Reader, sides

    strict = options.pop("strict")
    reader = Reader(options, cache=True, bar=console.progress)
    outcome = check(sides(a, b), reader, fail_if or (), level)
    paths = show(console, outcome.table, out, a=a, b=b, verdict=outcome.verdict)
    console.say(f"verdict: {outcome.verdict}")
    console.done(*paths)
    if outcome.verdict == "error":
        row = outcome.table[outcome.table["verdict"] == "error"].iloc[0]
        what = f"not tested: {row['condition']}: {row['note']}"
        raise FldiagError(what, row["remedy"], usage=True)
    if outcome.verdict == "fail" or (strict and outcome.verdict == "undecided"):
        sys.exit(3)


@verb("Compare", *OPENED, "width", "format")
def diff(
    console: Console,
    a: A,
    b: B,
    number: Annotated[
        list[str] | None,
        typer.Option(help="Only this number; may be given several times (default: all)."),
    ] = None,
    level: Level = 0.95,
    out: Out = None,
    **options: Any,
) -> None:
    """Compare all numbers of two sides in a table and a picture: accuracy, loss, λ1, forgetting, drift and fairness, each with
    its difference and interval.

    Example: fldiag diff checkpoints/digits-fedavg-s0-1a2b3c4d checkpoints/digits-fedsol-s0-5e6f7a8b
    """
    from fldiag.compare import picture
    from fldiag.compare.check import diff
    from fldiag.compare.sides import Reader, sides
    from fldiag.plotting import style

    reader = Reader(options, cache=True, bar=console.progress)
    table = diff(sides(a, b), reader, number, level)
    paths = show(console, table, out, a=a, b=b)
    console.done(*paths, *style.save(picture.draw(table), paths[0].with_suffix("")))


@verb("Compare", "allow_code", "download", "device")
def report(
    console: Console,
    runs: Annotated[list[Path], typer.Argument(help="One or more run folders.")],
    compute: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="First compute these diagnostics for runs that lack them, such as spectrum,drift.",
        ),
    ] = "",
    out: Out = None,
    **options: Any,
) -> None:
    """Write one HTML file that compares runs. It works offline in any browser.

    It shows the newest table of every diagnostic that lies in a run's own folder.

    Example: fldiag report checkpoints/digits-fedavg-s0-1a2b3c4d checkpoints/digits-fedsol-s0-5e6f7a8b
    """
    from fldiag import registry
    from fldiag.diagnosis.diagnose import check_writable, diagnose, folder_of
    from fldiag.report import page
    from fldiag.report.collect import collect
    from fldiag.results.files import digest, write_text

    members = collect(runs)
    folder = check_writable(out or folder_of(m.run for m in members))  # first: it may be refused
    entries = [registry.diagnostic.get(name.strip()) for name in compute.split(",") if name]
    for member, entry in itertools.product(members, entries):
        if entry.name in member.tables:
            continue
        try:
            diagnose(entry.name, [member.run], options, bar=console.progress, tell=console.note)
        except FldiagError as error:
            console.note(f"{member.label}: no {entry.name}: {error}")
    members = collect(runs)
    path = folder / f"report-{digest([os.path.realpath(run) for run in runs])[:8]}.html"
    write_text(path, page.page(members))
    remarks = [f"{member.label}: {text}" for member in members for text in member.remarks]
    for text in [*page.wrong(members).alarms, *remarks]:
        console.note(text)
    console.done(path)


def show(console: Console, table: pd.DataFrame, out: Path | None, **sides: Any) -> list[Path]:
    """Say what was asked and answered, and write the table with its provenance. Returns the files."""
    from fldiag.compare import picture
    from fldiag.diagnosis.diagnose import FALLBACK, check_writable
    from fldiag.results.files import digest, write_table

    about = {**table.attrs, **sides}
    console.say("A: {}   B: {}".format(*about["labels"]))
    console.say(about["question"])
    rows = picture.rows(table)
    console.table(rows)
    for text in about["notes"]:
        console.note(text)
    plain = table.astype(object).where(table.notna(), None)
    console.result |= {**about, "rows": plain.to_dict("records")}
    kind = "check" if "condition" in table else "diff"
    path = check_writable(out or FALLBACK) / f"{kind}-{digest(*sides.values(), rows)[:8]}"
    return write_table(table, path, about)
