"""Statistics of batch-norm, and other buffers: how they are aggregated, and whether they are usable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

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
)
from fldiag.errors import counted

if TYPE_CHECKING:
    from torch import Tensor

BATCHNORM = ("running_mean", "running_var")
SKEWED = "the global model normalises with statistics that do not belong to its weights"
AVERAGE = (
    "average floating-point buffers as the weights are, or re-estimate them with the global model"
)


class Statistics(Check):
    """Buffers (batch-norm statistics) that are never aggregated, or of which only one client's are kept.

    Rule, over all floating-point buffers of a round that some client changed: the aggregate's equal those that were received to
    the bit (never aggregated); they equal one client's to the bit, while another client's differ (one client's); or a
    single mean or variance of batch-norm does either; or they lie outside the range of the clients' and the received ones at
    more than 1 % of the entries (no mean at all). Within that range any mean will do.
    """

    name, title = "buffers", "Buffers are aggregated"

    def __init__(self, case: Case):
        super().__init__(case)
        self.rounds, self.still = 0, list[int]()
        self.of: dict[int, list[int]] = {}
        self.single: dict[str, dict[int, str]] = {}
        self.outside: dict[int, float] = {}
        self.why = "the model has no floating-point buffers"

    def see(self, cohort: CohortWeights) -> None:
        names = [
            n
            for n, b in cohort.client_states.items()
            if b.is_floating_point()
            and n in cohort.states
            and cohort.states[n].shape == b.shape[1:]
        ]
        if not names or len(cohort.ids) < 2:
            if any(b.is_floating_point() for b in cohort.states.values()) and cohort.round:
                self.why = "no round holds the buffers of two clients"
            return
        self.why = "no client changed its buffers"
        new = {n: cohort.states[n] for n in names}
        if all(bool((cohort.client_states[n] == new[n]).all()) for n in names):
            return  # nobody changed them
        self.rounds += 1
        before = {} if cohort.before is None else cohort.before.states
        if all(n in before and _same(before[n], new[n]) for n in names):
            self.still.append(cohort.round)
            return
        one = [
            i
            for j, i in enumerate(cohort.ids)
            if all(_same(cohort.client_states[n][j], new[n]) for n in names)
        ]
        if one:
            self.of.setdefault(one[0], []).append(cohort.round)
        elif odd := {
            n: how
            for n in names
            if n.endswith(BATCHNORM) and (how := self._describe_owner(cohort, n, before))
        }:
            for n, how in odd.items():
                self.single.setdefault(n, {})[cohort.round] = how
        elif (share := _outside(cohort, names, before)) > 0.01:
            self.outside[cohort.round] = share

    def end(self) -> Iterator[Outcome]:
        if not self.rounds:
            yield Skip(self.why)
            return
        severity = INFORMATION if "isolated" in self.case.slots else FAULT
        if self.still:
            yield Finding(
                severity,
                "batch-norm buffers are not aggregated: the global model keeps those it had",
                f"bitwise unchanged in {len(self.still)} of {counted(self.rounds, 'round')}, while the clients' "
                "changed",
                SKEWED,
                AVERAGE,
                tuple(self.still),
            )
        if self.of:
            one = next(iter(self.of)) if len(self.of) == 1 else None
            who = (
                self.case.client(one)
                if one is not None
                else f"one client each round (first {self.case.client(next(iter(self.of)))})"
            )
            rounds = sorted(r for rounds in self.of.values() for r in rounds)
            yield Finding(
                FAULT,
                f"batch-norm buffers are those of {who}",
                f"bitwise equal in {len(rounds)} of {self.rounds} "
                "rounds, while the other clients' differ",
                SKEWED,
                AVERAGE,
                tuple(rounds),
                client=one,
            )
        for n, by_round in self.single.items():
            how = sorted(set(by_round.values()))
            yield Finding(
                severity,
                f"buffer {n} is not aggregated, others are",
                f"it is {', '.join(how[:3])} in {len(by_round)} of {counted(self.rounds, 'round')}",
                SKEWED,
                AVERAGE,
                tuple(by_round),
                layer=n,
            )
        if self.outside:
            yield Finding(
                WARNING,
                "buffers are not a mean of the clients'",
                f"up to {max(self.outside.values()):.0%} of the "
                f"entries lie outside the range of the clients', in {len(self.outside)} of "
                f"{counted(self.rounds, 'round')}",
                SKEWED,
                AVERAGE,
                tuple(self.outside),
                value=max(self.outside.values()),
            )
        yield Clear(f"within the clients' range in {counted(self.rounds, 'round')}")

    def _describe_owner(self, cohort: CohortWeights, name: str, before: dict[str, Tensor]) -> str:
        """Whose a buffer is, if it is not of all clients that changed it; a single number may be equal by chance."""
        rows, new = cohort.client_states[name], cohort.states[name]
        apart = [j for j in range(len(rows)) if not _same(rows[j], rows[0])]
        if new.numel() < 2 or not apart:
            return ""
        if name in before and _same(before[name], new):
            return "bitwise what was received"
        return next(
            (
                f"bitwise that of {self.case.client(i)}"
                for j, i in enumerate(cohort.ids)
                if _same(rows[j], new)
            ),
            "",
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _outside(cohort: CohortWeights, names: list[str], before: dict[str, Tensor]) -> float:
    """Share of entries that lie neither among the clients' nor between them and what they received."""
    import torch

    out = total = 0
    for n in names:
        rows, w = cohort.client_states[n].double(), cohort.states[n].double()
        rows = torch.cat([rows, before[n].double()[None]]) if n in before else rows
        slack = 1e-5 * rows.abs().amax(0)
        out += int(((w < rows.amin(0) - slack) | (w > rows.amax(0) + slack)).sum())
        total += w.numel()
    return out / max(total, 1)


class Values(Check):
    """Buffers that are not numbers, or variances that are zero or negative.

    Rule: any entry of a floating-point buffer, of the aggregate or of a client, is NaN or infinite; or any entry of a buffer
    named ``running_var`` is at most 0.
    """

    name, title = "buffer_values", "Buffers are usable"

    def __init__(self, case: Case):
        super().__init__(case)
        self.looked = 0
        self.bad = defaultdict[tuple[str, str, int | None], list[int]](list)

    def see(self, cohort: CohortWeights) -> None:
        for n, b in cohort.states.items():
            self._look(cohort.round, n, b, None)
        for n, rows in cohort.client_states.items():
            for j, i in enumerate(cohort.ids):
                self._look(cohort.round, n, rows[j], i)

    def _look(self, r: int, name: str, b: Tensor, client: int | None) -> None:
        if not b.is_floating_point():
            return
        self.looked += 1
        if not bool(b.isfinite().all()):
            self.bad[name, "not finite", client].append(r)
        elif name.endswith("running_var") and b.numel() and float(b.min()) <= 0:
            self.bad[name, "of variance 0 or less", client].append(r)

    def end(self) -> Iterator[Outcome]:
        if not self.looked:
            yield Skip("the model has no floating-point buffers")
            return
        faults = defaultdict[tuple[str, str], list[tuple[int | None, list[int]]]](list)
        for (name, how, client), rounds in self.bad.items():
            faults[name, how].append((client, rounds))
        for (name, how), places in faults.items():
            who = [c for c, _ in places if c is not None]
            rounds = sorted({r for _, rs in places for r in rs})
            owner = "the global model" if len(who) < len(places) else self.case.client(*who)
            yield Finding(
                FAULT,
                f"buffer {name} of {owner} is {how}",
                f"in {counted(len(rounds), 'round')}"
                + (f", of {counted(len(who), 'client')}" if who else ""),
                "the network's outputs are NaN, or blown up by 1/sqrt(eps)",
                "look for NaN in the clients' data, minibatches of one example, and averages of the standard deviation "
                "in place of the variance",
                tuple(rounds),
                client=who[0] if len(who) == len(places) == 1 else None,
                layer=name,
            )
        yield Clear(f"{self.looked} buffers are finite, and their variances above 0")
