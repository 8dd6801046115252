"""What the command line shows: progress on a terminal, one message for an error, tables, the path as last line."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from click.exceptions import Abort, ClickException, Exit

from fldiag.errors import FldiagError, error_text, printable
from fldiag.results.progress import progress_bar


class Console:
    """Results go to stdout (as JSON with ``machine``), progress and remarks to stderr."""

    progress = staticmethod(progress_bar)

    def __init__(self, machine: bool = False):
        self.machine = machine
        self.result: dict[str, Any] = {}

    def say(self, text: str) -> None:
        if not self.machine:
            print(printable(text))

    def note(self, text: str) -> None:
        print(printable(text), file=sys.stderr)

    def table(self, rows: list[dict[str, Any]], columns: dict[str, str] | None = None) -> None:
        """Rows as an aligned table; ``columns`` maps keys to headings (default: all keys)."""
        self.result.setdefault("rows", []).extend(rows)
        if self.machine or not rows:
            return
        from rich.console import Console as Rich
        from rich.table import Table

        from fldiag.results.summary import cell

        columns = columns or {key: key for row in rows for key in row}
        table = Table(*columns.values(), box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(printable(cell(row.get(key))) for key in columns))
        width = None if sys.stdout.isatty() else 160
        Rich(width=width, highlight=False, markup=False, emoji=False).print(table)

    def show(self, summary: Iterable[Any]) -> None:
        """The summary of a table; for machines its rows, and what the notes are about."""
        from fldiag.results.summary import Sentence, SmallTable

        for item in summary:
            if isinstance(item, SmallTable):
                self.table(list(item.rows), dict(item.columns))
                continue
            (self.say if isinstance(item, Sentence) else self.note)(item.text)
            for key, value in (item.about or {}).items():
                self.result.setdefault(key, []).append(value)

    def done(self, *paths: Path) -> None:
        """The paths of what was written, a line each; the main file last."""
        self.result["paths"] = [str(p) for p in paths]
        if self.machine:
            print(json.dumps(self.result, default=_plain))
        for path in paths:
            self.say(str(path))


def _plain(value: Any) -> Any:
    """What JSON has no form for: numbers of numpy, missing entries of pandas, paths."""
    if type(value).__name__ == "NAType":
        return None
    return value.item() if hasattr(value, "item") else str(value)


@contextlib.contextmanager
def errors(debug: bool) -> Iterator[None]:
    """One message with the remedy instead of a traceback. Exit codes: 1 failed or stopped, 2 wrong use."""
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = lambda text, *place: _line("warning:", text)  # type: ignore[assignment]
            yield
    except BrokenPipeError:  # fldiag list | head -1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (Exception, KeyboardInterrupt) as error:
        if debug or isinstance(error, (Abort, ClickException, Exit)):
            raise
        if isinstance(error, KeyboardInterrupt):
            error = FldiagError(
                "stopped; finished work is kept",
                "to continue, run the same command again (a training with --resume)",
            )
        elif not isinstance(error, FldiagError):
            error = FldiagError(
                f"unexpected {error_text(error)}", "run again with --debug for the traceback"
            )
        _line("error:", error.what)
        if error.remedy:
            _line("  →", error.remedy)
        sys.exit(2 if error.usage else 1)


def _line(mark: str, text: Any) -> None:
    print(mark, " ".join(printable(str(text)).splitlines()), file=sys.stderr)
