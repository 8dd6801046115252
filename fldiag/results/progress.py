"""A progress bar with the time remaining, for terminals and notebooks."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from fldiag.errors import printable

#: Seconds between two pictures of a bar in a notebook.
REFRESH = 0.2


def shell() -> Any:
    """The notebook's side of IPython; None in a script, in a terminal and where IPython was never imported."""
    ipython = sys.modules.get("IPython")
    running = None if ipython is None else ipython.get_ipython()
    return running if hasattr(running, "kernel") else None


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A callback ``(done, total, text)`` that draws the bar.

    The time remaining follows from the parts that were finished since the first call, or since one that changed the total.
    """
    with _cell_bar(title) if shell() is not None else _terminal_bar(title) as show:
        yield show


@contextlib.contextmanager
def _terminal_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        transient=True,
        console=Console(stderr=True),
        speed_estimate_period=math.inf,  # parts may take minutes each
    ) as bar:
        task = bar.add_task(printable(title), total=None)

        def show(done: int, total: int, text: str) -> None:
            line = printable(f"{title}: {text}")
            bar.update(task, completed=done, total=total, description=line)
            if done == 0:  # else rich times from the end of the first part on
                bar.advance(task, 0)

        yield show


@contextlib.contextmanager
def _cell_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """By IPython alone: rich's bar needs ipywidgets in a notebook."""
    from IPython.display import HTML, display

    cell = display(HTML(escape(title)), display_id=True)
    first, began, total_before, last_update = 0, 0.0, -1, -math.inf

    def show(done: int, total: int, text: str) -> None:
        nonlocal first, began, total_before, last_update
        now = time.monotonic()
        if total != total_before:
            first, began, total_before = done, now, total
        if now - last_update < REFRESH:
            return
        last_update = now
        remaining = ""
        if done > first:
            minutes, seconds = divmod(round((now - began) / (done - first) * (total - done)), 60)
            remaining = f", {minutes}:{seconds:02} left"
        bar = f'<progress value="{done}" max="{total}"></progress>'
        cell.update(HTML(f"{bar} {escape(f'{title}: {text}')} ({done}/{total}{remaining})"))

    try:
        yield show
    finally:
        cell.update(HTML(""))
