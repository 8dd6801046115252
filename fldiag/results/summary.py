"""What a person reads first of a result table: small tables, sentences and remarks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fldiag.results.table import WHOLE, Row, number, only, rounds, thin


@dataclass(frozen=True)
class SmallTable:
    """A small table. ``columns``: key of the rows -> heading. Nothing is shown of one without rows."""

    rows: Sequence[Row]
    columns: Mapping[str, str]

    @classmethod
    def of(
        cls, rows: pd.DataFrame | Sequence[Row], columns: Mapping[str, str] | None = None
    ) -> SmallTable:
        """Rows with missing entries as None; by default all columns, under their own names."""
        frame = pd.DataFrame(rows)
        values = frame.astype(object).where(frame.notna(), None)
        return cls(values.to_dict("records"), columns or {name: name for name in frame})


@dataclass(frozen=True)
class Sentence:
    """A sentence that belongs to the answer. ``about``: as of ``Note``, beside the rows."""

    text: str
    about: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Note:
    """A remark beside the answer: what was left out, or how far a number can be trusted.

    ``about``: rows that a machine reads under this key instead (the remark may shorten them)."""

    text: str
    about: Mapping[str, Any] | None = None


Item = SmallTable | Sentence | Note
#: What the function ``summary`` of a diagnostic returns, and of what it gets the table's options.
Summary = Iterator[Item]
Options = Mapping[str, Any]


def format_number(value: float | None, digits: int = 4) -> str:
    """A number for reading: ``digits`` significant digits, ``1.2×10⁵`` rather than ``1.2e+05``, – for none."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text.replace("-", "−")
    mantissa, exponent = text.split("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa.replace('-', '−')}×10{raised}"


def is_missing(value: Any) -> bool:
    """None, NaN, or the missing entry of a table (pandas' NA, which is neither equal nor unequal to itself)."""
    return value is None or value is pd.NA or bool(value != value)


def cell(value: Any) -> str:
    """An entry of a table for reading: – where it is missing, yes or no, a number, or the text."""
    if is_missing(value):
        return "–"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    return format_number(float(value)) if isinstance(value, (float, np.floating)) else str(value)


def of_rounds(frame: pd.DataFrame, columns: Mapping[str, str | Row]) -> SmallTable:
    """The numbers of some rounds, a column by its metric, or by what its rows have in common; columns without a number are left
    out."""
    wide = pd.DataFrame({"round": thin(rounds(frame), 12)})
    for name, where in columns.items():
        where = {**WHOLE, **({"metric": where} if isinstance(where, str) else where)}
        wide[name] = [number(frame, **where, round=r) for r in wide["round"]]
    return SmallTable.of(wide.dropna(axis="columns", how="all"))


def missing_notes(table: pd.DataFrame) -> list[Note]:
    """A remark for each of the first eight rows ``missing`` of a table, and one that counts the others."""
    rows = only(table, metric="missing")
    texts = [
        f"{'' if pd.isna(r) else f'round {r}: '}{note}"
        for r, note in zip(rows["round"], rows.get("note", []), strict=False)
    ]
    if len(texts) > 8:
        texts[8:] = [f"and {len(texts) - 8} more (rows metric = missing of the table)"]
    return list(map(Note, texts))


def percent(value: Any) -> str:
    """A share in percent, – for none."""
    return "–" if is_missing(value) else f"{format_number(100 * value, 3)} %"


def plus_minus(value: Any, error: Any, share: bool = False) -> str:
    """``12.3 ± 0.4``, in percent with ``share``; no more digits than the error leaves certain."""
    if is_missing(value):
        return "–"
    scale, end = (100, " %") if share else (1, "")
    amount, error = scale * float(value), math.nan if is_missing(error) else scale * float(error)
    tail = "" if math.isnan(error) else f" ± {format_number(error, 2)}"
    if 0 < error < math.inf and math.isfinite(amount):
        amount = round(amount, 1 - math.floor(math.log10(error)))
    return f"{format_number(amount, 4)}{tail}{end}"


# Where a model stands: its accuracy against a guess's


def guess_accuracy(shares: Sequence[float], slice_name: str) -> float:
    """The accuracy of a guess: always the most frequent label, or one of the classes, all alike.

    All alike on a client's examples: a global model need not know how often a client has which.

    Args:
        shares: how often each class is the label, as a share of 1.
        slice_name: of the examples.

    >>> guess_accuracy([0.75, 0.25], "test"), guess_accuracy([0.75, 0.25], "client:3/train")
    (0.75, 0.5)
    """
    alike = 1 / len(shares)
    return alike if slice_name.startswith("client:") else max(alike, *shares)


def at_centre(rows: Sequence[Row], scored: Sequence[Row], **place: float) -> list[Row]:
    """Rows of losses at many weights; ``scored`` holds loss and accuracy of those at ``place``."""
    loss, *accuracy = scored
    centre = {"metric": "loss", **place}.items()
    return [
        *({**row, "inputs": loss["inputs"]} if centre <= row.items() else row for row in rows),
        *({**row, **place} for row in accuracy),
    ]


def standing(table: pd.DataFrame) -> list[Item]:
    """Where the models of a table stand: of a run its global model of the last round, else every model.

    Args:
        table: a result table; the rows that count have ``inputs``.

    Returns:
        A sentence a model and slice, and a note where its accuracy is not above that of a guess (``guess_accuracy``) by
        two standard errors.
    """
    if "inputs" not in table:
        return []
    rows = table.dropna(subset=["inputs", "value"])
    items: list[Item] = []
    for run, part in rows.groupby("run", sort=False, dropna=False):
        best = {"scope": "global", "round": part["round"].max(), "moment": "aggregated"}
        for column, value in best.items():
            chosen = only(part, **{column: value})
            part = part if chosen.empty else chosen
        who = f"{run}: " if isinstance(run, str) and run else ""
        for (of, _), model in part.groupby(["slice", "client"], sort=False, dropna=False):
            items += _of_model(who, str(of), model)
    return items


def _of_model(who: str, slice_name: str, rows: pd.DataFrame) -> Summary:
    n, inputs = rows[["n_examples", "inputs"]].iloc[0]
    losses, answers = (only(rows, metric=(m, f"model_{m}")) for m in ("loss", "accuracy"))
    loss = plus_minus(number(losses), number(losses, column="stderr"))
    accuracy, guess = number(answers), number(answers, column="guess")
    told = "" if accuracy is None else f", accuracy {percent(accuracy)}"
    told += "" if guess is None else f", a guess {percent(guess)}"
    yield Sentence(f"{who}{n:,.0f} examples of {slice_name}, loss {loss}{told}; inputs {inputs}")
    bound = 1.0 if guess is None else guess + 2 * math.sqrt(guess * (1 - guess) / n)
    if accuracy is not None and accuracy <= bound < 1:
        doubt = (
            f"{who}no better than a guess on {slice_name}{told}. The model is untrained, its inputs are not normalised as in "
            f"training (here: {inputs}; --normalise), or these are other examples or labels than it was trained for"
        )
        yield Note(doubt, {"warnings": doubt})
