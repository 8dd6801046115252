"""The small table of the second-order account that a person reads first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.results.select import only
from fldiag.results.summary import Item, Say, Small

WHY = {"client": "client", "change": "change", "linear": "linear", "quadratic": "quadratic", "rest": "rest"}


def summary(table: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """The terms of every client's update in the last round."""
    yield Say(f"why: change of the {options['slice']} loss by every update = linear + quadratic + rest")
    exact = only(table, estimator="exact", round=table["round"].max(), metric=list(WHY))
    found = []
    for client, part in exact.groupby("client", dropna=False):
        values = dict(zip(part["metric"], part["value"].astype(float), strict=True))
        found.append({"client": "all" if pd.isna(client) else str(int(client)), **values})
    yield Small(found, WHY)
