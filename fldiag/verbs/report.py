"""``fldiag report``: one self-contained HTML file of what is known about runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fldiag.console import Console
from fldiag.diagnosis.answer import answer
from fldiag.diagnosis.places import FALLBACK, prepare
from fldiag.errors import FldiagError
from fldiag.report import build, summary
from fldiag.report.collect import collect
from fldiag.report.members import Collected, Member
from fldiag.results.provenance import digest


def report(
    console: Console,
    runs: list[Path],
    out: Path | None,
    *,
    title: str | None,
    places: list[Path],
    compute: bool,
    subject_options: dict[str, Any],
    choices: Sequence[str] = (),
    allow_code: Sequence[str] = (),
) -> None:
    """See ``fldiag.report.collect`` for which tables it shows. ``choices``: how the runs' settings were chosen, said first."""
    collection = collect(runs, places)
    folder = prepare(out or _folder(collection))
    if compute and _compute(console, collection, subject_options, allow_code=allow_code):
        collection = collect(runs, places)
    collection.choices += choices
    labels = "-".join(
        "".join(c if c.isalnum() or c in "._" else "-" for c in m.folder)
        for m in collection.members
    )
    name = (
        labels
        if len(labels) <= 60
        else f"{len(collection.members)}-runs-{digest([m.folder for m in collection.members])[:8]}"
    )
    with console.progress("report") as progress:
        path = build.write(
            collection, folder / f"report-{name}.html", title=title, progress=progress
        )
    console.table(
        [_row(m) for m in collection.members],
        {
            "run": "run",
            "method": "method",
            "rounds": "rounds",
            "accuracy": "test accuracy",
            "loss": "test loss",
            **{n.name: n.short for n in summary.shown_numbers()},
            "missing": "not in the report",
        },
    )
    for text in [*summary.remarks(collection), *collection.notes]:
        console.note(text)
    console.result["bytes"] = path.stat().st_size
    console.done(path)


def demo(console: Console, runs: list[Path], folder: Path, device: str) -> Path:
    """The report of the demo's runs beside its landscapes, with what they forget; its path."""
    collection = collect(runs, [folder])
    if _compute(console, collection, {"device": device}, kinds=("forgetting",)):
        collection = collect(runs, [folder])
    with console.progress("report") as progress:
        return build.write(
            collection,
            folder / "report.html",
            title="FedAvg and FedSOL on the digits",
            progress=progress,
        )


def _folder(collection: Collected) -> Path:
    """The run's own folder for its report, ``fldiag-out`` here for one of several runs."""
    if len(collection.members) > 1 or not os.access(collection.members[0].run.path, os.W_OK):
        return FALLBACK
    return collection.members[0].run.path / "diagnostics"


def _row(m: Member) -> dict[str, Any]:
    values = {
        "accuracy": summary.accuracy(m),
        "loss": summary.loss(m),
        **{n.name: summary.measured(m, n) for n in summary.shown_numbers()},
    }
    return {
        "run": m.folder,
        "method": str(m.setting("method", "name")),
        "rounds": m.run.done,
        **{k: None if v is None else v.value for k, v in values.items()},
        "missing": ", ".join(_lacks(m)),
    }


def _lacks(m: Member) -> list[str]:
    """The diagnostics whose numbers the report's first table lacks of a run."""
    numbers = [n for n in summary.shown_numbers() if summary.measured(m, n) is None]
    return list(dict.fromkeys(n.source for n in numbers))


def _compute(
    console: Console,
    collection: Collected,
    subject_options: dict[str, Any],
    kinds: Sequence[str] | None = None,
    allow_code: Sequence[str] = (),
) -> bool:
    """Make the tables that the first table lacks, or these; what cannot be made is noted."""
    has_changed = False
    for m in collection.members:
        for kind in _lacks(m) if kinds is None else [k for k in kinds if k not in m.tables]:
            try:
                run = m.run.allow(allow_code)
                answer(
                    kind,
                    [run],
                    {k: v for k, v in subject_options.items() if v},
                    bar=console.progress,
                    tell=console.note,
                )
                has_changed = True
            except FldiagError as error:
                console.note(f"{m.folder}: no {kind}: {error}")
    return has_changed
