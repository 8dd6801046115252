"""Clients whose training does not fit the data that the run says are theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from fldiag.diagnostics.doctor.case import Case, CohortWeights
from fldiag.diagnostics.doctor.findings import (
    INFORMATION,
    WARNING,
    Check,
    Clear,
    Finding,
    Outcome,
    Skip,
)
from fldiag.errors import counted
from fldiag.results.select import spread as spread_rounds

#: How far below the median of all gains those of a client must lie, in units of 1.48 MAD, in every round that is looked at; and
#: by which multiple of the median its loss must rise there.
SCALES, EVERY = 3.0, 0.25
#: Nats that are too few to be told from nothing.
LEAST = 0.01
#: Further rounds in which a client is looked at that seems odd.
FURTHER = 4


class OwnData(Check):
    """Clients whose training raises the loss on their own data: other data or labels than the run says, an update of the
    wrong sign, noise.

    Rule: in up to 6 rounds, the change of the mean loss on the client's recorded training examples by its own training. A client
    is odd where it rises in every one of them, by at least a quarter of what it falls by in the median of all clients and
    rounds, and lies 3 times the scale 1.48 MAD of all changes beyond that median, which is at least 0.01 nats. It is looked at
    in up to 4 further rounds, and reported if that holds there too. Information, if it took part in a single round (local
    training may be unstable once), and for methods of fldiag that correct the local gradient (control variates, dual
    variables), which may raise a client's own loss on purpose. Information, too, if it rises in those rounds alone, at least
    two, in which the received model knew more of the client's examples than the shares of their classes (its loss was below
    their entropy): before that, shuffled labels lower the loss as well, as they have the right shares.
    """

    name, title = "own_data", "Clients fit their own data"

    def __init__(self, case: Case):
        super().__init__(case)
        self.rounds: dict[int, list[int]] = {}

    def see(self, cohort: CohortWeights) -> None:
        for i in cohort.ids if cohort.usable else ():
            self.rounds.setdefault(i, []).append(cohort.round)

    def end(self) -> Iterator[Outcome]:
        self.case.opened(parts=True)
        gains, middle = self.case.models.gains, self.case.models.gain
        if middle is None:
            yield Skip("no round holds what clients received and made of it")
            return
        spread = 1.4826 * float(
            np.median([abs(v - middle) for drops in gains.values() for v in drops.values()])
        )
        limit = max(EVERY * middle, SCALES * spread - middle)
        for i, losses in self.case.models.own_losses.items():
            if middle < LEAST or max(self._telling(i, losses).values()) >= -limit:
                continue
            extra_rounds = spread_rounds(
                [r for r in self.rounds.get(i, []) if r not in losses], FURTHER
            )
            extra_losses = {r: self.case.models.own_losses_of(i, r) for r in extra_rounds}
            losses = {
                **losses,
                **{r: both for r, both in extra_losses.items() if np.isfinite(both).all()},
            }
            drops, all_drops = self._telling(i, losses), _gains(losses)
            if max(drops.values()) >= -limit:
                continue
            always = max(all_drops.values()) < -limit
            drops = all_drops if always else drops
            rise = -sum(drops.values()) / len(drops)
            certain = always and len(drops) > 1 and "correct" not in self.case.slots
            yield Finding(
                WARNING if certain else INFORMATION,
                f"training raises the loss of client {i} on its own data",
                f"by {rise:.3g} nats in {len(drops)} of its rounds; over all clients it falls by {middle:.3g} in "
                "the median",
                "it learns something other than its recorded data, and this enters the mean",
                "compare its data and labels with the partition; look for a wrong sign, noise, or an attack",
                tuple(sorted(drops)),
                client=i,
                value=rise,
            )
        yield Clear(
            f"the own loss of {counted(len(gains), 'client')} falls by {middle:.3g} nats in the median"
        )

    def _telling(self, i: int, losses: Mapping[int, tuple[float, float]]) -> dict[int, float]:
        """By how much a client's training lowers its loss, in the rounds whose received model knows more than the shares of
        its classes; in all, where fewer than two are such."""
        entropy = self.case.models.entropy(i)
        informative = {r: both for r, both in losses.items() if both[0] < entropy}
        return _gains(informative if len(informative) > 1 else losses)


def _gains(losses: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    return {r: before - after for r, (before, after) in losses.items()}
