"""The report as one HTML file: data, pictures and plotly inside it, compressed; nothing is fetched when it is opened."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from fldiag import registry
from fldiag.diagnosis.places import FALLBACK, prepare
from fldiag.errors import FldiagError
from fldiag.plotting import pages
from fldiag.plotting.pages import Group, Section, tables_of
from fldiag.registry import Progress
from fldiag.report import glance, measured, performance, summary
from fldiag.report.members import Collected, Source, absent_diagnostic, plain, reason
from fldiag.results.files import write_text
from fldiag.results.provenance import digest
from fldiag.version import version

#: What makes a section of a collection; None where there is nothing to say.
Part = Callable[[Collected], Section | None]


def write(
    collection: Collected,
    path: str | Path,
    *,
    title: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the report of a collection (see ``fldiag.report.collect.collect``); returns the path.

    Colours, marks and dashes of a run are the same in all figures and those of its method in the printed pictures.
    The tables that can be downloaded are byte for byte those that the verbs wrote. Text from files, configs and
    checkpoints reaches the page only escaped. Raises FldiagError when the file cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FldiagError(
            f"folder {path.parent} is not there",
            "make it, or choose another with --out",
            usage=True,
        )
    report = progress or (lambda done, total, text: None)
    parts = sections()
    content: list[Section] = []
    with ThreadPoolExecutor(1) as beside:
        beside.submit(pages.packed_plotly)  # takes about as long as all sections
        for i, (name, part) in enumerate(parts.items()):
            report(i, len(parts) + 1, name)
            content += _guarded(name, part, collection)
    report(len(parts), len(parts) + 1, "writing")
    page = write_text(path, render(collection, apart(content), title or default_title(collection)))
    report(len(parts) + 1, len(parts) + 1, "written")
    return page


def report_path(collection: Collected, out: Path | None) -> Path:
    """Where the report of these runs goes, in ``out``, or else in the run's own folder, or ``fldiag-out`` for several runs.

    Raises FldiagError for a folder that cannot be written."""
    runs = [m.run.path for m in collection.members]
    in_run = len(runs) == 1 and os.access(runs[0], os.W_OK)
    folder = prepare(out or (runs[0] / "diagnostics" if in_run else FALLBACK))
    names = [m.folder for m in collection.members]
    label = re.sub(r"[^\w.]", "-", "-".join(names))
    if len(label) > 60:
        label = f"{len(names)}-runs-{digest(names)[:8]}"
    return folder / f"report-{label}.html"


def sections() -> dict[str, Part]:
    """What the report consists of, in order, by name: its own sections, and between them those of all diagnostics."""
    fixed_sections: dict[str, Part] = {
        "glance": glance.glance,
        "summary": summary.summary,
        "curves": performance.curves,
    }
    measurements = {e.name: partial(measured.section, e) for e in registry.diagnostics()}
    return {**fixed_sections, **measurements, "absent": absent}


def _guarded(name: str, part: Part, collection: Collected) -> list[Section]:
    """A section; one that cannot be made says why, and the others stay. Anybody may have edited a table."""
    try:
        section = part(collection)
    except Exception as error:
        why = f"This section could not be made: {reason(error)}."
        return [Section(name, name.capitalize(), "", notes=[why])]
    return [section] if section else []


def absent(collection: Collected) -> Section | None:
    """What else can be measured: diagnostics that no run has a table of, with the command for the first run that it suits."""
    kinds = {kind.partition(":")[0] for m in collection.members for kind in m.tables}
    rows = []
    for entry in registry.diagnostics():
        if entry.name in kinds or entry.on not in ("problem", "run", "clients", "runs"):
            continue
        lacks = [absent_diagnostic(m, entry) for m in collection.members]
        lack = next((lack for lack in lacks if lack.command), lacks[0])
        command = lack.command or f"{lack.who}: {lack.why}"
        rows.append({"Diagnostic": entry.name, "What it does": entry.headline, "Command": command})
    section = Section("absent", "Not computed", "What else can be measured of these runs.")
    section.groups.append(Group(tables=tables_of("Diagnostics without a table", rows)))
    return section if rows else None


def apart(content: Sequence[Section]) -> Sequence[Section]:
    """The sections, with marks of their own: two of the same would be one place on the page."""
    marks = {"content", "charts", "plotly", "sources", "trouble"}  # what else the page has
    for section in content:
        mark = "".join(c if c.isalnum() and c.isascii() else "-" for c in section.id)
        section.id = mark if mark not in marks else f"{mark}-{len(marks)}"
        marks.add(section.id)
    return content


def default_title(collection: Collected) -> str:
    names = [m.label for m in collection.members]
    listing = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"Federated runs: {listing}" if len(names) > 1 else f"Federated run: {listing}"


def render(collection: Collected, content: Sequence[Section], title: str) -> str:
    """The page as text."""

    def owners(source: Source) -> str:
        return ", ".join(
            m.label for m in collection.members if any(source is s for s in m.tables.values())
        )

    return pages.render(
        "report.html",
        "fldiag.report",
        title,
        content,
        members=collection.members,
        sources=collection.sources,
        owners=owners,
        about=about,
        config=config,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=version(),
        tables=[pages.pack(s.raw) for s in collection.sources],
    )


#: What a table's provenance says besides, and its heading on the page.
_PROVENANCE = {
    "config": "Config hash",
    "fldiag": "fldiag",
    "torch": "torch",
    "dtype": "Numbers",
    "device": "Device",
    "device_name": "Device name",
    "threads": "Threads",
    "seed": "Seed",
    "history": "Hash of weights and data",
}


def about(source: Source) -> list[tuple[str, str]]:
    """Where a table's numbers come from, as pairs of heading and text."""
    provenance, claims = source.about, source.claims
    rows = [("Table", source.name), ("sha256 of the table", source.sha256)]
    rows += [("Run", str(provenance["run"]))] if provenance.get("run") else []
    if claims and claims[0].round is not None:
        last = claims[-1]
        rows.append(("Checkpoints", f"{len(claims)}, rounds {claims[0].round} to {last.round}"))
        rows.append((f"sha256 of round {last.round}", last.sha256))
    for c in claims:
        if c.round is None:
            details = ", ".join(filter(None, (c.slice, "" if c.n is None else f"{c.n:,} examples")))
            name = c.label or "the checkpoint"
            rows.append((f"sha256 of {name}" + (f" ({details})" if details else ""), c.sha256))
    if isinstance(checkpoints := provenance.get("through"), list) and checkpoints:
        ends = (checkpoints[0], checkpoints[-1])
        hashes = ", ".join(map(str, checkpoints))
        text = hashes if len(checkpoints) <= 3 else f"{ends[0]} to {ends[1]}"
        rows.append((f"sha256 of the {len(checkpoints)} checkpoints that it goes through", text))
    rows += [
        (heading, str(provenance[key]))
        for key, heading in _PROVENANCE.items()
        if provenance.get(key) is not None
    ]
    if source.options:
        options = [f"{k} = {plain(v)}" for k, v in source.options.items() if v is not None]
        rows.append(("Options", ", ".join(options) or "defaults"))
    if source.alternatives:
        choice = "this one reaches the latest round, or was named with --from, or is the newest"
        rows.append(("Other tables of this kind", f"{source.alternatives} more; {choice}"))
    return rows


def config(about: dict[str, Any]) -> str:
    return json.dumps(about["config"], indent=1, sort_keys=True, default=str)
