"""The sheet that pictures are made for: how wide they are printed, and in which formats they are written.

Every picture has a width and formats of its own; inside ``use_sheet(...)`` all have those of the journal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from fldiag.errors import FldiagError

#: Widths in inches: one column and both columns of a two-column paper.
WIDTHS = {"single": 3.35, "double": 6.9}
FORMATS = ("pdf", "png", "svg")


@dataclass(frozen=True)
class Sheet:
    """``width``: in inches; None: each picture's own. ``formats``: endings, the last one is what people look at first."""

    width: float | None = None
    formats: tuple[str, ...] = ("pdf", "png")


_SHEET: ContextVar[Sheet] = ContextVar("sheet")


def current() -> Sheet:
    """The sheet of the ``use_sheet`` around the call, or else the default one."""
    return _SHEET.get(Sheet())


@contextmanager
def use_sheet(width: str | float | None = None, format: str | None = None) -> Iterator[Sheet]:
    """All pictures that are drawn and written within have this width and these formats.

    Args:
        width: ``single``, ``double``, or 60 to 400 millimetres; None: each picture's own.
        format: One or more of pdf, png and svg, by comma; None: pdf and png.

    Yields:
        The sheet.

    Raises:
        FldiagError: Another width or format.
    """
    before = current()
    formats = before.formats if format is None else tuple(format.lower().split(","))
    if not set(formats) <= set(FORMATS):
        raise FldiagError(f"format = {format!r} is not of {', '.join(FORMATS)}", usage=True)
    token = _SHEET.set(Sheet(before.width if width is None else inches(width), formats))
    try:
        yield current()
    finally:
        _SHEET.reset(token)


def inches(width: str | float) -> float:
    """A width in inches.

    >>> inches("single"), inches("140mm") == 140 / 25.4
    (3.35, True)
    """
    if width in WIDTHS:
        return WIDTHS[str(width)]
    try:
        millimetres = float(str(width).removesuffix("mm"))
    except ValueError:
        millimetres = 0.0
    if not 60 <= millimetres <= 400:  # between which a picture can be read and printed
        what = f"width = {str(width)!r} is not a picture's width"
        raise FldiagError(what, "give single, double or 60 to 400 millimetres", usage=True)
    return millimetres / 25.4
