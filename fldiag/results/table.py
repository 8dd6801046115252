"""A result is a tidy table: one row a number, and the columns say what the number is. Making one, reading it, and what a person
reads first of it: small tables, sentences and remarks; before that there is a progress bar."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fldiag.errors import FldiagError, printable

Row = dict[str, Any]

#: Every result table has at least these columns, in this order.
COLUMNS: dict[str, str] = {
    "run": "string",
    "method": "string",
    "seed": "Int64",
    "round": "Int64",
    "moment": "string",  # received | trained | aggregated
    "scope": "string",  # global | client | pair
    "client": "Int64",
    "client_b": "Int64",
    "slice": "string",
    "metric": "string",
    "index": "Int64",
    "layer": "string",
    "value": "Float64",
    "unit": "string",
    "estimator": "string",
    "stderr": "Float64",
    "residual": "Float64",
    "converged": "boolean",
    "n_examples": "Int64",
}
#: What each of them says, for the documentation.
DESCRIPTIONS: dict[str, str] = {
    "run": "name of the run, or of the checkpoint where there is no run",
    "method": "the method that trained it",
    "seed": "the run's seed",
    "round": "from 0, the weights before training; round t made the aggregated weights of t",
    "moment": "received, trained (by a client) or aggregated weights",
    "scope": "global, client, or pair of clients",
    "client": "whose weights, or whose data",
    "client_b": "the second one of a pair",
    "slice": "which examples: train, test, client:7/train, …",
    "metric": "what the number is",
    "index": "which one of several, such as the eigenvalue's number",
    "layer": "of which layer or tensor; empty for the whole network",
    "value": "the number",
    "unit": "its unit; empty for none",
    "estimator": "how it was computed: exact, lanczos, hutchinson-deflated, …",
    "stderr": "its standard error, where it is an estimate or a mean over examples",
    "residual": "of an eigenvalue, ‖Hv − λv‖: a true eigenvalue is at most this far away",
    "converged": "whether the requested accuracy was reached",
    "n_examples": "over how many examples",
}
#: What personalisation measures: rows of a run's metrics, and of the diagnostic.
PERSONAL = "personal_accuracy"
MOMENTS, SCOPES = ("received", "trained", "aggregated"), ("global", "client", "pair")


# Making one


def table(rows: Iterable[Mapping[str, Any]], **common: Any) -> pd.DataFrame:
    """Rows (dicts with some of the columns) as a typed table; ``common`` fills columns of every row.

    Columns outside the schema (such as grid coordinates) are kept, after the schema's.
    """
    return columns(dict(pd.DataFrame([{**common, **row} for row in rows])))


def columns(data: Mapping[str, Any], **common: Any) -> pd.DataFrame:
    """The same from whole columns (arrays of one length), where there are too many rows to make each a dict."""
    extra = sorted({*data, *common} - set(COLUMNS))
    return pd.DataFrame({**data, **common}, columns=[*COLUMNS, *extra]).astype(COLUMNS)


def check_schema(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame, or FldiagError naming the first column or value that breaks the schema."""
    missing = [c for c in COLUMNS if c not in frame]
    if missing:
        what = f"result table lacks columns {missing}"
        raise FldiagError(what, "build it with fldiag.registry.table")
    for column, allowed in (("moment", MOMENTS), ("scope", SCOPES)):
        odd = set(frame[column].dropna().unique()) - set(allowed)
        if odd:
            what = f"result table has {column} {sorted(odd)}"
            raise FldiagError(what, f"use one of {', '.join(allowed)}")
    if frame["metric"].isna().any():
        raise FldiagError("result table has a row without a metric", "name the metric of every row")
    return frame


# Reading. One rule for missing entries: ``None`` asks for them, and a missing entry equals nothing else. A column that the table
# does not have is missing in all rows.


#: The splits by which global models are judged, and how they are called beside a number.
SPLITS = {"test": "test", "train": "training"}
#: Where the number of a whole round stands: of all clients together, of no single layer or index.
WHOLE: dict[str, Any] = {"scope": "global", "index": None, "layer": None}


