"""The verbs. Nothing heavy is imported before a verb runs, so ``fldiag --help`` answers at once."""

from __future__ import annotations

# ruff: noqa: I001  (the order of --help)
from fldiag.cli import training, checkpoints, runs, report, exchange, toys, figures, inform  # noqa: F401
from fldiag.cli.app import app, toy

app.add_typer(toy, name="toy")


def main() -> None:
    app()
