"""Who takes part: counts against the binomial."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from fldiag.diagnostics.doctor.case import NO_CLIENTS, Case, CohortWeights
from fldiag.diagnostics.doctor.findings import LEVEL, WARNING, Check, Clear, Finding, Outcome, Skip
from fldiag.errors import counted


class Sampling(Check):
    """Clients that are never sampled, or far too often.

    Rule: where K_t of N clients take part in round t, a client's count over the rounds is a sum of independent draws with
    probability K_t / N (a binomial where K_t is constant). Each client's two tails are exact, p = 2 min(P(X <= x), P(X >= x));
    a further test is the chance prod 1 / C(N, K_t) that all rounds draw the same set. Holm's procedure judges all of them with
    the run's other tests. A run of fldiag that draws a fixed number must have that many in every round.
    """

    name, title = "sampling", "Clients are sampled equally often"

    def __init__(self, case: Case):
        super().__init__(case)
        self.sets: dict[int, tuple[int, ...]] = {}
        self.vague = False

    def see(self, cohort: CohortWeights) -> None:
        self.vague |= not cohort.sampled
        if cohort.clients is not None and cohort.ids:
            self.sets[cohort.round] = tuple(sorted(cohort.ids))

    def end(self) -> Iterator[Outcome]:
        if not self.sets or self.vague:
            yield Skip(
                "the checkpoints also hold clients that were not sampled"
                if self.sets
                else NO_CLIENTS
            )
            return
        yield from self._fewer()
        n, rounds = self.case.total, tuple(self.sets)
        if not n:
            yield Skip("the run does not say how many clients there are")
            return
        chances = [min(len(ids) / n, 1.0) for ids in self.sets.values()]
        if n < 2 or min(chances) == 1.0:
            yield Clear(f"all {n} clients take part in all {len(rounds)} rounds")
            return
        pmf = np.ones(1)
        for q in chances:
            pmf = np.convolve(pmf, [1 - q, q])
        below, above = np.cumsum(pmf), np.cumsum(pmf[::-1])[::-1]
        counts = Counter(i for ids in self.sets.values() for i in ids)
        self.tests += n
        for x in sorted(set(counts.values()) | ({0} if len(counts) < n else set())):
            p = float(min(1.0, 2 * min(below[x], above[x])))
            if p <= LEVEL:
                clients = [k for k in dict.fromkeys([*counts, *range(n)]) if counts[k] == x]
                for k in clients[:20]:
                    yield self._finding(k, x, p, sum(chances), rounds)
        yield from self._same(chances, n, rounds)
        yield Clear(
            f"{len(counts)} of {counted(n, 'client')} took part, {min(counts.values())} to {max(counts.values())} times "
            f"in {counted(len(rounds), 'round')} (expected {sum(chances):.3g})"
        )

    def _fewer(self) -> Iterator[Finding]:
        section = self.case.section("clients")
        per_round = (
            int(section.get("per_round", 0))
            if self.case.is_native and section.get("sampling") != "independent"
            else 0
        )
        odd = {r: len(ids) for r, ids in self.sets.items() if per_round and len(ids) != per_round}
        if odd:
            yield Finding(
                WARNING,
                f"rounds hold another number of clients than the config's {per_round}",
                f"{min(odd.values())} to {max(odd.values())} in {len(odd)} of {counted(len(self.sets), 'round')}",
                "some clients' work is lost",
                "look for clients that failed",
                tuple(odd),
            )

    def _finding(
        self, k: int, x: int, p: float, expected: float, rounds: tuple[int, ...]
    ) -> Finding:
        often = f"{x} times" if x else "never"
        return Finding(
            WARNING,
            f"{self.case.client(k)} was sampled {often} in {counted(len(rounds), 'round')}",
            f"{expected:.3g} times were expected; p = {p:.1e}",
            "its data count too little" if x < expected else "its data count too much",
            "look at how clients are drawn (a fixed seed each round, a client that never answers)",
            rounds,
            client=k,
            value=float(x),
            p=p,
        )

    def _same(self, chances: Sequence[float], n: int, rounds: tuple[int, ...]) -> Iterator[Finding]:
        sets = list(self.sets.values())
        if len(sets) < 2:
            return
        self.tests += 1
        if len(set(sets)) == 1:
            p = math.exp(-(len(sets) - 1) * math.log(math.comb(n, len(sets[0]))))
            yield Finding(
                WARNING,
                f"all {len(sets)} rounds sampled the same {len(sets[0])} of {n} clients",
                f"by chance with p = {p:.1e}",
                f"{n - len(sets[0])} clients' data are never used",
                "seed the sampling once, not anew in every round",
                rounds,
                p=p,
            )
