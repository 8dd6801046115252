"""The verbs. Nothing heavy is imported before a verb runs, so ``fldiag --help`` answers at once."""

from __future__ import annotations

# ruff: noqa: I001  (the order of --help)
import io
import sys

from fldiag.cli.interrupt import stop, stops_at_once

#: The order of ``--help``: what people ask most comes first.
FIRST = ("landscape", "spectrum", "matching", "forgetting", "drift", "personalise")

with stops_at_once():
    from fldiag import known
    from fldiag.cli import training, diagnostics  # noqa: F401
    from fldiag.cli.app import app

    for name in dict.fromkeys([*FIRST, *known.built_in()["diagnostics"]]):
        if name not in known.FLAGS:
            diagnostics.add(name)

    from fldiag.cli import compare, files, inform  # noqa: F401


def main() -> None:
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # a λ that the terminal does not have is a question mark, and no error
        sys.stdout.reconfigure(errors="replace")
    with stops_at_once():
        try:
            app()
        except KeyboardInterrupt:
            stop()
