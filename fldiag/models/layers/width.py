"""How many channels of a layer a fraction of its width keeps."""

from __future__ import annotations

from fldiag.errors import FldiagError


def divisible(v: float, by: int = 8) -> int:
    """``v`` rounded to a multiple of ``by``, one step up when that would lose more than 10 %; at least 1."""
    n = max(1, int(v + by / 2) // by * by)
    return n + by if n < 0.9 * v else n


def channels(total: int, width: float) -> int:
    """How many of a layer's ``total`` channels the fraction ``width`` in (0, 1] keeps; all of them at 1.

    Raises FldiagError when ``width`` is no such fraction.
    """
    if not 0 < width <= 1:
        raise FldiagError(
            f"width = {width!r} is not a fraction of the channels",
            "give a number in (0, 1]",
            usage=True,
        )
    return total if width == 1 else min(total, divisible(total * width))
