"""Verbs typed within this process, for the tests of the command line."""

import json
from functools import cache
from pathlib import Path

import pandas as pd
import typer.main
from typer.testing import CliRunner

from fldiag import registry
from fldiag.cli import app
from fldiag.results import files
from fldiag.runs.checkpoint import pack, read_tensors
from fldiag.runs.run import Run


@cache
def commands():
    return typer.main.get_command(app)


def invoke(*arguments):
    """What a verb answers. The commands are built once; CliRunner itself builds them at each call. A verb is a process of its own,
    which knows of no code that another one named."""
    registry.ALLOWED.clear()
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
    """A checkpoint with other content, and lines that know it."""
    run = Run.open(folder)
    file = folder / run.round_file(r)
    content = read_tensors(file)
    change(content)
    manifest, state = content.pop("manifest"), content.pop("model")
    file.write_bytes(pack({"manifest": manifest}, model=state, **content))
    rewrite_lines(
        folder,
        lambda n, record: (
            record["files"].update({run.round_file(r): files.sha256(file)})
            if record["round"] == r and record["files"]
            else None
        ),
    )


def rewrite_lines(folder, change):
    """The lines of a run after ``change(number, record)``, each with its digest."""
    lines = []
    for n, line in enumerate((folder / "rounds.jsonl").read_text().splitlines()):
        record = json.loads(line)
        del record["digest"]
        change(n, record)
        lines.append(json.dumps(files.with_digest(record)) + "\n")
    (folder / "rounds.jsonl").write_text("".join(lines))
