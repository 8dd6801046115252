"""The verbs. Nothing heavy is imported before a verb runs, so ``fldiag --help`` answers at once."""

# in the order of ``fldiag --help``
# isort: off
from fldiag.cli.app import app, main
from fldiag.cli import start, diagnose, compare, files  # noqa: F401
# isort: on

__all__ = ["app", "main"]
