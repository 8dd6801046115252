"""What single clients do: whose updates are missing, copied or outlying."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from fldiag.diagnostics.doctor.case import Case, CohortWeights
from fldiag.diagnostics.doctor.findings import (
    FAULT,
    INFORMATION,
    WARNING,
    Check,
    Clear,
    Finding,
    Outcome,
    Skip,
    about,
)
from fldiag.errors import counted

NO_CLIENTS = "no client weights are stored"


class Silent(Check):
    """Clients whose update is exactly zero, and layers that nobody trains.

    Rule: the trained weights equal the received ones to the bit, although the client has examples (for a run of fldiag: fills a
    minibatch) and others of the round moved; a fault where nobody moved in a round. A layer that no client changed in any round,
    while other layers moved, is information: it may be frozen on purpose.
    """

    name, title = "zero_updates", "Every client's weights change"

    def __init__(self, case: Case):
        super().__init__(case)
        self.rounds, self.zero, self.all = 0, defaultdict[int, list[int]](list), list[int]()
        self.frozen: set[str] | None = None

    def see(self, cohort: CohortWeights) -> None:
        if not cohort.complete or cohort.clients is None:
            return
        self.rounds += 1
        still = [
            i
            for i, row in zip(cohort.ids, cohort.clients, strict=True)
            if bool((row == cohort.received).all())
        ]
        if len(still) == len(cohort.ids):
            self.all.append(cohort.round)
            return
        for i in still:
            self.zero[i].append(cohort.round)
        if cohort.usable and self.frozen != set():
            k = len(cohort.ids)
            fixed = {name for name, g in cohort.grams.items() if not np.diag(g)[:k].any()}
            self.frozen = fixed if self.frozen is None else self.frozen & fixed

    def end(self) -> Iterator[Outcome]:
        if not self.rounds:
            yield Skip("no round says what clients received and made of it")
            return
        if self.all:
            yield Finding(
                FAULT,
                "no client changed the weights it received",
                f"in {len(self.all)} of {counted(self.rounds, 'round')}",
                "nothing is learnt",
                "look at the learning rate, at frozen parameters, and at which model is returned",
                tuple(self.all),
            )
        train = self.case.section("train")
        for i, rounds in self.zero.items():
            n = self.case.sizes.get(i)
            idle = n == 0 or (
                n is not None
                and bool(train.get("drop_last"))
                and n < int(train.get("batch_size", 1))
            )
            yield Finding(
                INFORMATION if idle else WARNING,
                f"the update of client {i} is exactly zero",
                f"in {counted(len(rounds), 'round')}"
                + (f"; it has {counted(n, 'example')}" if n is not None else ""),
                "it contributes nothing, but its weight reduces the effect of the others",
                "nothing to do: its examples fill no minibatch"
                if idle
                else "look at its training, and at which model it returns",
                tuple(rounds),
                client=i,
                value=0.0,
            )
        if self.frozen:
            names = ", ".join(sorted(self.frozen)[:3]) + (
                f" and {len(self.frozen) - 3} more" if len(self.frozen) > 3 else ""
            )
            yield Finding(
                INFORMATION,
                "some layers are never trained",
                f"no client changed {names} in {counted(self.rounds, 'round')}",
                "they stay as they were initialised",
                "nothing to do if they are frozen on purpose",
                layer=names,
            )
        yield Clear(f"no update is zero in {counted(self.rounds, 'round')}")


class Copies(Check):
    """Clients that return each other's weights, or their own of an earlier round.

    Rule: the trained weights of two clients of a round are equal to the bit, or their updates have a cosine above 1 - 1e-9 (with
    at least 100 weights); clients that such pairs link are one finding. Also: a client's trained weights equal those it
    returned in an earlier round to the bit. Zero updates are left to their own check.
    """

    name, title = "copies", "Every update is the client's own"

    def __init__(self, case: Case):
        super().__init__(case)
        self.rounds, self.twins = 0, defaultdict[tuple[int, int], list[int]](list)
        self.before: dict[tuple[int, bytes], int] = {}
        self.repeats: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.scales: dict[tuple[int, int], float] = {}

    def see(self, cohort: CohortWeights) -> None:
        if not cohort.usable or cohort.clients is None:
            return
        self.rounds += 1
        norms, k = cohort.norms, len(cohort.ids)
        for j, i in enumerate(cohort.ids):
            if norms[j] > 0:
                key = (
                    i,
                    hashlib.sha256(
                        cohort.clients[j].contiguous().view(-1).numpy().tobytes()
                    ).digest(),
                )
                if key in self.before:
                    self.repeats[i].append((cohort.round, self.before[key]))
                self.before.setdefault(key, cohort.round)
        size = np.outer(norms, norms)
        cosine = np.divide(cohort.gram[:k, :k], size, out=np.zeros((k, k)), where=size > 0)
        limit = 1 - 1e-9 if cohort.aggregated.numel() >= 100 else 2.0
        for a, b in zip(*np.nonzero(np.triu(cosine > limit - 1e-12, 1)), strict=True):
            self._twin(cohort, int(a), int(b), norms)
        if limit > 1:
            for a in range(k):
                for b in range(a + 1, k):
                    if norms[a] > 0 and bool((cohort.clients[a] == cohort.clients[b]).all()):
                        self._twin(cohort, a, b, norms)

    def _twin(self, cohort: CohortWeights, a: int, b: int, norms: np.ndarray) -> None:
        pair = cohort.ids[a], cohort.ids[b]
        self.twins[pair].append(cohort.round)
        self.scales[pair] = float(norms[b] / norms[a])

    def end(self) -> Iterator[Outcome]:
        if not self.rounds:
            yield Skip(NO_CLIENTS)
            return
        for clients in self._groups():
            yield self._alike(clients)
        for i, repeats in self.repeats.items():
            yield Finding(
                FAULT,
                f"client {i} returned weights that it had returned before",
                f"in round {repeats[0][0]} those of round {repeats[0][1]}"
                + (f", and {len(repeats) - 1} times more" if len(repeats) > 1 else ""),
                "an old update is applied again",
                "clear replies between rounds",
                tuple(r for r, _ in repeats),
                client=i,
            )
        yield Clear(f"no two updates are equal in {counted(self.rounds, 'round')}")

    def _groups(self) -> list[list[int]]:
        """Clients that pairs of equal updates link."""
        groups: list[set[int]] = []
        for pair in self.twins:
            linked = [g for g in groups if not g.isdisjoint(pair)]
            groups = [g for g in groups if g.isdisjoint(pair)] + [set(pair).union(*linked)]
        return [sorted(g) for g in groups]

    def _alike(self, clients: list[int]) -> Finding:
        pairs = [pair for pair in self.twins if pair[0] in clients]
        rounds = sorted({r for pair in pairs for r in self.twins[pair]})
        scale, one = self.scales[pairs[0]], len(pairs) == 1
        if one:
            how = "is that of" if abs(scale - 1) < 1e-6 else f"is {scale:.3g} times that of"
            fault = f"the update of client {clients[1]} {how} client {clients[0]}"
        else:
            fault = f"{about(clients, most=12)} return each other's updates"
        return Finding(
            FAULT,
            fault,
            f"in {counted(len(rounds), 'round')}"
            + ("" if one else f", {counted(len(pairs), 'pair')}"),
            "one client's data count several times, and another's not at all",
            "look for a model that is shared between clients, or a client that copies",
            tuple(rounds),
            client=clients[0] if one else None,
            client_b=clients[1] if one else None,
            value=scale if one else None,
        )


class Norms(Check):
    """Clients whose updates have outlying lengths.

    Rule: the logarithms of ||d_k|| less their round's median, and less a line in log n_k (Theil and Sen's slope) where sizes are
    known. A client's median over its rounds, and every single value, is outlying where it lies further out than a factor 2.5
    (of two rounds: 5; a single value: 8) and than 8 times the scale 1.48 MAD of all values. Short updates are information,
    unless the client has something to learn: its own loss at the received weights is above the median of the clients'. It
    takes at least 4 clients a round.
    """

    name, title = "norms", "Updates have similar lengths"
    FACTORS, SCALE = (2.5, 5.0, 8.0), 8.0

    def __init__(self, case: Case):
        super().__init__(case)
        self.rows: list[tuple[int, int, float]] = []

    def see(self, cohort: CohortWeights) -> None:
        if cohort.usable and sum(cohort.norms > 0) >= 4:
            middle = float(np.median(np.log(cohort.norms[cohort.norms > 0])))
            self.rows += [
                (cohort.round, i, math.log(v) - middle)
                for i, v in zip(cohort.ids, cohort.norms, strict=True)
                if v > 0
            ]

    def left(self) -> np.ndarray:
        """What size and round leave of the logarithms."""
        values = np.array([v for _, _, v in self.rows])
        n = np.array([self.case.sizes.get(i, 0) for _, i, _ in self.rows], dtype=float)
        if not n.all() or len(set(n)) < 3:
            return values
        from scipy.stats import theilslopes

        sample = slice(None, None, max(1, len(values) // 500))
        slope, start, *_ = theilslopes(values[sample], np.log(n)[sample])
        return values - start - slope * np.log(n)

    def end(self) -> Iterator[Outcome]:
        if not self.rows:
            yield Skip("no round has the updates of at least 4 clients")
            return
        left = self.left()
        spread = 1.4826 * float(np.median(np.abs(left - np.median(left))))
        always, often, once = (max(math.log(f), self.SCALE * spread) for f in self.FACTORS)
        of = defaultdict[int, list[tuple[int, float]]](list)
        for (r, i, _), v in zip(self.rows, left, strict=True):
            of[i].append((r, float(v)))
        for i, deviations in of.items():
            middle = float(np.median([v for _, v in deviations]))
            single = [(r, v) for r, v in deviations if abs(v) > once]
            if len(deviations) > 1 and abs(middle) > (always if len(deviations) > 2 else often):
                yield self._finding(
                    i,
                    middle,
                    tuple(r for r, _ in deviations),
                    spread,
                    "in the median of its rounds",
                )
            elif single:
                r, v = max(single, key=lambda one: abs(one[1]))
                yield self._finding(i, v, tuple(r for r, _ in single), spread, f"in round {r}")
        yield Clear(
            f"{counted(len(of), 'client')}; lengths spread by a factor of {math.exp(spread):.2f} once size and round are "
            f"taken out, at most {math.exp(float(np.abs(left).max())):.1f}"
        )

    def _finding(
        self, i: int, v: float, rounds: tuple[int, ...], spread: float, when: str
    ) -> Finding:
        how = f"{math.exp(v):.3g} times" if v > 0 else f"1/{math.exp(-v):.3g} of"
        return Finding(
            WARNING if v > 0 or self._hungry(i) else INFORMATION,
            f"the updates of {about([i])} are {'unusually long' if v > 0 else 'unusually short'}",
            f"{how} what its size and the round suggest, {when}; the usual spread is a factor of "
            f"{math.exp(spread):.2f}",
            "it alone decides where the mean goes" if v > 0 else "it hardly affects the mean",
            "look at its learning rate, its number of steps and the scale of its data; clip updates",
            rounds,
            client=i,
            value=math.exp(v),
        )

    def _hungry(self, i: int) -> bool:
        """Whether a client has more to learn than most."""
        losses = self.case.models.losses if self.case.history is not None else {}
        return i in losses and losses[i] > float(np.median(list(losses.values())))
