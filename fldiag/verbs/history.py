"""What the verbs that diagnose a whole run share: which rounds, the table and its provenance, what was missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag import api
from fldiag.checkpoint.run import Run
from fldiag.console import Console
from fldiag.errors import FldiagError
from fldiag.results import files
from fldiag.results.provenance import digest, provenance
from fldiag.results.select import only
from fldiag.rounds.history import History
from fldiag.verbs import output


def rounds(text: str | None, there: Sequence[int]) -> list[int] | None:
    """The rounds of ``--rounds``: such as ``5``, ``1,5,20-30``, ``last`` or ``every:10``; None for all.

    A range and ``every`` take what is stored of it. Raises FldiagError for anything else.
    """
    if text is None or text == "all":
        return None
    if text == "last":
        return list(there[-1:])
    try:
        if text.startswith("every:"):
            step = int(text.removeprefix("every:"))
            found = [r for r in there if r % step == 0]
        else:
            found = []
            for part in text.split(","):
                first, dash, last = part.partition("-")
                found += [r for r in there if int(first) <= r <= int(last)] if dash else [int(first)]
    except (ValueError, ZeroDivisionError):
        raise FldiagError(f"--rounds {text!r} is not a choice of rounds", "write for example 5 or 1,5,20-30 or every:10 or last",
                          usage=True) from None
    if not found:
        raise FldiagError(f"--rounds {text}: no such round is stored",
                          f"stored are {there[0]} to {there[-1]}" if there else "train first", usage=True)
    return sorted(set(found))


@dataclass
class Asked:
    """A run, where its results go, and the History that was asked for."""

    run: Run
    folder: Path
    history: History
    where: dict[str, Any]


def ask(console: Console, path: Path, out: Path | None, *, chosen: str | None, **where: Any) -> Asked:
    """Open the run and read what all its rounds share. Raises FldiagError before anything is written."""
    loaded = api.load(path)
    if not isinstance(loaded, Run):
        raise FldiagError(f"{path} is one checkpoint, and this compares the rounds of a run", "give the run's folder", usage=True)
    where = {**where, "rounds": rounds(chosen, loaded.rounds)}
    with output.user_code():
        history = History.of(loaded, **where)
    folder = output.prepare(out or (loaded.path / "diagnostics" if _writable(loaded.path) else output.FALLBACK))
    return Asked(loaded, folder, history, where)


def _writable(path: Path) -> bool:
    import os

    return os.access(path, os.W_OK)


def diagnose(console: Console, asked: Asked, name: str, **options: Any) -> tuple[pd.DataFrame, Path, list[Path]]:
    """The table, its path without ending, and the files written: provenance and CSV."""
    with console.progress(f"{asked.run.path.name} {name}") as progress:
        frame = api.diagnose(asked.history, name, cache=asked.folder / "cache", progress=progress, **options)
    plain = {k: v for k, v in asked.where.items() if v is None or isinstance(v, (str, int, float, bool, list))}
    path = asked.folder / f"{name}-{digest(asked.history.digest(), repr(sorted(options.items())), repr(plain))[:8]}"
    about = provenance(dtype=asked.history.dtype, device=asked.history.device, seed=options.get("seed"), diagnostic=name,
                       run=asked.run.path.name, config=asked.run.index["hash"], history=asked.history.digest(),
                       checkpoints=asked.history.files, options={**plain, **options})
    return frame, path, files.write_table(frame, path, about)


def remarks(console: Console, frame: pd.DataFrame, most: int = 8) -> None:
    """Say what was missing, each thing once."""
    missing = only(frame, metric="missing") if "note" in frame.columns else frame.iloc[:0]
    notes = missing["note"] if len(missing) else []
    texts = [f"{'' if pd.isna(r) else f'round {r}: '}{note}" for r, note in zip(missing["round"], notes, strict=True)]
    for text in texts[:most]:
        console.note(text)
    if len(texts) > most:
        console.note(f"and {len(texts) - most} more (rows metric = missing of the table)")
    console.result.setdefault("missing", []).extend(texts)
