"""Pages that stand alone: the report, and a landscape to turn.

Everything is inside the file and nothing is fetched. Text from files reaches the page only escaped, pictures only as images, and
a content security policy lets no other script run than the page's own and plotly.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
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


@dataclass
class Table:
    """Texts; the first of each row is its heading."""

    caption: str
    head: Sequence[str]
    rows: list[list[str]]


@dataclass
class Chart:
    """A plotly figure, to hover over or to turn."""

    caption: str
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any]

    @property
    def is_scene(self) -> bool:
        """Whether it has three dimensions."""
        return "scene" in self.layout


@dataclass
class Picture:
    """An image of a kind such as ``image/png``."""

    caption: str
    kind: str
    content: bytes


@dataclass
class Section:
    """A part of a page.

    ``alarms``: sentences; ``remarks``: a sentence -> the runs that it is about; ``downloads``: label, name and content of files.
    """

    id: str
    title: str
    lead: str = ""
    alarms: list[str] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    charts: list[Chart] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    downloads: list[tuple[str, str, bytes]] = field(default_factory=list)

    def remark(self, label: str, text: str) -> None:
        """Say something of a run."""
        self.remarks.setdefault(text, []).append(label)

    def add_table(self, caption: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Add a table of rows with the same headings, if there are rows."""
        if rows:
            self.tables.append(Table(caption, list(rows[0]), [list(r.values()) for r in rows]))


def picture(figure: Figure, caption: str) -> Picture:
    """The figure as SVG, or as PNG where that would be heavy."""
    content = style.image(figure, "svg")
    if len(content) > HEAVY:
        return Picture(caption, "image/png", style.image(figure, "png", 150))
    return Picture(caption, "image/svg+xml", content)


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The page as text.

    Args:
        title: Its heading.
        lead: What stands below that.
        sections: Its parts, in order.
    """
    from jinja2 import Environment, StrictUndefined  # a picture alone needs neither of them
    from plotly.offline import get_plotlyjs

    files = resources.files("fldiag.plotting") / "templates"
    template, script, css = (
        (files / f"page.{end}").read_text("utf-8") for end in ("html", "js", "css")
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    has_charts = any(section.charts for section in sections)
    page = environment.from_string(template).render(
        title=title,
        lead=lead,
        sections=sections,
        style=css,
        script=script,
        digests=[script_digest(script), script_digest(get_plotlyjs())],
        plotly=packed_plotly() if has_charts else "",
        pack=pack,
    )
    return printable(page)


def script_digest(script: str) -> str:
    """How a content security policy names a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def pack(content: bytes) -> str:
    """What the page's script unpacks; the same content gives the same text."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


@cache
def packed_plotly() -> str:
    """plotly's script, packed."""
    from plotly.offline import get_plotlyjs

    return pack(get_plotlyjs().encode())


def literal(text: object) -> str:
    """Text for plotly, which reads a few HTML tags in its labels."""
    return html.escape(str(text), quote=False)
