"""Whether clients start from the model that the round before ended with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fldiag.diagnostics.doctor.case import Case, Seen
from fldiag.diagnostics.doctor.findings import INFORMATION, WARNING, Check, Clear, Finding, Said, Skip

if TYPE_CHECKING:
    from torch import Tensor


class Continuity(Check):
    """Clients receive another model than the last round's aggregate: a stale one, or one that nobody made.

    Rule: the received weights of round t + 1 and the aggregate of round t differ by more than rounding (8 eps of their length).
    Where they equal an older aggregate, that round is named. A look-ahead point (in the span of the last two server steps) is
    information, and so is what a method of fldiag sends that has a rule of its own for it.
    """

    name, title = "continuity", "Clients start from the last aggregate"

    def __init__(self, case: Case):
        super().__init__(case)
        self.past: dict[int, Tensor] = {}  # the last few aggregates
        self.pairs, self.odd = 0, dict[int, str]()
        self.size = 0.0

    def see(self, seen: Seen) -> None:
        fits = seen.received is not None and seen.received.shape == seen.aggregated.shape
        if seen.received is not None and fits and seen.round - 1 in self.past and bool(seen.received.isfinite().all()):
            self.pairs += 1
            self._compare(seen.round, seen.received.double(), seen.eps if seen.clients is not None else 1e-7)
        if bool(seen.aggregated.isfinite().all()):
            self.past[seen.round] = seen.aggregated
        for r in [r for r in self.past if r <= seen.round - 6]:
            del self.past[r]

    def _compare(self, r: int, received: Tensor, eps: float) -> None:
        def far(w: Tensor) -> float:
            return float((received - w.double()).norm() / received.norm().clamp(min=1e-300))

        last = far(self.past[r - 1])
        if last <= 8 * eps:
            return
        self.size = max(self.size, last)
        old = [s for s, w in self.past.items() if s < r - 1 and far(w) <= 8 * eps]
        self.odd[r] = f"of round {old[-1]}" if old else "look-ahead" if self._ahead(r, received) else "new"

    def _ahead(self, r: int, received: Tensor) -> bool:
        import torch

        if r - 2 not in self.past:
            return False
        steps = [self.past[s].double() - self.past[s - 1].double() for s in (r - 1, r - 2) if s - 1 in self.past]
        d = received - self.past[r - 1].double()
        left = d[:, None] - torch.stack(steps, 1) @ torch.linalg.lstsq(torch.stack(steps, 1), d[:, None]).solution
        return float(left.norm()) <= 0.05 * float(d.norm())

    def end(self) -> Iterator[Said]:
        if not self.pairs:
            yield Skip("no two rounds in a row say what was received and what was made of it")
            return
        for kind in sorted(set(self.odd.values())):
            rounds = tuple(r for r, k in self.odd.items() if k == kind)
            meant = kind == "look-ahead" or "send" in self.case.slots
            what = f"clients received the aggregate {kind}, not the last one" if kind.startswith("of") else \
                "clients received a look-ahead point" if meant else "clients received weights that are not the last aggregate"
            yield Finding(INFORMATION if meant else WARNING, what,
                          f"{len(rounds)} of {self.pairs} rounds; relative distance up to {self.size:.2g}",
                          "updates are applied to another model than the one they were made for",
                          "send the aggregate of the last round to all clients", rounds, value=self.size)
        yield Clear(f"{self.pairs} rounds began with the last aggregate")
