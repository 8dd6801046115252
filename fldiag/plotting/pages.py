"""Pages that stand alone: the report, and a landscape to turn. Everything is inside the file; nothing is fetched."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from matplotlib.figure import Figure

from fldiag.errors import printable
from fldiag.plotting import style

#: An SVG with more bytes than these (a surface, thousands of points) is shown as PNG.
HEAVY = 400_000
#: Pixels of the page for an inch of a picture.
PIXELS = 130


@dataclass
class Table:
    """``rows``: one list of texts a row, the first is its heading. ``cards``: on a phone every row becomes a block."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    cards: bool = True


def tables_of(caption: str, rows: Sequence[Mapping[str, str]], cards: bool = True) -> list[Table]:
    """A table of rows with the same headings; none where there are no rows."""
    return [Table(caption, list(rows[0]), [list(r.values()) for r in rows], cards)] if rows else []


@dataclass
class Picture:
    """A matplotlib figure as the bytes of an image. ``kind``: svg or png; ``width``: in the page's pixels."""

    caption: str
    alt: str
    content: bytes
    kind: str
    width: int
    place: int = 0


@dataclass
class Chart:
    """A plotly figure, to hover over and to turn: ``kind`` is lines, scene or map."""

    caption: str
    kind: str
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any]
    place: int = 0


@dataclass
class Interactive:
    """What a drawing function returns for a page of its own: charts, remarks, and the table of their numbers."""

    title: str
    lead: str
    charts: list[Chart]
    notes: list[str] = field(default_factory=list)
    table: Table | None = None


@dataclass
class Group:
    """What belongs together within a section."""

    title: str = ""
    notes: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


@dataclass
class Missing:
    """Runs for which a section has nothing, and the command that changes it (empty: there is none)."""

    who: str
    why: str
    command: str = ""


@dataclass
class Section:
    """``sources``: places in the page's list of downloads."""

    id: str
    title: str
    lead: str
    groups: list[Group] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    @property
    def tables(self) -> list[Table]:
        return [t for g in self.groups for t in g.tables]


def picture(fig: Figure, caption: str) -> Picture:
    """The figure as the very same picture that ``style.save`` writes: SVG, or PNG where that would be heavy."""
    content, kind = style.image(fig, "svg"), "svg"
    if len(content) > HEAVY or any(ax.name == "3d" for ax in fig.axes):
        content, kind = style.image(fig, "png"), "png"
    return Picture(caption, alt(fig, caption), content, kind, round(PIXELS * fig.get_figwidth()))


def alt(fig: Figure, caption: str) -> str:
    """What the picture shows, in the words that stand in it: its panels, and what their legends name."""
    panels = []
    for ax in fig.axes:
        axes = " over ".join(filter(None, (ax.get_ylabel(), ax.get_xlabel())))
        panels.append(": ".join(filter(None, (ax.get_title(), axes))))
    legends = [*fig.legends, *filter(None, (ax.get_legend() for ax in fig.axes))]
    names = dict.fromkeys(t.get_text() for legend in legends for t in legend.get_texts())
    text = caption + "".join(f"; {p}" for p in dict.fromkeys(filter(None, panels)))
    text += f"; lines: {', '.join(names)}" if names else ""
    return " ".join(text.replace("$", "").replace("\\", "").split()) + "."


def render(
    template: str, package: str, title: str, sections: Sequence[Section], **more: Any
) -> str:
    """A page as text. ``template``: one of ``package``'s that extends ``page.html``; ``more``: what it needs.

    Text reaches the page only escaped. Pictures, charts and downloads are packed; the page's script unpacks them.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    loaders = [PackageLoader(p) for p in dict.fromkeys(("fldiag.plotting", package))]
    environment = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    files = resources.files("fldiag.plotting") / "templates"
    script = (files / "page.js").read_text("utf-8")
    groups = [group for section in sections for group in section.groups]
    charts = [chart for group in groups for chart in group.charts]
    pictures = [picture for group in groups for picture in group.pictures]
    for place, chart in enumerate(charts):
        chart.place = place
    for place, picture in enumerate(pictures):
        picture.place = place
    figures = [{"kind": c.kind, "traces": c.traces, "layout": c.layout} for c in charts]
    return printable(
        environment.get_template(template).render(
            title=title,
            sections=sections,
            charts=pack(json.dumps(figures, allow_nan=False, separators=(",", ":"))),
            pictures=[pack(p.content) for p in pictures],
            plotly=packed_plotly() if charts else "",
            policy=policy(get_plotlyjs(), script),
            style=(files / "page.css").read_text("utf-8"),
            script=script,
            **more,
        )
    )


def interactive(content: Interactive) -> str:
    """A page with charts to hover over and to turn."""
    tables = [content.table] if content.table else []
    group = Group(notes=content.notes, charts=content.charts, tables=tables)
    section = Section("charts", content.title, content.lead, [group])
    return render("page.html", "fldiag.plotting", content.title, [section])


def policy(*scripts: str) -> str:
    """A content security policy: only these scripts run, no event handler does, and nothing is fetched.

    Images stand in the page itself.
    """
    digests = (hashlib.sha256(s.encode("utf-8")).digest() for s in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )


#: The letters of base 85 that HTML gives a meaning, and what stands for them.
_LETTERS = bytes.maketrans(b"&<>", b"/,.")


def pack(content: str | bytes) -> str:
    """gzip in base 85 without letters that could end the element around it; the same content gives the same text."""
    raw = content.encode("utf-8") if isinstance(content, str) else content
    return base64.b85encode(gzip.compress(raw, 9, mtime=0)).translate(_LETTERS).decode()


@cache
def packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return pack(get_plotlyjs())


def literal(text: object) -> str:
    """Text for plotly, which reads a few HTML tags in its labels."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
