"""A result is a tidy table: one row a number, and the columns say what the number is. Making one, and reading it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fldiag.errors import FldiagError

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


def table(rows: Iterable[Mapping[str, Any]], **common: Any) -> pd.DataFrame:
    """Rows (dicts with some of the columns) as a typed table; ``common`` fills columns of every row.

    Columns outside the schema (such as grid coordinates) are kept, after the schema's.
    """
    return columns(dict(pd.DataFrame([{**common, **row} for row in rows])))


def columns(data: Mapping[str, Any], **common: Any) -> pd.DataFrame:
    """The same from whole columns (arrays of one length), where there are too many rows to make each a dict."""
    extra = sorted({*data, *common} - set(COLUMNS))
    return pd.DataFrame({**data, **common}, columns=[*COLUMNS, *extra]).astype(COLUMNS)


class Vectors(dict[str, Any]):
    """Tensors [k, ...] by parameter's name, in a table's ``attrs["vectors"]``: pandas copies ``attrs`` at every step, and
    need not copy these."""

    def __deepcopy__(self, memo: Any) -> Vectors:
        return self


def check(frame: pd.DataFrame) -> pd.DataFrame:
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
