"""Verbs typed within this process, for the tests of the command line."""

import json
from functools import cache
from pathlib import Path

import pandas as pd
import torch
import typer.main
from typer.testing import CliRunner

from fldiag.cli import app
from fldiag.results import files
from fldiag.runs.index import write_index


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


def rewrite(folder, r, change):
    """A checkpoint with other content, and run.json that knows it."""
    file = folder / "rounds" / f"{r:04d}.pt"
    content = torch.load(file, weights_only=True)
    change(content)
    torch.save(content, file)
    index = json.loads((folder / "run.json").read_text())
    index["files"][f"rounds/{r:04d}.pt"] = files.sha256(file)
    write_index(folder, index)
