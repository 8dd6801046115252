"""Pages that stand alone: the report, and a landscape to turn. Everything is inside the file; nothing is fetched."""

from __future__ import annotations

import base64
import codecs
import gzip
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from fldiag.errors import printable
from fldiag.plotting.sections import Group, Interactive, Section


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
    home = resources.files("fldiag.plotting") / "templates"
    script = (home / "page.js").read_text("utf-8")
    charts = [chart for s in sections for g in s.groups for chart in g.charts]
    pictures = [picture for s in sections for g in s.groups for picture in g.pictures]
    figures = [{"kind": c.kind, "traces": c.traces, "layout": c.layout} for c in charts]
    return printable(
        environment.get_template(template).render(
            title=title,
            sections=sections,
            place={id(item): i for items in (charts, pictures) for i, item in enumerate(items)},
            charts=pack(json.dumps(figures, allow_nan=False, separators=(",", ":"))),
            pictures=[pack(p.content) for p in pictures],
            plotly=packed_plotly() if charts else "",
            policy=policy(get_plotlyjs(), script),
            style=(home / "page.css").read_text("utf-8"),
            script=script,
            id=id,
            **more,
        )
    )


def interactive(content: Interactive) -> str:
    """A page with charts to hover over and to turn."""
    tables = [content.table] if content.table else []
    section = Section(
        "charts",
        content.title,
        content.lead,
        [Group(notes=content.notes, charts=content.charts, tables=tables)],
    )
    return render("page.html", "fldiag.plotting", content.title, [section])


def policy(*scripts: str) -> str:
    """A content security policy: only these scripts run, no event handler does, and nothing is fetched.

    Images stand in the page itself.
    """
    digests = (
        base64.b64encode(hashlib.sha256(s.encode("utf-8")).digest()).decode() for s in scripts
    )
    allowed = " ".join(f"'sha256-{d}'" for d in digests)
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


def pack_table(raw: bytes) -> tuple[str, int]:
    """A csv table, packed column by column, which takes much less space, and its number of columns; 0 where it is packed as it
    is, because its lines have different numbers of commas."""
    rows = [line.split(b",") for line in raw.removesuffix(b"\n").split(b"\n")]
    columns = len(rows[0])
    if (
        not raw.endswith(b"\n")
        or raw.startswith(codecs.BOM_UTF8)
        or any(len(row) != columns for row in rows)
    ):
        return pack(raw), 0
    return pack(b"\n".join(cell for column in zip(*rows, strict=True) for cell in column)), columns


@cache
def packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return pack(get_plotlyjs())


def literal(text: object) -> str:
    """Text for plotly, which reads a few HTML tags in its labels."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
