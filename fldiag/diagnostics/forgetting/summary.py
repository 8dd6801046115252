"""The small table of forgetting that a person reads first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.results.select import WHOLE, only, split_of, spread_rounds
from fldiag.results.summary import Item, Small, missing_notes
from fldiag.results.table import Row

COLUMNS = {
    "round": "round",
    "received": "received",
    "trained": "trained",
    "std": "± (clients)",
    "aggregated": "aggregated",
    "drop": "drop",
    "forgetting": "max over classes",
    "restored": "restored",
}
LOSSES = {
    "round": "round",
    "loss_received": "loss received",
    "loss_trained": "trained",
    "loss_aggregated": "aggregated",
}


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    classes = bool((frame["metric"] == "accuracy").any())
    rows = only(frame, slice=split_of(frame), **WHOLE).dropna(subset="value")
    keys = zip(rows["round"], rows["metric"], rows["moment"], strict=True)
    values = dict(zip(keys, rows["value"], strict=True))
    yield Small(
        [_row(values, r) for r in spread_rounds(frame, "loss")], COLUMNS if classes else LOSSES
    )
    yield from missing_notes(frame)


def _row(values: Mapping[tuple[int, str, str], float], r: int) -> Row:
    def of(metric: str, moment: str) -> float | None:
        return values.get((r, metric, moment))

    row: Row = {"round": r, "std": of("accuracy_std", "trained")}
    for moment in ("received", "trained", "aggregated"):
        row |= {moment: of("accuracy", moment), f"loss_{moment}": of("loss", moment)}
    return row | {m: of(m, "trained") for m in ("drop", "forgetting", "restored")}
