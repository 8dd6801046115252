"""What the command line shows: progress on a terminal, one message for an error, tables, the path as last line."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from click.exceptions import Abort, ClickException, Exit

from fldiag.errors import FldiagError, error_text, printable
from fldiag.results.progress import progress_bar

#: What is said after Ctrl-C where whoever was stopped says nothing else.
STOPPED = FldiagError("stopped", "finished work is kept; run the same command again to continue")


class Console:
    """Results go to stdout (as JSON with ``machine``), progress and remarks to stderr."""

    def __init__(self, machine: bool = False):
        self.machine = machine
        self.result: dict[str, Any] = {}

    def say(self, text: str) -> None:
        if not self.machine:
            print(printable(text))

    def note(self, text: str) -> None:
        print(printable(text), file=sys.stderr)

    def table(self, rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
        """Rows as an aligned table; ``columns`` maps keys to headings."""
        self.result.setdefault("rows", []).extend(rows)
        if self.machine or not rows:
            return
        from rich.console import Console as Rich
        from rich.table import Table

        table = Table(*columns.values(), box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(_format(row.get(key)) for key in columns))
        width = None if sys.stdout.isatty() else 160
        Rich(width=width, highlight=False, markup=False, emoji=False).print(table)

    def show(self, summary: Iterable[Any]) -> None:
        """The summary of a table; for machines its rows, and what the notes are about."""
        from fldiag.results.summary import Say, Small

        for item in summary:
            if isinstance(item, Small):
                self.table(list(item.rows), dict(item.columns))
                continue
            (self.say if isinstance(item, Say) else self.note)(item.text)
            for key, value in (item.about or {}).items():
                self.result.setdefault(key, []).append(value)

    def done(self, *paths: Path) -> None:
        """The paths of what was written, a line each; the main file last."""
        self.result["paths"] = [str(p) for p in paths]
        if self.machine:
            print(json.dumps(self.result, default=_plain))
        for path in paths:
            self.say(str(path))

    @contextlib.contextmanager
    def progress(self, title: str) -> Iterator[Callable[[int, int, str], None]]:
        """A callback ``(done, total, text)`` that draws a bar with the time remaining on a terminal, and is silent elsewhere."""
        if not sys.stderr.isatty():
            yield lambda done, total, text: None
            return
        with progress_bar(title) as bar:
            yield bar


def _format(value: Any) -> str:
    if _is_missing(value):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def _is_missing(value: Any) -> bool:
    """None, NaN, or the missing entry of a table (pandas' NA, which is neither equal nor unequal to itself)."""
    return value is None or type(value).__name__ == "NAType" or bool(value != value)


def _plain(value: Any) -> Any:
    if _is_missing(value):
        return None
    return value.item() if hasattr(value, "item") else str(value)


@contextlib.contextmanager
def errors(debug: bool) -> Iterator[None]:
    """One message with the remedy instead of a traceback. Exit codes: 1 failed or stopped, 2 wrong use."""
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = _warn  # type: ignore[assignment]
            yield
    except (Exception, KeyboardInterrupt) as error:
        if debug or isinstance(error, (Abort, ClickException, Exit)):
            raise
        if isinstance(error, BrokenPipeError):  # fldiag list | head -1
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        problem = _problem(error)
        for mark, text in (("error:", problem.what), ("  →", problem.remedy)):
            if text:
                _line(mark, text)
        sys.exit(2 if problem.usage else 1)


def _problem(error: BaseException) -> FldiagError:
    """What is wrong, and what to do."""
    if isinstance(error, FldiagError):
        return error
    # one that cut the import of an extension module short is the cause of another error
    for stop in (error, error.__cause__):
        if isinstance(stop, KeyboardInterrupt):
            return FldiagError(*stop.args) if stop.args else STOPPED
    remedy = "run again with --debug for the traceback"
    return FldiagError(f"unexpected {error_text(error)}", remedy)


def _warn(message: Warning | str, *_: Any) -> None:
    """A warning without its place in the code, which helps nobody at the keyboard."""
    _line("warning:", str(message))


def _line(mark: str, text: str) -> None:
    print(mark, " ".join(printable(text).splitlines()), file=sys.stderr)
