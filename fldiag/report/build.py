"""The report as one HTML file: data and plotly inside it, compressed; nothing is fetched when it is opened."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from fldiag import registry
from fldiag.errors import FldiagError, printable
from fldiag.plotting import pages, style
from fldiag.plotting.collected import Collected, Source
from fldiag.plotting.sections import Section
from fldiag.registry import Progress
from fldiag.report import derived, glance, performance, steps, summary
from fldiag.report.guard import guarded
from fldiag.results.files import write_text
from fldiag.version import version

#: matplotlib's marks and dashes in plotly's words, and as paths of a small legend.
_MARKS = {
    "o": "circle",
    "D": "diamond",
    "s": "square",
    "^": "triangle-up",
    "v": "triangle-down",
    "P": "cross",
    "X": "x",
    "p": "pentagon",
    "*": "star",
}
_SHAPES = {
    "o": "M8 4a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "D": "M12-1l5 5-5 5-5-5z",
    "s": "M8 0h8v8H8z",
    "^": "M12-1l5 9H7z",
    "v": "M12 9l5-9H7z",
    "P": "M10-1h4v3h3v4h-3v3h-4V6H7V2h3z",
    "X": "M8-1l4 3 4-3 2 2-3 3 3 3-2 2-4-3-4 3-2-2 3-3-3-3z",
    "p": "M12-1l5 4-2 6H9L7 3z",
    "*": "M12-2l1.5 4H18l-3.5 2.6L16 9l-4-2.6L8 9l1.5-4.4L6 2h4.5z",
}
_DASHES = {1: "solid", 2: "dash", 4: "dashdot", 6: "longdashdot"}


def write(
    found: Collected,
    path: str | Path,
    *,
    title: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the report of a collection (see ``fldiag.report.collect.collect``); returns the path.

    Colours, marks and dashes of a run are the same in all figures and those of its method in the printed pictures.
    Figures hold few digits; the tables that can be downloaded are byte for byte those that the verbs wrote. Text from
    files, configs and checkpoints reaches the page only escaped. Raises FldiagError when the file cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FldiagError(
            f"folder {path.parent} is not there",
            "make it, or choose another with --out",
            usage=True,
        )
    told = progress or (lambda done, total, text: None)
    steps.collect(found)
    parts = sections()
    made: list[Section] = []
    with ThreadPoolExecutor(1) as beside:
        beside.submit(pages.packed_plotly)  # takes about as long as all sections
        for i, (name, part) in enumerate(parts):
            told(i, len(parts) + 1, name)
            made += part(found)
    told(len(parts), len(parts) + 1, "writing")
    text = render(found, apart(made), title or default_title(found))
    written = write_text(path, text)
    told(len(parts) + 1, len(parts) + 1, "written")
    return written


#: What makes sections of a collection: usually one, none where there is nothing to say.
Part = Callable[[Collected], Sequence[Section]]


def sections() -> list[tuple[str, Part]]:
    """What the report consists of, in order, by name: its own sections, and between them those of all diagnostics."""

    def own(part: Callable[[Collected], Section]) -> Part:
        return lambda found: [guarded(part, found)]

    return [
        ("glance", own(glance.glance)),
        ("summary", own(summary.summary)),
        ("curves", own(performance.curves)),
        *((e.name, partial(derived.sections, e)) for e in registry.diagnostics()),
        ("steps", own(steps.steps)),
    ]


def apart(made: Sequence[Section]) -> Sequence[Section]:
    """The sections, with marks of their own: two of the same would be one place on the page."""
    taken = {"content", "data", "plotly", "sources", "trouble"}  # what else the page has
    for section in made:
        mark = "".join(c if c.isalnum() and c.isascii() else "-" for c in section.id)
        section.id = mark if mark not in taken else f"{mark}-{len(taken)}"
        taken.add(section.id)
    return made


def default_title(found: Collected) -> str:
    names = [m.label for m in found.members]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"Federated runs: {shown}" if len(names) > 1 else f"Federated run: {shown}"


def render(found: Collected, sections: Sequence[Section], title: str) -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    figures = [f for s in sections for f in s.figures]
    for i, figure in enumerate(figures):
        figure.number = i
    page = Environment(
        loader=PackageLoader("fldiag.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report.html")
    home = resources.files("fldiag.report") / "templates"
    plotly, script = get_plotlyjs(), pages.unpacking() + (home / "report.js").read_text("utf-8")
    scale = colours(style.COLORMAP)
    data = {
        "figures": [f.spec for f in figures],
        "looks": [_look(m.look) for m in found.members],
        "colours": {"sequential": scale, "diverging": colours(style.DIVERGING)},
        "files": [_file(s) for s in found.sources],
    }

    def owners(source: Source) -> str:
        return ", ".join(
            m.label for m in found.members if any(source is s for s in m.tables.values())
        )

    return printable(
        page.render(
            title=title,
            sections=sections,
            members=found.members,
            sources=found.sources,
            owners=owners,
            about=about,
            config=config,
            made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            version=version(),
            shapes=_SHAPES,
            stops=", ".join(scale),
            style=(home / "report.css").read_text("utf-8"),
            script=script,
            policy=pages.policy(plotly, script),
            packed={
                "plotly": pages.packed_plotly(),
                "data": pages.pack(json.dumps(data, allow_nan=False, separators=(",", ":"))),
            },
            tables=[pages.pack_table(s.raw) for s in found.sources],
        )
    )


def colours(name: str) -> list[str]:
    """A colour map as 17 colours evenly apart."""
    import matplotlib
    import numpy as np
    from matplotlib.colors import to_hex

    return [to_hex(c) for c in matplotlib.colormaps[name](np.linspace(0, 1, 17))]


def _look(look: style.Look) -> dict[str, Any]:
    dash = (
        "solid"
        if look.dash == "-"
        else "dot"
        if look.dash[1] == (1, 1)
        else _DASHES.get(len(look.dash[1]), "dash")
    )
    return {"colour": look.color, "mark": _MARKS[look.marker], "dash": dash}


def _file(source: Source) -> str:
    """The name of a download: that of the table, without what file systems refuse."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in source.name)


