"""Reading a table: its rows by columns, one number of it, the rounds it has.

One rule for missing entries holds throughout: ``None`` asks for them, and a missing entry equals nothing else. A column that the
table does not have is missing in all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

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
    rows = only(frame, **where) if metric is None else only(frame, metric=metric, **where)
    if column not in rows:
        return None
    values = pd.to_numeric(rows[column], errors="coerce").dropna()
    return float(values.iloc[0]) if len(values) else None


def split_of(frame: pd.DataFrame) -> str:
    """The split by which a table judges global models: test, or train where it has no row on test examples.

    >>> split_of(pd.DataFrame({"slice": ["train", "test"]})), split_of(pd.DataFrame({"slice": ["train"]}))
    ('test', 'train')
    """
    return "test" if "slice" in frame and (frame["slice"] == "test").any() else "train"


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


def spread(numbers: Sequence[int], most: int) -> list[int]:
    """At most so many of these numbers, evenly spread, first and last among them.

    >>> spread(range(10), 3)
    [0, 4, 9]
    """
    if len(numbers) <= most:
        return list(numbers)
    return sorted({numbers[i * (len(numbers) - 1) // (most - 1)] for i in range(most)})
