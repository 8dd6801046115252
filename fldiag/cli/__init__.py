"""The verbs. Nothing heavy is imported before a verb runs, so ``fldiag --help`` answers at once."""

from __future__ import annotations

from fldiag import known

# ruff: noqa: I001  (the order of --help)
from fldiag.cli import training, diagnostics  # noqa: F401
from fldiag.cli.app import app, toy

#: The order of ``--help``: what people ask most comes first.
FIRST = ("landscape", "spectrum", "matching", "forgetting", "drift", "personalise")
for name in dict.fromkeys([*FIRST, *known.built_in()["diagnostics"]]):
    diagnostics.add(name)

from fldiag.cli import partition, report, exchange, toys, figures, inform  # noqa: E402, F401

app.add_typer(toy, name="toy")


def main() -> None:
    app()
