"""``fldiag check`` and ``fldiag diff``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.compare import compare, words
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
    where: Mapping[str, Any],
) -> None:
    """Say the verdict, write it, and leave with 3 where it is fail (with ``strict``: or undecided).

    Raises FldiagError of wrong use (exit code 2) where a number could not be computed.
    """
    asked, reader = _asked(console, both, pair, allow_code, where)
    found = compare.check(asked, fail_if, reader, level)
    _show(
        console,
        asked,
        words.rows(found.table),
        words.headings(words.CHECKED, level),
        found.question,
        found.notes,
    )
    console.say(f"verdict: {found.verdict}" + ("" if fail_if or not asked.b else _better(found)))
    console.result |= {
        "verdict": found.verdict,
        "question": found.question,
        "notes": found.notes,
        "rows": _records(found.table),
    }
    written = _written(
        found.table,
        asked,
        out,
        {"verdict": found.verdict, "question": found.question, "notes": found.notes},
    )
    if xml is not None:
        written.append(files.write_text(xml, junit(found, strict)))
    console.done(*written)
    problem = _uncomputed(found)
    if problem is not None and found.verdict == "error":
        raise problem
    if problem is not None:
        console.note(str(problem))
    if found.verdict == "fail" or (strict and found.verdict == "undecided"):
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
    where: Mapping[str, Any],
) -> None:
    """Every number of both sides, and their picture."""
    from fldiag.compare import picture  # matplotlib, which a check does without
    from fldiag.plotting import style

    asked, reader = _asked(console, both, pair, allow_code, where)
    if not asked.b:
        raise FldiagError("one side is given", "give two: fldiag diff A B", usage=True)
    table = compare.diff(asked, numbers, reader, level)
    _show(
        console,
        asked,
        words.rows(table),
        words.headings(words.COLUMNS, level),
        table.attrs["question"],
        table.attrs["notes"],
    )
    console.result |= {
        "question": table.attrs["question"],
        "notes": table.attrs["notes"],
        "rows": _records(table),
    }
    written = _written(
        table, asked, out, {k: table.attrs[k] for k in ("question", "notes", "labels")}
    )
    console.done(*written, *style.write(picture.draw(table), written[0].with_suffix("")))


def both(
    given: Sequence[Path], a: Sequence[Path], b: Sequence[Path], baseline: Sequence[Path]
) -> Both:
    """The two sides, of the positional arguments ``A [B]``, of ``--a … --b …`` and of ``--baseline``.

    Raises FldiagError where a side is given in two ways, or more than two stand there without a name.
    """
    if (given and a) or (b and baseline) or (len(given) > 1 and (b or baseline)):
        raise FldiagError(
            "a side is given twice",
            "give A B, or A --baseline B, or --a A1 --a A2 --b B1 --b B2",
            usage=True,
        )
    if len(given) > 2:
        raise FldiagError(
            f"{len(given)} paths are given for two sides",
            "quote a pattern ('runs/fedavg-*'), or name the sides: --a A1 --a A2 --b B1 --b B2",
            usage=True,
        )
    first, second = list(a or given[:1]), list(b or baseline or given[1:])
    if not first:
        raise FldiagError(
            "no run is given", "give one: fldiag check RUN --baseline MAIN", usage=True
        )
    return first, second


def _asked(
    console: Console, both: Both, pair: Pairing, allow_code: Sequence[str], where: Mapping[str, Any]
) -> tuple[Sides, Reader]:
    found = sides(both[0], both[1] or None, pair, allow_code)
    return found, Reader({k: v for k, v in where.items() if v}, cache=True, bar=console.progress)


def _show(
    console: Console,
    asked: Sides,
    rows: list[dict[str, Any]],
    columns: dict[str, str],
    question: str,
    notes: Sequence[str],
) -> None:
    console.say(f"A: {asked.labels[0]}" + (f"   B: {asked.labels[1]}" if asked.b else ""))
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


def _better(found: compare.Checked) -> str:
    if found.verdict == "error":
        return " (not every number could be computed)"
    return {"fail": " (A is worse than B)", "pass": " (A is better than B, or the same)"}.get(
        found.verdict, " (the difference is within the noise)"
    )


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    shown = table.dropna(axis=1, how="all")
    return list(shown.astype(object).where(shown.notna(), None).to_dict("records"))


def _written(
    table: pd.DataFrame, asked: Sides, out: Path | None, about: dict[str, Any]
) -> list[Path]:
    kind = "check" if "condition" in table.columns else "diff"
    members = [str(m.path) for m in (*asked.a, *asked.b)]
    path = (
        prepare(out or FALLBACK)
        / f"{kind}-{digest(members, table.get('condition', table['metric']).tolist())[:8]}"
    )
    sides = {"a": members[: len(asked.a)], "b": members[len(asked.a) :]}
    computed = (
        provenance() if "torch" in sys.modules else {"fldiag": version(), "commit": commit()}
    )  # numbers of training alone
    return files.write_table(table, path, {**computed, **about, **sides})
