"""What server and clients carry from round to round, by the rules of the methods that carry it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fldiag.diagnostics.doctor.case import Case, CohortWeights
from fldiag.diagnostics.doctor.findings import (
    FAULT,
    INFORMATION,
    Check,
    Clear,
    Finding,
    Outcome,
    Skip,
)
from fldiag.errors import counted

if TYPE_CHECKING:
    from torch import Tensor

#: Server's name -> (the clients' name, whose it is, what clients add to it by a round of training).
PAIRS = {
    "c": (
        "c_k",
        "SCAFFOLD",
        "c_k + c - (w - w_k) / (steps * lr), so that c_k - its old value + c goes along w - w_k",
    ),
    "h": ("h_k", "FedDyn", "alpha (w_k - w)"),
}
#: Relative difference that running sums in single precision reach, many times over.
RESIDUAL = 1e-3
#: Numbers of all clients together of which all coordinates are looked at; else evenly spaced ones.
MOST = 10**7
Rounds = dict[int, float]


class Variates(Check):
    """Control variates of SCAFFOLD and dual variables of FedDyn that do not obey their rules.

    Rule: after every round the server's c (or h) is the mean of the clients' c_k (h_k) over all N clients, those that never
    trained counting as 0. They differ where the difference is above 0.1 % of the root mean square of the clients'. Then it is
    said which of these it is: the mean over the round's clients alone, its last value and their mean change (N / K times too
    much), the mean of the round before, no change at all, another multiple of the mean. The mean weighted by examples is
    information, and so is a multiple where nobody says how many clients there are.
    A client's own: of SCAFFOLD (option II) c_k - its value before + c before the round goes along w - w_k, w what it received;
    of FedDyn the change of h_k goes along w_k - w, or for all clients against it. A wrong sign, or without c, is a fault;
    another direction (SCAFFOLD's option I is a gradient) is information.
    """

    name, title = "variates", "Control variates obey their rule"

    def __init__(self, case: Case):
        super().__init__(case)
        self.last: dict[str, dict[int, Tensor]] = {}
        self.before: dict[
            str, tuple[int, Tensor, Tensor]
        ] = {}  # of the last round: the server's and the clients' mean
        self.rounds: dict[str, int] = {}
        self.unknown: set[str] = set()  # whose clients' last values are not all known
        self.mixed: dict[tuple[str, str], Rounds] = {}
        self.ways: dict[
            tuple[str, str], dict[int, list[int]]
        ] = {}  # how clients changed theirs -> round -> clients

    def see(self, cohort: CohortWeights) -> None:
        for name, (of_clients, _, _) in PAIRS.items():
            server, clients = cohort.variates.get(name), cohort.variates.get(of_clients)
            if (
                isinstance(clients, dict)
                and clients
                and server is not None
                and not isinstance(server, dict)
            ):
                self._see(name, cohort, server, clients)

    def _see(
        self, name: str, cohort: CohortWeights, server: Tensor, clients: dict[int, Tensor]
    ) -> None:
        import torch

        n = max(self.case.total, len(clients))
        step = max(1, math.ceil(n * len(server) / MOST))
        c = server[::step].double()
        rows = {k: row[::step].double() for k, row in clients.items()}
        old = self.last.setdefault(name, {})
        before = self.before.get(name)
        is_next = cohort.round == 1 or (before is not None and before[0] == cohort.round - 1)
        # of clients that took part in rounds that are not stored, the last value is not known
        is_known = len(rows) >= n or (is_next and name not in self.unknown)
        self.unknown = self.unknown - {name} if is_known else self.unknown | {name}
        sampled = [k for k in cohort.ids if k in rows] or list(rows)
        zero = torch.zeros_like(c)
        if is_next:
            self._see_clients(name, cohort, before[1] if before else zero, rows, old, step)
        change = [rows[k] - old.get(k, zero) for k in sampled]
        old.update(rows)
        mean = torch.stack(list(old.values())).sum(0) / n
        self.rounds[name] = self.rounds.get(name, 0) + is_known
        size = math.sqrt(sum(float(row.square().sum()) for row in old.values()) / n)

        def is_near(value: Tensor) -> bool:
            return float((c - value).norm()) <= RESIDUAL * size

        if is_known and not is_near(mean):
            shares = self._by_examples(old)
            candidates = {
                "the mean of the round's clients alone": torch.stack(
                    [rows[k] for k in sampled]
                ).mean(0),
            }
            if before is not None:
                candidates["the mean of the round before"] = before[2]
                candidates["what it was in the round before"] = before[1]
            start = before[1] if before else (zero if cohort.round == 1 else None)
            if start is not None and len(sampled) < n:
                candidates[
                    "its last value and the mean change of the round's clients, not K / N of that"
                ] = start + torch.stack(change).mean(0)
            if shares is not None:
                candidates["the mean weighted by the numbers of examples"] = shares
            kind = next((text for text, value in candidates.items() if is_near(value)), "")
            if not kind:
                a = float(c @ mean / mean.square().sum().clamp(min=1e-300))
                kind = (
                    f"{a:.3g} times the mean"
                    if is_near(a * mean)
                    else "by no rule that is known here"
                )
            self.mixed.setdefault((name, kind), {})[cohort.round] = float((c - mean).norm()) / max(
                size, 1e-300
            )
        self.before[name] = cohort.round, c, mean

    def _by_examples(self, rows: dict[int, Tensor]) -> Tensor | None:
        sizes = {k: self.case.sizes.get(k, 0) for k in rows}
        total = sum(self.case.sizes.values())
        if not total or not all(sizes.values()):
            return None
        return sum(
            (rows[k] * (sizes[k] / total) for k in rows), start=0 * next(iter(rows.values()))
        )

    def _see_clients(
        self,
        name: str,
        cohort: CohortWeights,
        server: Tensor,
        rows: dict[int, Tensor],
        old: dict[int, Tensor],
        step: int,
    ) -> None:
        """Along what the round's clients changed theirs; ``server``: its value before the round."""
        if not cohort.usable or cohort.clients is None or cohort.received is None:
            return
        shared = self._uploaded(cohort)[::step]
        c = server[shared]
        for j, k in enumerate(cohort.ids):
            if k not in rows or (k not in old and name in self.unknown):
                continue
            moved = (cohort.clients[j] - cohort.origins[j])[::step][shared].double()
            change = (rows[k] - old[k] if k in old else rows[k])[shared]
            ways = {"along": -moved} if name == "c" else {"along": moved}
            tried = (
                {"": change + c, "without c": change, "c added": change - c}
                if name == "c"
                else {"": change}
            )
            way = "another direction"
            for text, value in tried.items():
                cosine = float(value @ ways["along"]) / max(
                    float(value.norm()) * float(moved.norm()), 1e-300
                )
                if abs(cosine) >= 1 - RESIDUAL:
                    sign = "" if cosine > 0 else "against"
                    way = " ".join(part for part in (sign, text) if part) or "right"
                    break
            self.ways.setdefault((name, way), {}).setdefault(cohort.round, []).append(k)

    def _uploaded(self, cohort: CohortWeights) -> Tensor:
        """Which coordinates clients upload, [P]: those that they keep to themselves may be trained without correction."""
        import torch

        personal = self.case.personal
        return torch.cat(
            [torch.full((t.numel(),), name not in personal) for name, t in cohort.weights.items()]
        )

    def end(self) -> Iterator[Outcome]:
        if not self.rounds:
            yield Skip(
                "no control variates or dual variables were recorded (state= of Recorder.round)"
            )
            return
        if not any(self.rounds.values()) and not self.ways:
            yield Skip(
                "clients took part in rounds that are not stored: what they carry is not known"
            )
            return
        for (name, kind), rounds in self.mixed.items():
            of_clients, method, _ = PAIRS[name]
            yield Finding(
                INFORMATION if self._is_plausible(kind) else FAULT,
                f"{name} is not the mean of all clients' {of_clients}: it is {kind}",
                f"in {len(rounds)} of {counted(self.rounds[name], 'round')}; they differ by up to {max(rounds.values()):.2g} of "
                "the "
                f"clients' root mean square, and {RESIDUAL:g} is rounding",
                f"the correction of {method} does not cancel over the clients: it moves the mean update",
                f"add K / N of the mean change of the round's K clients, or take the mean of all N {of_clients} anew",
                tuple(rounds),
                value=max(rounds.values()),
            )
        for (name, way), by_round in self.ways.items():
            yield from self._of_clients(name, way, by_round)
        yield Clear(
            ", ".join(
                f"{name} is the mean of all {PAIRS[name][0]} in {counted(rounds, 'round')}"
                for name, rounds in self.rounds.items()
            )
        )

    def _is_plausible(self, kind: str) -> bool:
        """Whether a sound run may have it: another weighting, or clients of whom nobody says that there are."""
        return kind.startswith("the mean weighted") or (
            kind.endswith("times the mean") and not self.case.dealt
        )

    def _of_clients(self, name: str, way: str, rounds: dict[int, list[int]]) -> Iterator[Finding]:
        of_clients, method, rule = PAIRS[name]
        total = sum(
            len(ids) for (n, _), other in self.ways.items() if n == name for ids in other.values()
        )
        count = sum(map(len, rounds.values()))
        # the sign of h_k is a convention, if all have one
        if way == "right" or (name == "h" and way == "against" and count == total):
            return
        yield Finding(
            INFORMATION if way == "another direction" else FAULT,
            f"clients change their {of_clients} {way if way != 'another direction' else 'by another rule'}",
            f"{count} of {counted(total, 'change')}; {method} has {rule}",
            "the correction pushes clients another way than the method says"
            if way != "another direction"
            else "a gradient at w (SCAFFOLD's option I) is such a rule; it cannot be checked here",
            f"compare the update of {of_clients} with the method's paper",
            tuple(rounds),
            value=float(count),
        )
