"""The radii that a person reads first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.results.select import number, only
from fldiag.results.summary import Item, Note, Small

COLUMNS = {"run": "checkpoint", "criterion": "left by", "most": "most case (r / ||w||)", "stderr": "± (stderr)",
           "low": "1st quartile", "high": "3rd quartile", "worst": "worst case", "ascent": "uphill"}


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    rows, notes = [], []
    for (run, criterion), part in frame.dropna(subset=["criterion"]).groupby(["run", "criterion"], sort=False):
        of = {"accuracy": f"accuracy − {100 * options['drop']:g} points", "loss": f"loss + {100 * options['rise']:g} %"}
        rows.append({"run": run, "criterion": of[criterion], "most": number(part, "most_case"),
                     **{c: number(part, "most_case", column=c) for c in ("stderr", "low", "high")},
                     "worst": number(part, "worst_case"), "ascent": number(part, "radius", direction="ascent")})
        masked = only(part, metric="radius", direction="random")["masked"].astype(bool)
        if masked.any():
            notes.append(f"{run}: {criterion}: {int(masked.sum())} of {len(masked)} random directions never leave the basin up "
                         f"to {options['most']:g} ||w||")
        for row in only(part, metric=("most_case", "worst_case"), masked=True).head(1).itertuples():
            notes += [] if masked.any() else [f"{run}: {criterion}: {row.note}"]
    yield Small(rows, COLUMNS)
    for text in notes:
        yield Note(text)
