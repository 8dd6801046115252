"""Clients whose training does not fit the data that the run says are theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from fldiag.diagnostics.doctor.findings import WARNING, Check, Clear, Finding, Said, Skip

#: Nats by which a client's own loss must rise in training, in the mean of its rounds.
RISE = 0.5


class OwnData(Check):
    """Clients whose training raises the loss on their own data: other data or labels than the run says, an update of the
    wrong sign, noise.

    Rule: in up to 5 rounds, the mean change of the loss on the client's recorded training examples by its own training. It is
    reported where it rose by more than 0.5 nats in every round the client was seen in, while it fell in the median of all
    clients and rounds by at least a tenth of that.
    """

    name, title = "own_data", "Clients fit their own data"

    def end(self) -> Iterator[Said]:
        history = self.case.history
        if history is None or not any(map(len, history.parts)):
            yield Skip(self.case.closed or "the run does not say which examples belong to which client")
            return
        gains = defaultdict[int, dict[int, float]](dict)
        for r, scored in self.case.models.scores.items():
            if scored.clients is None or scored.received is None:
                continue
            for j, i in enumerate(scored.ids):
                own = history.pool.own(i)
                if own.stop > own.start:
                    gains[i][r] = float(np.mean(scored.received[own] - scored.clients[j, own]))
        values = [v for found in gains.values() for v in found.values() if np.isfinite(v)]
        if not values:
            yield Skip("no round holds what clients received and made of it")
            return
        middle = float(np.median(values))
        for i, found in gains.items():
            if middle > RISE / 10 and max(found.values()) < -RISE:
                rise = -float(np.mean(list(found.values())))
                yield Finding(WARNING, f"training raises the loss of client {i} on its own data",
                              f"by {rise:.3g} nats in {len(found)} of its rounds; over all clients it falls by {middle:.3g} in "
                              f"the "
                              "median", "it learns something else than its recorded data, and carries that into the mean",
                              "compare its data and labels with the partition; look for a wrong sign, noise, or an attack",
                              tuple(found), client=i, value=rise)
        yield Clear(f"the own loss of {len(gains)} clients falls by {middle:.3g} nats in the median, and changes by "
                    f"{max(values):.3g} to {min(values):.3g}")
