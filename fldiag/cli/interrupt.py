"""Ctrl-C before a verb works: nothing has begun yet, so the program ends at once, without a traceback.

An import that KeyboardInterrupt cuts short may also go on with half a module, or say that something else is wrong; and the
package that reads the command line ends with words and an exit code of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

#: The packages whose verbs were imported.
foreign: set[str] = set()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """For as long as the block runs. Where a verb works, and where somebody else handles Ctrl-C, nothing changes."""
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(number: int, frame: FrameType | None) -> None:
    if importing(frame) or not working(frame):
        stop()
    raise KeyboardInterrupt


def stop() -> NoReturn:
    """End the process, whatever it is in the middle of."""
    os.write(2, b"error: stopped\n")
    os._exit(1)


def importing(frame: FrameType | None) -> bool:
    """Whether a frame lies inside an import statement, before anything that trains: a run that is owned is released properly."""
    found = False
    while frame is not None:
        found = found or frame.f_code.co_filename.startswith("<frozen importlib")
        if (
            frame.f_globals.get("__name__") == "fldiag.training.rounds"
            and frame.f_code.co_name != "<module>"
        ):
            return False
        frame = frame.f_back
    return found


def working(frame: FrameType | None) -> bool:
    """Whether a frame lies inside what a verb does: in fldiag beyond the reading of the command line, or in another package's
    verb."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name != "<module>" and (
            module.partition(".")[0] in foreign
            or (module.startswith("fldiag.") and not module.startswith("fldiag.cli"))
        ):
            return True
        frame = frame.f_back
    return False
