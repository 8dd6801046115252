"""``fldiag partition``: the bubble chart of classes over clients."""

from __future__ import annotations

from pathlib import Path

from fldiag.console import Console
from fldiag.data import partition as partitions
from fldiag.diagnosis import places
from fldiag.diagnosis.partition import partition_of
from fldiag.plotting import partition as picture
from fldiag.plotting import style
from fldiag.results.files import beside, csv_text, write_text


def partition(
    console: Console,
    source: str,
    overrides: list[str],
    out: Path | None,
    download: bool,
    allow_code: list[str],
) -> None:
    found = partition_of(source, overrides, download=download, allow_code=allow_code)
    path = places.prepare(out or found.folder) / found.name
    written = write_text(beside(path, ".csv"), csv_text(found.counts))
    pictures = style.write(picture.draw(found.counts, title=found.title), path)
    sizes = partitions.sizes(found.parts)
    held = found.counts[found.counts["count"] > 0].groupby("client").size()
    console.table(
        [
            {
                "clients": len(sizes),
                "smallest": int(sizes.min()),
                "largest": int(sizes.max()),
                "classes": float(held.mean()),
            }
        ],
        {
            "clients": "clients",
            "smallest": "smallest",
            "largest": "largest",
            "classes": "classes a client (mean)",
        },
    )
    console.done(written, *pictures)
