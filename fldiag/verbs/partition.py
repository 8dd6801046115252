"""``fldiag partition``: the bubble chart of classes over clients."""

from __future__ import annotations

from pathlib import Path

from fldiag.console import Console
from fldiag.data import partition as partitions
from fldiag.diagnosis import places
from fldiag.diagnosis.dealt_partition import partition_of
from fldiag.plotting import bubbles, style
from fldiag.results.files import beside, csv_text, write_text


def partition(
    console: Console,
    source: str,
    overrides: list[str],
    out: Path | None,
    download: bool,
    allow_code: list[str],
) -> None:
    division = partition_of(source, overrides, download=download, allow_code=allow_code)
    path = places.prepare(out or division.folder) / division.name
    table_path = write_text(beside(path, ".csv"), csv_text(division.counts))
    pictures = style.write(bubbles.draw(division.counts, title=division.title), path)
    sizes = partitions.sizes(division.parts)
    classes_per_client = division.counts[division.counts["count"] > 0].groupby("client").size()
    console.table(
        [
            {
                "clients": len(sizes),
                "smallest": int(sizes.min()),
                "largest": int(sizes.max()),
                "classes": float(classes_per_client.mean()),
            }
        ],
        {
            "clients": "clients",
            "smallest": "smallest",
            "largest": "largest",
            "classes": "classes a client (mean)",
        },
    )
    for text in division.remarks:
        console.note(text)
    console.done(table_path, *pictures)
