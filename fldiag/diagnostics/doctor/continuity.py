"""Whether clients start from the model that the round before ended with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from torch import Tensor

AHEAD = "a look-ahead point"


class Continuity(Check):
    """Clients receive another model than the last round's aggregate: a stale one, or one that nobody made.

    Rule: the received weights of round t + 1 and the aggregate of round t differ by more than rounding (8 eps of their length).
    Where they equal an older aggregate (the first, one of the last five, or the one sent before), that is said. A look-ahead
    point (in the span of the last two server steps) is information, and so is what a method of fldiag sends that has a rule of
    its own for it.
    """

    name, title = "continuity", "Clients start from the last aggregate"

    def __init__(self, case: Case):
        super().__init__(case)
        self.past: dict[
            int, Tensor
        ] = {}  # the last few aggregates, the first, and an old one that is still sent
        self.pairs, self.old, self.odd = (
            0,
            dict[int, int](),
            dict[int, str](),
        )  # by round: the older aggregate, or what it is
        self.away: dict[int, float] = {}

    def see(self, cohort: CohortWeights) -> None:
        fits = cohort.received is not None and cohort.received.shape == cohort.aggregated.shape
        if (
            cohort.received is not None
            and fits
            and cohort.round - 1 in self.past
            and bool(cohort.received.isfinite().all())
        ):
            self.pairs += 1
            self._compare(
                cohort.round,
                cohort.received.double(),
                cohort.eps if cohort.clients is not None else 1e-7,
            )
        if bool(cohort.aggregated.isfinite().all()):
            self.past[cohort.round] = cohort.aggregated
        references = {min(self.past, default=0), self.old.get(cohort.round)}
        for r in [r for r in self.past if r <= cohort.round - 6 and r not in references]:
            del self.past[r]

    def _compare(self, r: int, received: Tensor, eps: float) -> None:
        def far(w: Tensor) -> float:
            return float((received - w.double()).norm() / received.norm().clamp(min=1e-300))

        last = far(self.past[r - 1])
        if last <= 8 * eps:
            return
        self.away[r] = last
        old = [s for s, w in self.past.items() if s < r - 1 and far(w) <= 8 * eps]
        if old:
            self.old[r] = max(old)
        else:
            ahead = "send" in self.case.slots or self._ahead(r, received)
            self.odd[r] = AHEAD if ahead else "weights that are not the last aggregate"

    def _ahead(self, r: int, received: Tensor) -> bool:
        import torch

        if r - 2 not in self.past:
            return False
        steps = [
            self.past[s].double() - self.past[s - 1].double()
            for s in (r - 1, r - 2)
            if s - 1 in self.past
        ]
        d = received - self.past[r - 1].double()
        left = (
            d[:, None]
            - torch.stack(steps, 1) @ torch.linalg.lstsq(torch.stack(steps, 1), d[:, None]).solution
        )
        return float(left.norm()) <= 0.05 * float(d.norm())

    def end(self) -> Iterator[Outcome]:
        if self.case.aggregates_are_made:
            yield Skip("no global models were given: the mean of the clients stands for them")
            return
        if not self.pairs:
            yield Skip("no two rounds in a row say what was received and what was made of it")
            return
        if self.old:
            yield self._finding(
                self._stale(), tuple(self.old), is_intended="send" in self.case.slots
            )
        for kind in sorted(set(self.odd.values())):
            yield self._finding(
                kind, tuple(r for r, k in self.odd.items() if k == kind), is_intended=kind == AHEAD
            )
        yield Clear(f"{self.pairs} rounds began with the last aggregate")

    def _stale(self) -> str:
        """Which older aggregate clients received: always the same, always as many rounds behind, or several."""
        sources, lags = set(self.old.values()), {r - 1 - s for r, s in self.old.items()}
        if len(sources) == 1:
            return f"the aggregate of round {sources.pop()}, not the last one"
        behind = f"{lags.pop()} behind the last one" if len(lags) == 1 else "not the last ones"
        return f"aggregates of earlier rounds, {behind}"

    def _finding(self, weights: str, rounds: tuple[int, ...], is_intended: bool) -> Finding:
        size = max(self.away[r] for r in rounds)
        return Finding(
            INFORMATION if is_intended else WARNING,
            f"clients received {weights}",
            f"{len(rounds)} of {counted(self.pairs, 'round')}; relative distance up to {size:.2g}",
            "updates are applied to another model than the one they were made for",
            "send the aggregate of the last round to all clients",
            rounds,
            value=size,
        )
