"""The verbs that compare: a check for build servers, all numbers of two sides, and a report of runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fldiag.cli.app import app
from fldiag.cli.console import Console, errors
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
    TrustFile,
    Width,
)
from fldiag.device import device_of
from fldiag.errors import FldiagError
from fldiag.plotting.sheet import use_sheet
from fldiag.results import files

if TYPE_CHECKING:
    import pandas as pd

    from fldiag.compare.reading import Reader
    from fldiag.compare.sides import Sides
    from fldiag.report.collect import RunTables

#: Exit code of a check that failed.
FAILED = 3
#: What a verdict on ``accuracy < baseline`` means.
MEANING = {
    "fail": " (A is worse than B)",
    "pass": " (A is better than B, or the same)",
    "undecided": " (the difference is within the noise)",
    "error": " (not every number could be computed)",
}

SidesArgument = Annotated[
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


@app.command(rich_help_panel="Compare")
def check(
    sides: SidesArgument = None,
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
    model: Model = None,
    data: Data = None,
    allow_code: AllowCode = None,
    trust_file: TrustFile = False,
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

    Example: fldiag check RUN --baseline MAIN --fail-if 'accuracy < baseline - 1pt'
    """
    with errors(debug):
        from fldiag.compare import check as checks

        console = Console(json)
        comparison, reader = open_sides(
            console,
            sides,
            a,
            [*(b or ()), *(baseline or ())],
            pair,
            allow_code,
            model=model,
            data=data,
            root=root,
            download=download,
            device=device,
        )
        outcome = checks.check(comparison, fail_if or [], reader, level)
        about = {
            "verdict": outcome.verdict,
            "question": outcome.question,
            "notes": outcome.notes,
        }
        show_rows(console, comparison, outcome.table, about)
        explanation = "" if fail_if or not comparison.b else MEANING[outcome.verdict]
        console.say(f"verdict: {outcome.verdict}{explanation}")
        console.done(*write_rows(outcome.table, comparison, out, about))
        rows = outcome.table[outcome.table["verdict"] == "error"]
        if len(rows):
            conditions = ", ".join(repr(text) for text in rows["condition"])
            what = f"not tested: {conditions}: {'; '.join(dict.fromkeys(rows['note']))}"
            problem = FldiagError(what, "; ".join(dict.fromkeys(rows["remedy"])), usage=True)
            if outcome.verdict == "error":
                raise problem
            console.note(str(problem))
        if outcome.verdict == "fail" or (strict and outcome.verdict == "undecided"):
            sys.exit(FAILED)


