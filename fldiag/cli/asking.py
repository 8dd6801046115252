"""What the verb of every diagnostic does: open, ask, write, and say what a person reads first."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fldiag.cli.console import Console
from fldiag.diagnosis.answer import Answer, answer
from fldiag.diagnosis.question import find_diagnostic
from fldiag.diagnosis.subjects import load
from fldiag.results.summary import Note, Say, Small
from fldiag.runs.run import Run

if TYPE_CHECKING:
    from fldiag.runs.schema import Checkpoint


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
    load_options = {k: options[k] for k in ("model", "data", "key") if k in options}
    of_runs = find_diagnostic(name).on in ("run", "clients", "runs")
    targets = [_opened(p, load_options, of_runs).allow(allow_code) for p in paths]
    answers = answer(name, targets, options, out=out, bar=console.progress, tell=console.note)
    for reply in answers:
        show(console, reply)
    first = answers[0]
    leading = {flag.diagnostic for flag in first.entry.flags.values() if flag.leads}
    ordered = sorted(answers, key=lambda reply: (reply.entry.name in leading, reply is first))
    console.done(
        *(file for reply in ordered for file in reply.files)
    )  # what people look at first is named last
    if any(
        strict and reply.entry.fails is not None and reply.entry.fails(reply.table)
        for reply in answers
    ):
        sys.exit(3)


def _opened(path: Path, load_options: Mapping[str, Any], of_runs: bool) -> Run | Checkpoint:
    if os.path.isfile(path / "run.json") or (of_runs and not os.path.exists(path)):
        return Run.open(path)
    return load(path, **load_options)


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