def only(frame: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """The rows whose columns have these values.

    Args:
        frame: A table; its order and index are kept.
        **where: Column = a value, None for a missing entry, or a list, tuple or set for any of its members.

    Returns:
        The rows for which all of it holds.

    >>> frame = pd.DataFrame({"metric": ["loss", "trace", "trace"], "layer": [None, None, "conv1"], "value": [0.5, 9.0, 4.0]})
    >>> only(frame, metric="trace", layer=None)["value"].tolist()
    [9.0]
    >>> only(frame, layer=["conv1", None], metric=("loss", "trace"))["value"].tolist()
    [0.5, 9.0, 4.0]
    >>> len(only(frame, client=3)), len(only(frame, client=None))
    (0, 3)
    """
    keep = np.ones(len(frame), bool)
    for column, condition in where.items():
        choice = condition if isinstance(condition, (list, tuple, set, frozenset)) else [condition]
        values = frame[column] if column in frame else pd.Series(None, frame.index, dtype=object)
        hit = values.isna() & any(pd.isna(value) for value in choice)
        for value in choice:
            hit |= (values == value).fillna(False).astype(bool)
        keep &= hit.to_numpy(bool)
    return frame[keep]


def number(
    frame: pd.DataFrame, metric: str | None = None, *, column: str = "value", **where: Any
) -> float | None:
    """The number of this name.

    Args:
        frame: A table.
        metric: The metric; without it the rows are taken as they are.
        column: What to read of the row: ``value``, or for example ``stderr`` or ``residual``.
        **where: Which rows, as for ``only``; enough to leave one. Of several, the first that has a number counts.

    Returns:
        The number, or None: there is no such row or column, or the entry is missing, masked or no number.

    >>> frame = pd.DataFrame({"metric": ["loss", "trace"], "round": [3, 3], "value": [0.5, None], "stderr": [0.1, None]})
    >>> number(frame, "loss", round=3), number(frame, "loss", column="stderr"), number(frame, "trace")
    (0.5, 0.1, None)
    """
    rows = only(frame, **where, **({"metric": metric} if metric else {}))
    if column not in rows:
        return None
    values = pd.to_numeric(rows[column], errors="coerce").dropna()
    return float(values.iloc[0]) if len(values) else None


def split_of(frame: pd.DataFrame) -> str:
    """The split by which a table judges global models: test, or train where it has no row on test examples.

    >>> split_of(pd.DataFrame({"slice": ["train", "test"]})), split_of(pd.DataFrame({"slice": ["train"]}))
    ('test', 'train')
    """
    return "test" if len(only(frame, slice="test")) else "train"


def rounds(frame: pd.DataFrame, metric: str | None = None) -> list[int]:
    """The rounds that a table has, of one metric if one is named; in order, each once.

    >>> rounds(pd.DataFrame({"metric": ["loss", "loss", "trace"], "round": [4, 2, None]}))
    [2, 4]
    """
    rows = frame if metric is None else only(frame, metric=metric)
    return sorted({int(r) for r in rows["round"].dropna()}) if "round" in rows else []


def last_round(frame: pd.DataFrame, metric: str | None = None) -> int | None:
    """The last of ``rounds``, None when there is none."""
    return max(rounds(frame, metric), default=None)


def thin(numbers: Sequence[int], most: int) -> list[int]:
    """At most so many of these numbers, evenly spread, first and last among them.

    >>> thin(range(10), 3)
    [0, 4, 9]
    """
    if len(numbers) <= most:
        return list(numbers)
    return sorted({numbers[i * (len(numbers) - 1) // (most - 1)] for i in range(most)})


# What a person reads first


@dataclass(frozen=True)
class SmallTable:
    """A small table. ``columns``: key of the rows -> heading. Nothing is shown of one without rows."""

    rows: Sequence[Row]
    columns: Mapping[str, str]

    @classmethod
    def of(
        cls, rows: pd.DataFrame | Sequence[Row], headings: Mapping[str, str] | None = None
    ) -> SmallTable:
        """Rows with missing entries as None; by default all columns, under their own names."""
        frame = pd.DataFrame(rows)
        values = frame.astype(object).where(frame.notna(), None)
        return cls(values.to_dict("records"), headings or {name: name for name in frame})


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
#: What the function ``summary`` of a diagnostic returns.
Summary = Iterator[Item]
#: The options of the table, which it gets.
Options = Mapping[str, Any]


def of_rounds(frame: pd.DataFrame, headings: Mapping[str, str | Row]) -> SmallTable:
    """The numbers of some rounds, a column by its metric, or by what its rows have in common; columns without a number are left
    out."""
    wide = pd.DataFrame({"round": thin(rounds(frame), 12)})
    for name, where in headings.items():
        where = {**WHOLE, **({"metric": where} if isinstance(where, str) else where)}
        wide[name] = [number(frame, **where, round=r) for r in wide["round"]]
    return SmallTable.of(wide.dropna(axis="columns", how="all"))


def missing_notes(frame: pd.DataFrame) -> list[Note]:
    """A remark for each of the first eight rows ``missing`` of a table, and one that counts the others."""
    rows = only(frame, metric="missing")
    texts = [
        f"{'' if pd.isna(r) else f'round {r}: '}{note}"
        for r, note in zip(rows["round"], rows.get("note", []), strict=False)
    ]
    if len(texts) > 8:
        texts[8:] = [f"and {len(texts) - 8} more (rows metric = missing of the table)"]
    return list(map(Note, texts))


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


def standing(frame: pd.DataFrame) -> list[Item]:
    """Where the models of a table stand: of a run its global model of the last round, else every model.

    Args:
        frame: a result table; the rows that count have ``inputs``.

    Returns:
        A sentence a model and slice, and a note where its accuracy is not above that of a guess (``guess_accuracy``) by
        two standard errors.
    """
    if "inputs" not in frame:
        return []
    rows = frame.dropna(subset=["inputs", "value"])
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


# Progress


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A callback ``(done, total, text)`` that draws the bar; elsewhere than on a terminal or in a notebook it is silent.

    The time remaining follows from the parts that were finished since the first call, or since one that changed the total.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import MofNCompleteColumn, Progress

    columns, console = (*Progress.get_default_columns(), MofNCompleteColumn()), Console(stderr=True)
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not (console.is_terminal or console.is_jupyter),
        speed_estimate_period=math.inf,  # parts may take minutes each
    ) as bar:
        task = bar.add_task(escape(printable(title)), total=None)

        def show(done: int, total: int, text: str) -> None:
            line = escape(printable(f"{title}: {text}"))
            bar.update(task, completed=done, total=total, description=line)
            if done == 0:  # else rich times from the end of the first part on
                bar.advance(task, 0)

        yield show


@contextlib.contextmanager
def notebook_bar(
    title: str, progress: Callable[[int, int, str], None] | None = None
) -> Iterator[Callable[[int, int, str], None]]:
    """``progress``; without one a bar in a notebook, and nothing elsewhere."""
    from rich.console import Console

    if progress is None and Console().is_jupyter:
        with progress_bar(title) as bar:
            yield bar
    else:
        yield progress or (lambda done, total, text: None)
