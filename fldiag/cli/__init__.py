"""The verbs. Nothing heavy is imported before a verb runs, so ``fldiag --help`` answers at once."""

from __future__ import annotations

import io
import signal
import sys

# in the order of ``fldiag --help``
# isort: off
from fldiag.cli import start, diagnose, compare, files  # noqa: F401
from fldiag.cli.app import app
# isort: on


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a λ that the terminal lacks is a question mark
    # who ends a job says it this way; finished work is kept as with Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()
