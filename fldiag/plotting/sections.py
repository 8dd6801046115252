"""What a page consists of, as plain data: sections of tables, pictures and charts (``fldiag.plotting.pages`` writes it)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

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


@dataclass
class Picture:
    """A matplotlib figure as the bytes of an image. ``kind``: svg or png; ``width``: in the page's pixels."""

    caption: str
    alt: str
    content: bytes
    kind: str
    width: int


@dataclass
class Chart:
    """A plotly figure, to hover over and to turn: ``kind`` is lines, scene or map."""

    caption: str
    kind: str
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any]


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
