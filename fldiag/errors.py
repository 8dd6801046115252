"""The one exception users see: what went wrong, where, with which value, and what to do about it; and the version."""

from __future__ import annotations

import difflib
import re
import sys
import traceback
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

try:
    __version__ = metadata.version("fldiag")
except metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+source"


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


def nearest(name: str, names: Iterable[str]) -> str:
    """``did you mean 'x'?`` or else the valid names: the tail of every unknown-name message."""
    folded = {n.casefold(): n for n in sorted(names)}
    close = difflib.get_close_matches(str(name).casefold(), folded, n=1, cutoff=0.5)
    return (
        f"did you mean {folded[close[0]]!r}?"
        if close
        else f"known: {', '.join(folded.values()) or 'none'}"
    )


def unknown(kind: str, name: str, names: Iterable[str]) -> FldiagError:
    return FldiagError(f"unknown {kind} {name!r}", nearest(name, names), usage=True)


#: Control characters but tab and line end, marks that reverse writing, bytes of file names that are no UTF-8, and no characters.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(text: str) -> str:
    r"""A text for terminals and files, whatever names stand in it: what commands a terminal, or what XML and UTF-8 cannot hold,
    is spelled out.

    >>> printable("run\x1b[31m")
    'run\\u001b[31m'
    """
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def check_name(path: Path) -> None:
    """Raises FldiagError for a path that no table and no text file can name."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise FldiagError(
            f"{path}: Python cannot read this name as UTF-8",
            "set PYTHONUTF8=1 in the environment, or rename the file or folder",
            usage=True,
        ) from None


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says first, or its kind where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]


def error_text(error: BaseException) -> str:
    """Kind and first line of an error of somebody else's code."""
    return f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__


def error_place(error: BaseException) -> str:
    """Where somebody else's code raised an error, as ``(models.py:12, in forward)`` with a space before it; "" where only
    fldiag's and installed packages' code ran."""
    others = (str(Path(__file__).parent), sys.prefix, sys.base_prefix, "<frozen", "<string")
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(others):
            place = f" ({Path(file).name}:{line}, in {frame.f_code.co_name})"
    return place
