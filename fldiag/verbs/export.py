"""``fldiag export``: the numbers of a finished run for a tracker of experiments."""

from __future__ import annotations

from pathlib import Path

from fldiag import api
from fldiag.console import Console
from fldiag.diagnosis import places
from fldiag.errors import FldiagError, check_name, unknown
from fldiag.integrations import trackers
from fldiag.runs.run import Run


def export(
    console: Console, path: Path, to: str, out: Path | None, tables: list[Path], *, per_client: bool
) -> None:
    if to not in trackers.WRITERS:
        raise unknown("format", to, trackers.WRITERS)
    run = api.load(path)
    if not isinstance(run, Run):
        raise FldiagError(f"{path} is one checkpoint", "give the run's folder", usage=True)
    collected = trackers.collect(run, tables, per_client=per_client)
    folder = places.prepare(out or run.path / "export" / to)
    check_name(folder)
    with console.progress(f"{len(collected.series)} numbers to {to}"):
        output = trackers.WRITERS[to](collected, folder)
    tags = collected.series["tag"].nunique()
    console.table(
        [{"run": run.path.name, "series": tags, "numbers": len(collected.series)}],
        {"run": "run", "series": "series", "numbers": "numbers"},
    )
    console.done(output)
