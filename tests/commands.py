"""Verbs typed within this process, for the tests of the command line."""

from pathlib import Path

import pandas as pd
from typer.testing import CliRunner

from fldiag.cli import app

runner = CliRunner()


def run(*arguments, code=0):
    result = runner.invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def last(result):
    """The path that a verb ends with."""
    return Path(result.stdout.strip().splitlines()[-1])


def table(png):
    """The numbers beside a picture."""
    return pd.read_csv(png.with_suffix(".csv"))
