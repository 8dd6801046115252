"""The small table of the second-order account that a person reads first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.results.select import number, only
from fldiag.results.summary import Item, Note, Say, Small

WHY = {
    "client": "client",
    "change": "change",
    "linear": "linear",
    "quadratic": "quadratic",
    "rest": "rest",
    "path": "path",
    "left": "rest of path",
    "error": "± points",
}


def summary(table: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """The terms of every client's update in the last round."""
    yield Say(
        f"why: change of the {options['slice']} loss by every update = linear + quadratic + rest"
    )
    last = only(table, round=table["round"].max())
    exact = only(last, estimator="exact", metric=list(WHY))
    paths = only(last, estimator="path", layer=None, index=None)
    lines, rough = [], []
    for client, part in exact.groupby("client", dropna=False):
        values = dict(zip(part["metric"], part["value"].astype(float), strict=True))
        mine = only(paths, client=None if pd.isna(client) else client)
        path = {
            "path": number(mine, "path"),
            "left": number(mine, "rest"),
            "error": number(mine, "path", column="residual"),
        }
        lines.append({"client": "all" if pd.isna(client) else str(int(client)), **values, **path})
        if len(only(mine, metric="path", converged=False)):
            rough.append(lines[-1]["client"])
    yield Small(
        lines,
        {
            key: text
            for key, text in WHY.items()
            if len(paths) or key not in ("path", "left", "error")
        },
    )
    if rough:
        yield Note(
            f"the rest of the path is above 5 % of the change, or not known that well (updates: {', '.join(rough)}); "
            "more points (path) or --precision fp64 may help"
        )
