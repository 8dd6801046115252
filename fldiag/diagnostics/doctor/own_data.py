"""Clients whose training does not fit the data that the run says are theirs."""

from __future__ import annotations

from collections.abc import Iterator

from fldiag.diagnostics.doctor.findings import WARNING, Check, Clear, Finding, Said, Skip

#: A client's own loss must rise by these multiples of what it falls by in the median: in every round that is looked at, and
#: where that is a single one.
EVERY, SINGLE = 0.25, 1.5
#: Nats that are too few to be told from nothing.
LEAST = 0.01


class OwnData(Check):
    """Clients whose training raises the loss on their own data: other data or labels than the run says, an update of the
    wrong sign, noise.

    Rule: in up to 6 rounds, the change of the mean loss on the client's recorded training examples by its own training. It is
    reported where it rises in every one of them, by at least a quarter of what it falls by in the median of all clients and
    rounds (of a single round: 1.5 times that), and that median is at least 0.01 nats.
    """

    name, title = "own_data", "Clients fit their own data"

    def end(self) -> Iterator[Said]:
        history = self.case.history
        if history is None or not any(map(len, history.parts)):
            yield Skip(self.case.closed or "the run does not say which examples belong to which client")
            return
        gains, middle = self.case.models.gains, self.case.models.gain
        if middle is None:
            yield Skip("no round holds what clients received and made of it")
            return
        for i, found in gains.items():
            limit = (EVERY if len(found) > 1 else SINGLE) * middle
            if middle >= LEAST and max(found.values()) < -limit:
                rise = -sum(found.values()) / len(found)
                yield Finding(WARNING, f"training raises the loss of client {i} on its own data",
                              f"by {rise:.3g} nats in {len(found)} of its rounds; over all clients it falls by {middle:.3g} in "
                              "the median", "it learns something else than its recorded data, and carries that into the mean",
                              "compare its data and labels with the partition; look for a wrong sign, noise, or an attack",
                              tuple(found), client=i, value=rise)
        yield Clear(f"the own loss of {len(gains)} clients falls by {middle:.3g} nats in the median")
