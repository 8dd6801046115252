"""What a section of the report consists of: plain data, which a diagnostic makes and the report turns into HTML.

A figure is a dict that the report's script draws; all text in it that plotly shows went through ``literal``. What a section is
made from stands in ``fldiag.plotting.collected``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from fldiag.plotting.style import number
from fldiag.plotting.tables import floats

#: Significant digits of the numbers in figures; downloads hold them as the tables do.
DIGITS = 5


@dataclass
class Table:
    """``rows``: one list of texts a row, the first is its heading. ``cards``: on a phone every row becomes a block."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    cards: bool = True


@dataclass
class Figure:
    """``spec`` goes to the script; ``run``: the run it is about, None for all."""

    caption: str
    spec: dict[str, Any]
    run: int | None = None
    wide: bool = False
    number: int = 0


@dataclass
class Picture:
    """A picture that is drawn already, as PNG; ``width``: in the page's pixels. ``run``: the run it is about, None for all."""

    caption: str
    png: bytes
    width: int
    run: int | None = None

    @property
    def text(self) -> str:
        """The PNG in base64, for a ``data:`` address."""
        return base64.b64encode(self.png).decode()


@dataclass
class Control:
    """A slider or a choice that the figures naming its ``id`` follow."""

    id: str
    label: str
    options: Sequence[str]
    slider: bool = False
    start: int = 0


@dataclass
class Group:
    """Figures that belong together; ``bar``: a colour scale of their own as (place in percent,
    label); ``pairs``: two in a row."""

    figures: list[Figure] = field(default_factory=list)
    title: str = ""
    notes: list[str] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    bar: list[tuple[float, str]] | None = None
    pairs: bool = False
    pictures: list[Picture] = field(default_factory=list)


@dataclass
class Missing:
    """Runs for which a section has nothing, and the command that changes it (empty: there is none)."""

    who: str
    why: str
    command: str = ""


@dataclass
class Section:
    """``sources`` are places in the report's list of tables."""

    id: str
    title: str
    lead: str
    groups: list[Group] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    @property
    def figures(self) -> list[Figure]:
        return [f for g in self.groups for f in g.figures]


def literal(text: object) -> str:
    """Text for plotly, which reads a few HTML tags in its labels."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def short(value: Any, digits: int = DIGITS) -> float | None:
    """The number with few digits for a figure; None where there is none to draw."""
    if value is None or pd.isna(value) or not math.isfinite(value):
        return None
    return float(f"{float(value):.{digits}g}")


def shorts(values: Iterable[Any]) -> list[float | None]:
    return [short(v) for v in values]


def percent(value: Any, digits: int = 3) -> str:
    return "–" if value is None or pd.isna(value) else f"{number(100 * float(value), digits)} %"


def plus_minus(value: Any, error: Any, share: bool = False) -> str:
    """``12.3 ± 0.4``, in percent with ``share``; no more digits than the error leaves certain."""
    if value is None or pd.isna(value):
        return "–"
    scale, end = (100, " %") if share else (1, "")
    shown, tail = scale * float(value), ""
    if error is not None and not pd.isna(error):
        tail = f" ± {number(scale * float(error), 2)}"
        if 0 < scale * float(error) < math.inf and math.isfinite(shown):
            shown = round(shown, 1 - math.floor(math.log10(scale * float(error))))
    return f"{number(shown, 4)}{tail}{end}"


def series(
    name: str,
    rows: pd.DataFrame,
    *,
    run: int | None = None,
    look: int | None = None,
    spread: str | None = None,
    x: str = "round",
    **more: Any,
) -> dict[str, Any]:
    """One line of a figure from the rows of a table; ``spread``: the column of its half band (or ``low``/``high``).

    Rounds that were not measured between others are gaps, where every round was measured elsewhere.
    """
    rows = rows.dropna(subset=[x]).sort_values(x)
    places, values = floats(rows[x]), floats(rows["value"])
    made: dict[str, Any] = {
        "name": literal(name),
        "run": run,
        "look": run if look is None else look,
        "x": [int(p) if p == int(p) else short(p) for p in places],
        "y": shorts(values),
        **more,
    }
    if spread in rows.columns:
        error = floats(rows[spread])
        if np.isfinite(error).any():
            made |= {"low": shorts(values - error), "high": shorts(values + error)}
    elif (
        spread == "interval" and {"low", "high"} <= set(rows.columns) and rows["low"].notna().any()
    ):
        made |= {"low": shorts(floats(rows["low"])), "high": shorts(floats(rows["high"]))}
    return made


def lines(
    found: Sequence[Mapping[str, Any]],
    y: str,
    *,
    x: str = "round",
    share: bool = False,
    zero: bool = False,
    log: bool = False,
    whole: bool = True,
) -> dict[str, Any]:
    """A figure of lines without controls."""
    return {
        "kind": "lines",
        "controls": [],
        "frames": {"": {"series": list(found)}},
        **axes(y, x=x, share=share, zero=zero, log=log, whole=whole),
    }


def add_lines(
    group: Group, caption: str, found: Sequence[Mapping[str, Any]], y: str, **more: Any
) -> None:
    """Add a figure of lines to the group, unless there is nothing to draw."""
    if found:
        group.figures.append(Figure(caption, lines(found, y, **more)))


def axes(
    y: str,
    *,
    x: str = "round",
    share: bool = False,
    zero: bool = False,
    log: bool = False,
    whole: bool = True,
) -> dict[str, Any]:
    return {
        "xtitle": literal(x),
        "ytitle": literal(y),
        "share": share,
        "zero": zero,
        "log": log,
        "whole": whole,
    }
