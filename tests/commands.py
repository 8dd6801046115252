"""Verbs typed within this process, for the tests of the command line."""

from functools import cache
from pathlib import Path

import pandas as pd
import typer.main
from typer.testing import CliRunner

from fldiag.cli import app


@cache
def commands():
    return typer.main.get_command(app)


def invoke(*arguments):
    """What a verb answers. The commands are built once; CliRunner itself builds them at each call."""
    return super(CliRunner, CliRunner()).invoke(commands(), [str(a) for a in arguments])


def run(*arguments, code=0):
    result = invoke(*arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def last(result):
    """The path that a verb ends with."""
    return Path(result.stdout.strip().splitlines()[-1])


def table(png):
    """The numbers beside a picture."""
    return pd.read_csv(png.with_suffix(".csv"))
