"""The sheet that pictures are made for: how wide they are printed, and in which formats they are written.

Every picture has a width and formats of its own; inside ``asked(...)`` all have those of the journal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from fldiag.errors import FldiagError
from fldiag.results.files import PICTURES

#: Widths in inches: one column and both columns of a two-column paper.
WIDTHS = {"single": 3.35, "double": 6.9}


@dataclass(frozen=True)
class Sheet:
    """``width``: in inches; None: each picture's own. ``formats``: endings, the last one is what people look at first."""

    width: float | None = None
    formats: tuple[str, ...] = ("pdf", "png")


_SHEET: ContextVar[Sheet] = ContextVar("sheet")


def current() -> Sheet:
    return _SHEET.get(Sheet())


@contextmanager
def use_sheet(width: str | float | None = None, format: str | None = None) -> Iterator[Sheet]:
    """All pictures that are drawn and written within have this width and these formats.

    Args:
        width: ``single``, ``double``, or millimetres; None: each picture's own.
        format: one or more of pdf, png and svg, by comma; None: pdf and png.

    Raises:
        FldiagError: another width or format.
    """
    before = current()
    token = _SHEET.set(
        Sheet(
            before.width if width is None else inches(width),
            before.formats if format is None else formats(format),
        )
    )
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


def formats(text: str) -> tuple[str, ...]:
    """
    >>> formats("svg,pdf")
    ('svg', 'pdf')
    """
    kinds = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    if set(kinds) - set(PICTURES):
        what = f"format = {text!r} is not a picture's format"
        raise FldiagError(what, f"choose of {', '.join(PICTURES)}", usage=True)
    return kinds
