"""What the command line shows: progress on a terminal, one message for an error, tables, the path as last line."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from fldiag.errors import FldiagError, error_place, error_text, out_of_memory, printable
from fldiag.results.progress import progress_bar
from fldiag.version import version

#: What is said after Ctrl-C where whoever was stopped says nothing else.
STOPPED = "stopped", "finished work is kept; run the same command again to continue"


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

    def alarm(self, text: str) -> None:
        """A remark that must not be overlooked: red on a terminal."""
        if not sys.stderr.isatty():
            return self.note(text)
        from rich.console import Console as Rich
        from rich.text import Text

        Rich(stderr=True).print(Text(printable(text), style="bold red"))

    def confirm(self, question: str, remedy: str) -> bool:
        """What the person at the keyboard answers. Raises FldiagError with this remedy where nobody is there."""
        from rich.console import Console as Rich
        from rich.prompt import Confirm
        from rich.text import Text

        try:
            return Confirm.ask(Text(printable(question)), console=Rich(stderr=True), default=False)
        except EOFError:
            raise FldiagError("nobody answered", remedy, usage=True) from None

    def table(self, rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
        """Rows as an aligned table; ``columns`` maps keys to headings."""
        self.result.setdefault("rows", []).extend(rows)
        if self.machine or not rows:
            return
        from rich import box
        from rich.console import Console as Rich
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for key, heading in columns.items():
            words = any(isinstance(row.get(key), str) for row in rows)
            table.add_column(Text(heading), justify="left" if words else "right")
        for row in rows:
            table.add_row(*(Text(_format(row.get(key))) for key in columns))
        width = None if sys.stdout.isatty() else 160
        Rich(width=width, highlight=False).print(table)

    def show(self, summary: Iterable[Any]) -> None:
        """The summary of a table; for machines its rows, and what the notes are about."""
        from fldiag.results.summary import Note, Say, Small

        for item in summary:
            if isinstance(item, Small):
                self.table(list(item.rows), dict(item.columns))
            elif isinstance(item, Say):
                self.say(item.text)
            elif isinstance(item, Note):
                self.note(item.text)
            for key, value in (getattr(item, "about", None) or {}).items():
                self.result.setdefault(key, []).append(value)

    def done(self, *paths: Path) -> None:
        """The paths of what was written, a line each; the main file last."""
        self.result["paths"] = [str(p) for p in paths]
        if self.machine:
            print(json.dumps(self.result, default=_plain))
        else:
            for path in paths:
                print(printable(str(path)))

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
    if isinstance(value, bool):
        return "yes" if value else "no"
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
    """One message with the remedy instead of a traceback. Exit codes: 1 failed or stopped, 2 wrong use. With ``debug`` the
    traceback, which ends with the versions of what a report of it needs."""
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = _short(warnings.showwarning)
            yield
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            error.add_note(_versions())
            raise
        if isinstance(error, BrokenPipeError):  # fldiag list | head -1
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            for mark, text in zip(("error:", "  →"), _words(error), strict=True):
                if text:
                    print(mark, " ".join(printable(text).splitlines()), file=sys.stderr)
        sys.exit(2 if isinstance(error, FldiagError) and error.usage else 1)


def _words(error: BaseException) -> tuple[str, str]:
    """What is wrong, and what to do."""
    if isinstance(error, FldiagError):
        return error.what, error.remedy
    # one that cut the import of an extension module short is the cause of another error
    for stop in (error, error.__cause__):
        if isinstance(stop, KeyboardInterrupt):
            return stop.args if len(stop.args) == 2 else STOPPED  # type: ignore[return-value]
    if out_of_memory(error):
        return "out of memory", "use fewer --samples, a smaller --memory, or a larger machine"
    if place := error_place(error):
        what = f"{error_text(error)}, raised by code outside fldiag{place}"
        return what, "correct it there; --debug shows the traceback"
    what = f"unexpected {error_text(error)}"
    return what, "run again with --debug for the traceback, and report it"


def _versions() -> str:
    versions = {"fldiag": version(), "Python": platform.python_version()}
    for package in ("torch", "numpy", "pandas"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"Versions: {listed}; {platform.platform()}"


def _short(default: Callable[..., None]) -> Callable[..., None]:
    """Shows the warnings of fldiag in one line, without the place in the code, which helps nobody at the keyboard."""
    folder = Path(__file__).parents[1]

    def show(message: Warning | str, category: type[Warning], filename: str, *args: Any) -> None:
        if not Path(filename).is_relative_to(folder):
            return default(message, category, filename, *args)
        print("warning:", " ".join(printable(str(message)).splitlines()), file=sys.stderr)

    return show
