"""The one exception users see: what went wrong, where, with which value, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FldiagError(Exception):
    """A problem the user can mend.

    Args:
        what: what is wrong, with the place and the value.
        remedy: what to do.
        usage: wrong use (exit code 2 on the command line), as against a failure (exit code 1).

    >>> raise FldiagError("lr = -1", "use a number above 0")
    Traceback (most recent call last):
        ...
    fldiag.errors.FldiagError: lr = -1; use a number above 0
    """

    def __init__(self, what: str, remedy: str = "", *, usage: bool = False):
        self.what, self.remedy, self.usage = what, remedy, usage
        super().__init__(f"{what}; {remedy}" if remedy else what)


def nearest(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` plus the known names: the tail of every unknown-name message."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names)}"


def unknown(kind: str, name: str, known: Iterable[str]) -> FldiagError:
    return FldiagError(f"unknown {kind} {name!r}", nearest(name, known), usage=True)
