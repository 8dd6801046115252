"""What the command line shows: progress on a terminal, one message for an error, tables, the path as last line."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from fldiag import plugins
from fldiag.cli.interrupt import work_begins
from fldiag.errors import FldiagError, error_place, error_text, out_of_memory, printable
from fldiag.results.progress import progress_bar
from fldiag.version import version

#: What is said after Ctrl-C where whoever was stopped says nothing else.
STOPPED = "stopped", "finished work is kept; run the same command again to continue"


class Console:
    """Results go to stdout (as JSON with ``machine``), progress and remarks to stderr.

    A verb makes one when it has imported what it needs: it begins to work, and Ctrl-C no longer ends the process at once.
    """

    def __init__(self, machine: bool = False):
        work_begins()
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
        """A callback ``(done, total, text)`` that draws a bar with the time remaining on a terminal, and is silent elsewhere.

        The time remaining follows from the parts that were finished since the first call, or since one that changed the total.
        """
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
        try:
            with warnings.catch_warnings():
                if not debug:
                    warnings.showwarning = _short(warnings.showwarning)
                yield
        except BaseException as error:
            if debug and not isinstance(error, SystemExit):
                error.add_note(_versions())
            raise
    except FldiagError as error:
        if debug:
            raise
        _complain(error.what, error.remedy)
        sys.exit(2 if error.usage else 1)
    except KeyboardInterrupt as stop:
        if debug:
            raise
        _complain(*(stop.args or STOPPED))
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        if isinstance(error, BrokenPipeError) and _is_unread():
            sys.exit(1)
        if isinstance(
            error.__cause__, KeyboardInterrupt
        ):  # which cut an import of an extension module short
            _complain(*STOPPED)
            sys.exit(1)
        if out_of_memory(error):
            _complain(
                "out of memory",
                "use fewer examples (--samples), a smaller --memory, or a larger machine",
            )
            sys.exit(1)
        if place := error_place(error):
            _complain(
                f"{error_text(error)}, raised by code outside fldiag{place}",
                "correct it there; --debug shows the traceback",
            )
            sys.exit(1)
        _complain(
            f"unexpected {error_text(error)}",
            "run again with --debug for the traceback, and report it",
        )
        sys.exit(1)


def _is_unread() -> bool:
    """Whether nobody reads the output any more (``fldiag list | head -1``), which is no error to speak of. The rest then goes
    nowhere, also what Python writes when it ends."""
    if not hasattr(select, "poll"):  # Windows
        return False
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # stdout is no file
        return False
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _versions() -> str:
    names = {"fldiag": version(), "Python": platform.python_version()}
    for package in ("torch", "numpy", "pandas"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            names[package] = metadata.version(package)
    return (
        "Versions: " + ", ".join(f"{n} {v}" for n, v in names.items()) + f"; {platform.platform()}"
    )


def _short(default: Callable[..., None]) -> Callable[..., None]:
    """Shows the warnings of fldiag and of packages with verbs in one line, without the place in the code, which helps nobody
    at the keyboard."""

    def show(message: Warning | str, category: type[Warning], filename: str, *args: Any) -> None:
        packages = (sys.modules.get(name) for name in ("fldiag", *plugins.loaded))
        folders = [folder for package in packages for folder in getattr(package, "__path__", ())]
        if not any(Path(filename).is_relative_to(folder) for folder in folders):
            return default(message, category, filename, *args)
        print("warning:", " ".join(printable(str(message)).splitlines()), file=sys.stderr)

    return show


def _complain(message: str, remedy: str) -> None:
    for mark, text in (("error:", message), ("  →", remedy)):
        if text:
            print(mark, " ".join(printable(text).splitlines()), file=sys.stderr)