@app.command(rich_help_panel="Compare")
def diff(
    sides: SidesArgument = None,
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
    trust_file: TrustFile = False,
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
    with errors(debug), use_sheet(width, format):
        from fldiag.compare import check as checks
        from fldiag.compare import picture
        from fldiag.plotting import style

        console = Console(json)
        comparison, reader = open_sides(
            console,
            sides,
            a,
            b,
            pair,
            allow_code,
            model=model,
            data=data,
            root=root,
            download=download,
            device=device,
        )
        if not comparison.b:
            raise FldiagError("one side is given", "give two: fldiag diff A B", usage=True)
        table = checks.diff(comparison, number or None, reader, level)
        about = {key: table.attrs[key] for key in ("question", "notes")}
        show_rows(console, comparison, table, about)
        about["labels"] = table.attrs["labels"]
        paths = write_rows(table, comparison, out, about)
        pictures = style.save(picture.draw(table), paths[0].with_suffix(""))
        console.done(*paths, *pictures)


@app.command(rich_help_panel="Compare")
def report(
    runs: Annotated[list[Path], typer.Argument(help="One or more run folders.")],
    title: Annotated[str, typer.Option(help="Title of the page.")] = "",
    compute: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="First compute these diagnostics for runs that lack them, such as spectrum,drift.",
        ),
    ] = "",
    allow_code: AllowCode = None,
    trust_file: TrustFile = False,
    root: Root = None,
    download: Download = False,
    out: Out = None,
    json: Json = False,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Write one HTML file that compares runs. It works offline in any browser.

    It shows the newest table of every diagnostic that lies in a run's own folder.

    Example: fldiag report checkpoints/digits-fedavg-s0-1a2b3c4d checkpoints/digits-fedsol-s0-5e6f7a8b
    """
    with errors(debug):
        from fldiag.diagnosis.diagnose import folder_of, prepare
        from fldiag.report.collect import collect
        from fldiag.results.provenance import digest

        console, members = Console(json), collect(runs)
        paths = [os.path.realpath(path) for path in runs]
        several = f"{len(paths)}-runs-{digest(paths)[:8]}"
        label = Path(paths[0]).name if len(paths) == 1 else several
        page = (
            prepare(out or folder_of(m.run for m in members)) / f"report-{label}.html"
        )  # first: it may be refused
        if names := [name.strip() for name in compute.split(",") if name.strip()]:
            options = {"root": root, "download": download, "device": device_of(device)}
            compute_tables(console, members, names, options, allow_code or [])
            members = collect(runs)
        show_report(console, members, page, title)


def compute_tables(
    console: Console,
    runs: Sequence[RunTables],
    names: Sequence[str],
    options: Mapping[str, Any],
    allow_code: Sequence[str],
) -> None:
    """Compute the tables of these diagnostics that a run lacks; what cannot be computed is told."""
    from fldiag import registry
    from fldiag.diagnosis.diagnose import diagnose

    values = {key: value for key, value in options.items() if value}
    for run in runs:
        for name in names:
            entry = registry.diagnostic.get(name)
            try:
                if entry.name not in run.tables:
                    diagnose(
                        entry.name,
                        [run.run],
                        values,
                        allow_code=allow_code,
                        bar=console.progress,
                        tell=console.note,
                    )
            except FldiagError as error:
                console.note(f"{run.label}: no {name}: {error}")


def show_report(console: Console, runs: Sequence[RunTables], path: Path, title: str = "") -> None:
    """Write the page, and say what it holds and what is wrong."""
    from fldiag.report import page
    from fldiag.results.files import write_text

    with console.progress("report") as progress:
        progress(0, 1, "report")
        write_text(path, page.page(runs, title))
        progress(1, 1, "report")
    rows = [
        {
            "run": run.label,
            "rounds": run.run.done,
            "accuracy": page.last(run, "accuracy"),
            "loss": page.last(run, "loss"),
            "tables": ", ".join(name for name in run.tables if name != "metrics"),
        }
        for run in runs
    ]
    console.table(rows, {key: key for key in rows[0]})
    for text in page.wrong(runs).alarms:
        console.alarm(text)
    for run in runs:
        for text in run.remarks:
            console.note(f"{run.label}: {text}")
    console.result["bytes"] = path.stat().st_size
    console.done(path)


def open_sides(
    console: Console,
    paths: Sequence[Path] | None,
    a: Sequence[Path] | None,
    b: Sequence[Path] | None,
    pair: str,
    allow_code: Sequence[str] | None,
    **options: Any,
) -> tuple[Sides, Reader]:
    """The two sides, of the positional arguments ``A [B]`` and of ``--a … --b …``, with what reads their numbers.

    Raises FldiagError where a side is missing or given in two ways, or more than two stand there without a name.
    """
    from fldiag.compare import reading, sides

    paths, first, second = list(paths or ()), list(a or ()), list(b or ())
    unnamed = paths if first else paths[1:]
    if not (first or paths) or (unnamed and second) or len(unnamed) > 1 or (paths and first):
        what = f"{len(paths) + len(first) + len(second)} runs are given, and not as two sides"
        remedy = "give A B, A --baseline B, or --a A1 --a A2 --b B1 --b B2; quote patterns"
        raise FldiagError(what, remedy, usage=True)
    comparison = sides.sides(
        first or paths[:1], second or unnamed or None, cast(Any, pair), allow_code or []
    )
    reader = reading.Reader(
        {k: v for k, v in options.items() if v}, cache=True, bar=console.progress
    )
    return comparison, reader


def show_rows(
    console: Console, comparison: Sides, table: pd.DataFrame, about: Mapping[str, Any]
) -> None:
    """The rows as a person reads them, without empty columns; for machines the rows of the table."""
    from fldiag.compare import wording

    a, b = comparison.labels
    console.say(f"A: {a}" + (f"   B: {b}" if comparison.b else ""))
    console.say(about["question"])
    rows = wording.rows(table)
    columns = {k: text for k, text in wording.COLUMNS.items() if any(row[k] != "" for row in rows)}
    console.table(rows, columns)
    for text in about["notes"]:
        console.note(text)
    plain = table.dropna(axis=1, how="all")
    plain = plain.astype(object).where(plain.notna(), None)
    console.result |= {**about, "rows": plain.to_dict("records")}


def write_rows(
    table: pd.DataFrame, comparison: Sides, out: Path | None, about: Mapping[str, Any]
) -> list[Path]:
    """Table and provenance."""
    from fldiag.diagnosis.diagnose import FALLBACK, prepare
    from fldiag.results.provenance import digest, provenance

    kind = "check" if "condition" in table.columns else "diff"
    sides = {
        side: [str(m.path) for m in runs]
        for side, runs in (("a", comparison.a), ("b", comparison.b))
    }
    questions = table.get("condition", table["metric"]).tolist()
    path = prepare(out or FALLBACK) / f"{kind}-{digest(sides, questions)[:8]}"
    return files.write_table(table, path, {**provenance(), **about, **sides})
