"""The document of a report: sections with pictures, charts, tables and files, in one HTML file that stands alone.

Everything is inside the file and nothing is fetched. Text from files reaches the page only escaped, pictures only as images, and
a content security policy lets no other script run than the page's own and plotly.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure
from plotly.offline import get_plotlyjs

from fldiag.errors import printable
from fldiag.plotting import style

#: An SVG with more bytes than these (a surface, thousands of points) is shown as PNG.
HEAVY = 400_000


@dataclass
class Section:
    """A part of a page.

    ``alarms``: sentences; ``remarks``: a sentence -> the runs that it is about; ``charts``: caption and figure of plotly;
    ``pictures``: caption, kind (such as ``image/png``) and bytes of images; ``tables``: caption and headings -> rows, each
    beginning with its own heading; ``downloads``: label, name and bytes of files.
    """

    id: str
    title: str
    lead: str = ""
    alarms: list[str] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    charts: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    pictures: list[tuple[str, str, bytes]] = field(default_factory=list)
    tables: dict[tuple[str, tuple[str, ...]], list[list[str]]] = field(default_factory=dict)
    downloads: list[tuple[str, str, bytes]] = field(default_factory=list)

    def remark(self, label: str, text: str) -> None:
        """Say something of a run."""
        self.remarks.setdefault(text, []).append(label)

    def add_table(self, caption: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Add rows, of which those with the same headings become one table."""
        for row in rows:
            self.tables.setdefault((caption, tuple(row)), []).append(list(row.values()))

    def add_picture(self, caption: str, figure: Figure) -> None:
        """Add the figure as SVG, or as PNG where that would be heavy."""
        kind, content = "svg+xml", style.image(figure, "svg")
        if len(content) > HEAVY:
            kind, content = "png", style.image(figure, "png", 150)
        self.pictures.append((caption, f"image/{kind}", content))


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The page as text.

    Args:
        title: Its heading.
        lead: What stands below that.
        sections: Its parts, in order.
    """
    files, plotly = resources.files("fldiag.report") / "templates", get_plotlyjs()
    template, script, css = (
        (files / f"page.{end}").read_text("utf-8") for end in ("html", "js", "css")
    )
    digests = [hashlib.sha256(text.encode()).digest() for text in (script, plotly)]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page = environment.from_string(template).render(
        title=title,
        lead=lead,
        sections=sections,
        style=css,
        script=script,
        digests=[base64.b64encode(digest).decode() for digest in digests],
        plotly=pack(plotly.encode()),
        pack=pack,
    )
    return printable(page)


def pack(content: bytes) -> str:
    """What the page's script unpacks; the same content gives the same text."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()
