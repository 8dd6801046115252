"""The small tables of lines that a person reads first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.results.select import number, only
from fldiag.results.summary import Item, Note, Small
from fldiag.results.table import Row

LINES = {
    "run": "checkpoint",
    "line": "direction",
    "loss": "loss",
    "slope": "slope",
    "curvature": "curvature",
    "residual": "± (residual)",
}
BARRIERS = {
    "run": "checkpoint",
    "client": "client",
    "loss": "loss of client's model",
    "barrier": "barrier",
    "stderr": "± (stderr)",
    "at": "at",
    "distance": "distance",
}


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    if options["directions"] == "clients":
        yield Small(barriers(frame), BARRIERS)
    else:
        yield Small(lines(frame), LINES)
    if "buffers" in frame.columns and frame["buffers"].notna().any():
        yield Note(
            "batch-norm statistics are interpolated like the weights: both ends are the models as stored"
        )


def lines(frame: pd.DataFrame) -> list[Row]:
    """One row a line."""
    rows = []
    values = only(frame, metric=("loss", "slope", "curvature"))
    for (run, line), part in values.groupby(["run", "index"], sort=False):
        rows.append(
            {
                "run": run,
                "line": int(line),
                "loss": number(part, "loss", x=0),
                "slope": number(part, "slope"),
                "curvature": number(part, "curvature"),
                "residual": number(part, "curvature", column="residual"),
            }
        )
    return rows


def barriers(frame: pd.DataFrame) -> list[Row]:
    """One row a path, of a client's model where the ends are those."""
    rows = []
    by = "client" if frame["client"].notna().any() else "index"
    for (run, end), part in frame.groupby(["run", by], sort=False):
        rows.append(
            {
                "run": run,
                "client": int(end),
                "loss": number(part, "loss", x=1),
                "barrier": number(part, "barrier"),
                "stderr": number(part, "barrier", column="stderr"),
                "at": number(part, "barrier", column="x"),
                "distance": number(part, "distance"),
            }
        )
    return rows
