"""A progress bar with the time remaining, for terminals and notebooks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

from fldiag.errors import printable


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A callback ``(done, total, text)`` that draws the bar; elsewhere than on a terminal or in a notebook it is silent.

    The time remaining follows from the parts that were finished since the first call, or since one that changed the total.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import MofNCompleteColumn, Progress

    columns, console = (*Progress.get_default_columns(), MofNCompleteColumn()), Console(stderr=True)
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not (console.is_terminal or console.is_jupyter),
        speed_estimate_period=math.inf,  # parts may take minutes each
    ) as bar:
        task = bar.add_task(escape(printable(title)), total=None)

        def show(done: int, total: int, text: str) -> None:
            line = escape(printable(f"{title}: {text}"))
            bar.update(task, completed=done, total=total, description=line)
            if done == 0:  # else rich times from the end of the first part on
                bar.advance(task, 0)

        yield show


@contextlib.contextmanager
def notebook_bar(
    title: str, progress: Callable[[int, int, str], None] | None = None
) -> Iterator[Callable[[int, int, str], None]]:
    """``progress``; without one a bar in a notebook, and nothing elsewhere."""
    from rich.console import Console

    if progress is None and Console().is_jupyter:
        with progress_bar(title) as bar:
            yield bar
    else:
        yield progress or (lambda done, total, text: None)
