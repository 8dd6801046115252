"""What a person reads first of paths between models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.results.select import number, only
from fldiag.results.summary import Item, Note, Say, Small, plus_minus
from fldiag.results.table import Row

PATHS = {
    "a": "from",
    "b": "to",
    "path": "path",
    "barrier": "barrier",
    "stderr": "± (stderr)",
    "grid": "grid error",
    "at": "at t",
    "midpoint": "at the midpoint",
    "accuracy": "accuracy lost",
    "mean": "mean loss",
}
#: Of more paths the table shows those with the largest barriers.
MOST = 15


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    rows = paths(frame)
    is_long = len(rows) > MOST
    largest = sorted(rows, key=lambda row: -(row["barrier"] or 0.0))[:MOST]
    yield Small(largest if is_long else rows, PATHS)
    if is_long:
        mean = only(frame, metric="barrier", path="straight")["value"].mean()
        yield Say(
            f"the {MOST} largest barriers of {len(rows)}; mean of the straight ones {mean:.3g}"
        )
    layers = only(frame, metric="layer_barrier").dropna(subset=["value"])
    if len(layers):
        all_layers = number(frame, "barrier", path="straight", index=_largest(layers)["index"])
        highest = _of_a_layer(layers) if (layers["value"] > 0).any() else "none"
        yield Say(
            f"barriers of single layers: {highest}; of all layers together {plus_minus(all_layers, None)}"
        )
        averages = only(frame, metric="layer_average").dropna(subset=["value"])
        yield Say(
            f"loss with a single layer averaged, above the mean of the two models': {_of_a_layer(averages)}"
        )
    if (centre := number(frame, "mixture_centre")) is not None:

        def value(metric: str) -> str:
            return plus_minus(number(frame, metric), number(frame, metric, column="stderr"))

        yield Say(
            f"loss of mixtures of all models above the mixture of their losses: mean {value('mixture_mean')}, largest "
            f"{value('mixture_max')}, centre {plus_minus(centre, number(frame, 'mixture_centre', column='stderr'))}"
        )
    moved = only(frame, metric="moved")
    if len(moved):
        yield Say(
            f"aligned with the first model: {moved['value'].sum():.0f} hidden units changed places"
        )
    for row in frame[frame["note"].notna()].itertuples() if "note" in frame else ():
        yield Note(f"{row.run}: {row.note}")


def _largest(rows: pd.DataFrame) -> pd.Series:
    return rows.loc[rows["value"].astype(float).idxmax()]


def _of_a_layer(rows: pd.DataFrame) -> str:
    top = _largest(rows)
    return f"the largest {plus_minus(top['value'], top['stderr'])} ({top['layer']}, the rest of the {top['rest']} model)"


def paths(frame: pd.DataFrame) -> list[Row]:
    """One row a path."""
    rows: list[Row] = []
    if "path" not in frame:
        return rows
    for (_, path), part in only(frame, scope="pair").groupby(["index", "path"], sort=False):
        barrier = only(part, metric="barrier")
        rows.append(
            {
                "a": str(part["run"].iloc[0]),
                "b": str(part["run_b"].iloc[0]),
                "path": str(path),
                "barrier": number(barrier),
                "stderr": number(barrier, column="stderr"),
                "grid": number(barrier, column="residual"),
                "at": number(barrier, column="x"),
                "midpoint": number(part, "midpoint"),
                "accuracy": number(part, "accuracy_barrier"),
                "mean": number(part, "mean_loss"),
            }
        )
    return rows
