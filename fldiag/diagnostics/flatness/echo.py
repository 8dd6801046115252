"""How much of the server's update of a round is left in those after it."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fldiag.params import cosine
from fldiag.results.means import sample_mean
from fldiag.results.table import Row
from fldiag.runs.round_weights import Stored

LAGS = range(1, 6)


class Updates:
    """The server's updates of the last rounds, one round after the other; an update needs two neighbouring rounds."""

    def __init__(self) -> None:
        self.before: tuple[int, Tensor] | None = None
        self.updates: dict[int, Tensor] = {}
        self.echoes: dict[int, list[float]] = {lag: [] for lag in LAGS}

    def rows(self, record: Stored) -> list[Row]:
        """The echoes of this round's update."""
        r, w = record.round, record.aggregated
        before, self.before = self.before, (r, w)
        if before is not None and before[0] == r - 1:
            update = w - before[1]
        elif r == 1 and record.received is not None:
            # the first round's clients receive what training began with
            update = w - record.received
        else:
            return []
        self.updates = {t: u for t, u in self.updates.items() if t >= r - max(LAGS)} | {r: update}
        return [self._row(r, lag) for lag in LAGS if r - lag in self.updates]

    def _row(self, r: int, lag: int) -> Row:
        value = float(cosine(self.updates[r], self.updates[r - lag]))
        about: Row = {
            "metric": "momentum_echo",
            "round": r,
            "moment": "aggregated",
            "scope": "global",
            "index": lag,
            "estimator": "exact",
        }
        if not np.isfinite(value):
            return {**about, "value": None, "note": "one of the two updates is zero or not finite"}
        self.echoes[lag].append(value)
        return {**about, "value": value}

    def means(self) -> list[Row]:
        """Over all rounds, by lag; a lag that no two stored rounds have is masked."""
        rows: list[Row] = []
        for lag, values in self.echoes.items():
            about: Row = {
                "metric": "momentum_echo",
                "moment": "aggregated",
                "scope": "global",
                "index": lag,
                "estimator": "exact",
                "n_rounds": len(values),
            }
            if not values:
                rows.append(
                    {
                        **about,
                        "value": None,
                        "note": f"needs server updates {lag} rounds apart, from stored "
                        "neighbouring rounds (checkpoint.every = 1)",
                    }
                )
                continue
            rows.append({**about, **sample_mean(values)})
        return rows
