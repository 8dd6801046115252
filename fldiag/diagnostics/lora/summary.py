"""The small tables about adapters that a person reads first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fldiag.results.select import only
from fldiag.results.summary import Item, Say, Small

COLUMNS = {
    "layer": "layer",
    "aggregation_error": "aggregation error",
    "misalignment": "misalignment",
    "rank_energy": "energy in rank r",
    "effective_rank": "effective rank",
}
SPECTRA = {"index": "k", "lanczos": "adapters", "lanczos-matrices": "matrices"}


def summary(table: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """Every layer in the last round, and the spectra."""
    of_layers = table[table["layer"].notna()]
    last = only(of_layers, round=of_layers["round"].max())
    yield Say(
        f"adapters in round {last['round'].max()}: what averaging their factors loses (misalignment: mean over pairs of "
        "clients, as a share of the largest possible)"
    )
    lines = []
    for layer, part in last.groupby("layer", sort=False):
        line: dict[str, Any] = {"layer": layer}
        for metric in ("aggregation_error", "rank_energy", "effective_rank"):
            values = only(part, metric=metric)["value"].dropna().astype(float)
            line[metric] = float(values.iloc[-1]) if len(values) else None
        pairs = only(part, metric="misalignment")["scaled"].dropna().astype(float)
        lines.append({**line, "misalignment": float(pairs.mean()) if len(pairs) else None})
    yield Small(lines, COLUMNS)
    spectra = only(table, metric="eigenvalue")
    if len(spectra):
        yield Say("eigenvalues of the training loss: in adapter space, and in the adapted matrices")
        wide = spectra.pivot(index="index", columns="estimator", values="value").astype(float)
        yield Small([{"index": i, **row} for i, row in wide.to_dict("index").items()], SPECTRA)
