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


@contextlib.contextmanager
def stops_at_once() -> Iterator[None]:
    """Ctrl-C ends the process for as long as the block runs, or until ``work_begins``. It changes nothing if somebody else
    handles Ctrl-C."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def work_begins() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, so that finished work is kept."""
    if signal.getsignal(signal.SIGINT) is _handle:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def stop() -> NoReturn:
    """End the process, whatever it is in the middle of."""
    os.write(2, b"error: stopped\n")
    os._exit(1)


def _handle(number: int, frame: FrameType | None) -> None:
    stop()
