"""How examples are dealt to clients."""

from __future__ import annotations

import sys
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
    from fldiag.plotting.sheet import use_sheet

    with errors(debug), use_sheet(width, format):
        from fldiag.data.partition import sizes as sizes_of
        from fldiag.diagnosis import heterogeneity
        from fldiag.diagnosis.dealt_partition import check_file, partition_of
        from fldiag.diagnosis.places import prepare
        from fldiag.errors import FldiagError
        from fldiag.plotting import partition as picture
        from fldiag.plotting import style
        from fldiag.results.files import beside, csv_text, write_table, write_text
        from fldiag.results.provenance import provenance

        console = Console(json)
        if data is None:
            division = partition_of(
                config, set_ or [], download=download, allow_code=allow_code or []
            )
        elif set_:
            raise FldiagError(
                "--set changes a preset or TOML file, and --data is for a partition file",
                "give one of them: --data with the file alone, or --set partition.kind=file "
                "--set partition.path=FILE",
                usage=True,
            )
        else:
            division = check_file(config, data, download=download)
        counts = division.counts
        path = prepare(out or division.folder) / division.name
        measures = heterogeneity.measure(counts, division.parts)
        about = {**provenance(), "partition": division.title}
        of_measures = path.with_name(f"{path.name}-heterogeneity")
        files = write_table(measures, of_measures, about)
        table = write_text(beside(path, ".csv"), csv_text(counts))
        pictures = style.save(picture.draw_counts(counts, title=division.title), path)
        sizes = sizes_of(division.parts)
        row = {
            "clients": len(sizes),
            "smallest": int(sizes.min()),
            "largest": int(sizes.max()),
            "classes": float(counts[counts["count"] > 0].groupby("client").size().mean()),
        }
        headings = {name: name for name in row} | {"classes": "classes a client (mean)"}
        console.table([row | heterogeneity.in_short(measures)], headings | heterogeneity.HEADINGS)
        for text in (*division.remarks, *heterogeneity.remarks(measures)):
            console.note(text)
        for text in division.faults[:8]:
            console.alarm(f"fault: {text}")
        if len(division.faults) > 8:
            console.alarm(f"and {len(division.faults) - 8} more faults")
        console.result["faults"] = list(division.faults)
        console.done(table, *files, *pictures)
        if division.faults:
            sys.exit(3)
