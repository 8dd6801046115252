"""``fldiag check`` and ``fldiag diff``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.compare import compare, wording
from fldiag.compare.junit import junit
from fldiag.compare.reading import Reader
from fldiag.compare.sides import Pairing, Sides, sides
from fldiag.console import Console
from fldiag.diagnosis.places import FALLBACK, prepare
from fldiag.errors import FldiagError
from fldiag.results import files
from fldiag.results.machine import commit
from fldiag.results.provenance import digest, provenance
from fldiag.version import version

#: The paths of both sides.
Both = tuple[list[Path], list[Path]]
#: Exit code of a check that failed.
FAILED = 3


def check(
    console: Console,
    both: Both,
    fail_if: Sequence[str],
    *,
    pair: Pairing,
    level: float,
    strict: bool,
    xml: Path | None,
    out: Path | None,
    allow_code: Sequence[str] = (),
    subject_options: Mapping[str, Any],
) -> None:
    """Say the verdict, write it, and leave with 3 where it is fail (with ``strict``: or undecided).

    Raises FldiagError of wrong use (exit code 2) where a number could not be computed.
    """
    comparison, reader = _open_sides(console, both, pair, allow_code, subject_options)
    outcome = compare.check(comparison, fail_if, reader, level)
    _show(
        console,
        comparison,
        wording.rows(outcome.table),
        wording.headings(wording.CHECKED, level),
        outcome.question,
        outcome.notes,
    )
    console.say(
        f"verdict: {outcome.verdict}" + ("" if fail_if or not comparison.b else _better(outcome))
    )
    console.result |= {
        "verdict": outcome.verdict,
        "question": outcome.question,
        "notes": outcome.notes,
        "rows": _records(outcome.table),
    }
    paths = _write_table(
        outcome.table,
        comparison,
        out,
        {"verdict": outcome.verdict, "question": outcome.question, "notes": outcome.notes},
    )
    if xml is not None:
        paths.append(files.write_text(xml, junit(outcome, strict)))
    console.done(*paths)
    problem = _uncomputed(outcome)
    if problem is not None and outcome.verdict == "error":
        raise problem
    if problem is not None:
        console.note(str(problem))
    if outcome.verdict == "fail" or (strict and outcome.verdict == "undecided"):
        sys.exit(FAILED)


def diff(
    console: Console,
    both: Both,
    numbers: Sequence[str] | None,
    *,
    pair: Pairing,
    level: float,
    out: Path | None,
    allow_code: Sequence[str] = (),
    subject_options: Mapping[str, Any],
) -> None:
    """Every number of both sides, and their picture."""
    from fldiag.compare import picture  # matplotlib, which a check does without
    from fldiag.plotting import style

    comparison, reader = _open_sides(console, both, pair, allow_code, subject_options)
    if not comparison.b:
        raise FldiagError("one side is given", "give two: fldiag diff A B", usage=True)
    table = compare.diff(comparison, numbers, reader, level)
    _show(
        console,
        comparison,
        wording.rows(table),
        wording.headings(wording.COLUMNS, level),
        table.attrs["question"],
        table.attrs["notes"],
    )
    console.result |= {
        "question": table.attrs["question"],
        "notes": table.attrs["notes"],
        "rows": _records(table),
    }
    paths = _write_table(
        table, comparison, out, {k: table.attrs[k] for k in ("question", "notes", "labels")}
    )
    console.done(*paths, *style.write(picture.draw(table), paths[0].with_suffix("")))


def both(
    paths: Sequence[Path], a: Sequence[Path], b: Sequence[Path], baseline: Sequence[Path]
) -> Both:
    """The two sides, of the positional arguments ``A [B]``, of ``--a … --b …`` and of ``--baseline``.

    Raises FldiagError where a side is given in two ways, or more than two stand there without a name.
    """
    if (paths and a) or (b and baseline) or (len(paths) > 1 and (b or baseline)):
        raise FldiagError(
            "a side is given twice",
            "give A B, or A --baseline B, or --a A1 --a A2 --b B1 --b B2",
            usage=True,
        )
    if len(paths) > 2:
        raise FldiagError(
            f"{len(paths)} paths are given for two sides",
            "quote a pattern ('runs/fedavg-*'), or name the sides: --a A1 --a A2 --b B1 --b B2",
            usage=True,
        )
    first, second = list(a or paths[:1]), list(b or baseline or paths[1:])
    if not first:
        raise FldiagError(
            "no run is given", "give one: fldiag check RUN --baseline MAIN", usage=True
        )
    return first, second


def _open_sides(
    console: Console,
    both: Both,
    pair: Pairing,
    allow_code: Sequence[str],
    subject_options: Mapping[str, Any],
) -> tuple[Sides, Reader]:
    comparison = sides(both[0], both[1] or None, pair, allow_code)
    return comparison, Reader(
        {k: v for k, v in subject_options.items() if v}, cache=True, bar=console.progress
    )


def _show(
    console: Console,
    comparison: Sides,
    rows: list[dict[str, Any]],
    columns: dict[str, str],
    question: str,
    notes: Sequence[str],
) -> None:
    console.say(
        f"A: {comparison.labels[0]}" + (f"   B: {comparison.labels[1]}" if comparison.b else "")
    )
    console.say(question)
    console.table(
        rows, {key: text for key, text in columns.items() if any(row[key] != "" for row in rows)}
    )
    for text in notes:
        console.note(text)


def _uncomputed(checked: compare.Checked) -> FldiagError | None:
    """Which conditions could not be tested, why, and what to do."""
    rows = checked.table[checked.table["verdict"] == "error"]
    if not len(rows):
        return None
    conditions = ", ".join(repr(text) for text in rows["condition"])
    return FldiagError(
        f"not tested: {conditions}: {'; '.join(dict.fromkeys(rows['note']))}",
        "; ".join(dict.fromkeys(rows["remedy"])),
        usage=True,
    )


def _better(outcome: compare.Checked) -> str:
    if outcome.verdict == "error":
        return " (not every number could be computed)"
    return {"fail": " (A is worse than B)", "pass": " (A is better than B, or the same)"}.get(
        outcome.verdict, " (the difference is within the noise)"
    )


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    table = table.dropna(axis=1, how="all")
    return list(table.astype(object).where(table.notna(), None).to_dict("records"))


def _write_table(
    table: pd.DataFrame, comparison: Sides, out: Path | None, about: dict[str, Any]
) -> list[Path]:
    kind = "check" if "condition" in table.columns else "diff"
    members = [str(m.path) for m in (*comparison.a, *comparison.b)]
    path = (
        prepare(out or FALLBACK)
        / f"{kind}-{digest(members, table.get('condition', table['metric']).tolist())[:8]}"
    )
    sides = {"a": members[: len(comparison.a)], "b": members[len(comparison.a) :]}
    computed = (
        provenance() if "torch" in sys.modules else {"fldiag": version(), "commit": commit()}
    )  # numbers of training alone
    return files.write_table(table, path, {**computed, **about, **sides})
