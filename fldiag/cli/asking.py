"""What the verb of every diagnostic does: open, ask, write, and say what a person reads first."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fldiag.cli.console import Console
from fldiag.diagnosis.answer import Answer, answer
from fldiag.results.summary import Note, Say, Small


def ask(
    console: Console,
    name: str,
    paths: Sequence[Path],
    options: Mapping[str, Any],
    out: Path | None,
    strict: bool = False,
    allow_code: Sequence[str] = (),
) -> None:
    """With ``strict`` exit code 3 where a check failed. Raises FldiagError for whatever cannot be asked or answered."""
    answers = answer(
        name,
        paths,
        options,
        out=out,
        allow_code=allow_code,
        bar=console.progress,
        tell=console.note,
    )
    for reply in answers:
        show(console, reply)
    first, *others = answers
    # what people look at first is named last
    console.done(*(file for reply in (*others, first) for file in reply.files))
    if any(
        strict and reply.entry.fails is not None and reply.entry.fails(reply.table)
        for reply in answers
    ):
        sys.exit(3)


def show(console: Console, reply: Answer) -> None:
    """The summary of an answer on the terminal; for machines its rows, and what the notes are about."""
    for item in reply.summary():
        if isinstance(item, Small):
            console.table(list(item.rows), dict(item.columns))
        elif isinstance(item, Say):
            console.say(item.text)
        elif isinstance(item, Note):
            console.note(item.text)
        for key, value in (getattr(item, "about", None) or {}).items():
            console.result.setdefault(key, []).append(value)
