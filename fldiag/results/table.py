"""A result is a tidy table: one row a number, and the columns say what the number is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
    rows = [{**common, **row} for row in rows]
    extra = sorted({k for row in rows for k in row} - set(COLUMNS))
    return pd.DataFrame(rows, columns=[*COLUMNS, *extra]).astype(COLUMNS)


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