def about(source: Source) -> list[tuple[str, str]]:
    """Where a table's numbers come from, as pairs of heading and text."""
    known = source.about
    rows = [("Table", source.name), ("sha256 of the table", source.sha256)]
    rows += [("Run", str(known["run"]))] if known.get("run") else []
    if source.claims and source.claims[0].round is not None:
        last = source.claims[-1]
        steps = source.kind == "steps"
        rows.append(
            (
                "Rounds" if steps else "Checkpoints",
                f"{len(source.claims)}, rounds {source.claims[0].round} to {last.round}",
            )
        )
        rows.append(
            (f"sha256 of {'the steps of ' if steps else ''}round {last.round}", last.sha256)
        )
    for c in source.claims:
        if c.round is None:
            where = ", ".join(
                [*([c.slice] if c.slice else []), *([] if c.n is None else [f"{c.n:,} examples"])]
            )
            rows.append(
                (
                    f"sha256 of {c.label or 'the checkpoint'}" + (f" ({where})" if where else ""),
                    c.sha256,
                )
            )
    if isinstance(others := known.get("through"), list) and others:
        few = ", ".join(map(str, others)) if len(others) <= 3 else f"{others[0]} to {others[-1]}"
        rows.append((f"sha256 of the {len(others)} checkpoints that it goes through", few))
    names = {
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
    rows += [(text, str(known[key])) for key, text in names.items() if known.get(key) is not None]
    if source.options:
        options = ", ".join(
            f"{k} = {summary.plain(v)}" for k, v in source.options.items() if v is not None
        )
        rows.append(("Options", options or "defaults"))
    rows += [("Note", source.note)] if source.note else []
    if source.others:
        rows.append(
            (
                "Other tables of this kind",
                f"{source.others} more found; this one reaches the latest round, or was named "
                "with --from, or is the newest",
            )
        )
    return rows


def config(index: dict[str, Any]) -> str:
    return json.dumps(index["config"], indent=1, sort_keys=True, default=str)
