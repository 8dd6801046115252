"""A progress bar with the time remaining, for terminals and notebooks."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fldiag.errors import printable


def shell() -> Any:
    """The notebook's side of IPython; None in a script, in a terminal and where IPython was never imported."""
    ipython = sys.modules.get("IPython")
    running = None if ipython is None else ipython.get_ipython()
    return running if hasattr(running, "kernel") else None


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A callback ``(done, total, text)`` that draws the bar; elsewhere than on a terminal or in a notebook it is silent.

    The time remaining follows from the parts that were finished since the first call, or since one that changed the total.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        transient=True,
        console=console,
        disable=not (console.is_terminal or console.is_jupyter),
        speed_estimate_period=math.inf,  # parts may take minutes each
    ) as bar:
        task = bar.add_task(printable(title), total=None)

        def show(done: int, total: int, text: str) -> None:
            line = printable(f"{title}: {text}")
            bar.update(task, completed=done, total=total, description=line)
            if done == 0:  # else rich times from the end of the first part on
                bar.advance(task, 0)

        yield show
