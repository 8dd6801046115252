"""Seeds that are not used, or do not fix the training: what shows when runs are compared."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from fldiag.config import recipe
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
from fldiag.results.provenance import digest


class Seeds(Check):
    """Seeds that are not used, or do not fix the training.

    Rule, for every two given runs whose configs differ in the seed at most. Different seeds: the aggregate of a common round is
    equal to the bit (fault), all rounds draw the same clients where that happens by chance with at most 0.1 % (warning), or
    only the initial weights are equal (information). Same seed: the aggregate of a common round differs (a warning, if both were
    trained with the same versions, threads and processor; else information). Configs that differ in more, and equal bits in all
    rounds, are told too (information for fldiag's own methods, which have neutral settings).
    """

    name, title = "seeds", "Seeds determine the results"

    def __init__(self, case: Case):
        super().__init__(case)
        self.prints: dict[int, str] = {}
        self.samples: dict[int, tuple[int, ...]] = {}
        self.start: str | None = None

    def see(self, cohort: CohortWeights) -> None:
        self.prints[cohort.round] = cohort.digest
        if cohort.ids:
            self.samples[cohort.round] = tuple(cohort.ids)
        if cohort.round == 0:
            self.start = cohort.digest
        elif cohort.round == 1 and cohort.received is not None:
            self.start = digest(cohort.received)

    def end(self) -> Iterator[Outcome]:
        alike = [
            p
            for p in self.peers
            if isinstance(p, Seeds)
            and p.case.run.path != self.case.run.path
            and _without_seed(p.case) == _without_seed(self.case)
        ]
        yield from self._unused()
        if not alike:
            yield Skip(
                "it needs two runs with the same config, or with configs that differ in the seed only"
                if not self.peers
                else "the other runs differ in more than the seed"
            )
            return
        for other in alike:
            yield from self._pair(other)
        yield Clear(f"compared with {len(alike)} other runs")

    def _unused(self) -> Iterator[Finding]:
        """Runs of another config with the same bits: what differs has no effect."""
        for other in self.peers:
            if isinstance(other, Seeds) and _without_seed(other.case) != _without_seed(self.case):
                common = [r for r in self.prints if r and r in other.prints]
                if common and all(self.prints[r] == other.prints[r] for r in common):
                    yield Finding(
                        INFORMATION if self.case.is_native else WARNING,
                        f"another config gave the same bits as in {other.case.run.name}",
                        f"all {len(common)} common rounds are equal",
                        "the settings in which the configs differ have no effect",
                        "check that this option reaches the training",
                        tuple(common),
                    )

    def _pair(self, other: Seeds) -> Iterator[Finding]:
        name = other.case.run.name
        common = sorted({r for r in self.prints if r} & set(other.prints))
        equal = [r for r in common if self.prints[r] == other.prints[r]]
        seeds = self.case.config.get("seed"), other.case.config.get("seed")
        if seeds[0] == seeds[1]:
            if len(equal) < len(common):
                first = next(r for r in common if r not in equal)
                same = _machine(self.case) == _machine(other.case)
                yield Finding(
                    WARNING if same else INFORMATION,
                    f"the same seed gave other bits than in {name}",
                    f"seed {seeds[0]}; the first different round is {first}; versions, threads and processor are "
                    f"{'the same' if same else 'not the same'}",
                    "the run cannot be repeated",
                    "seed everything that is random (initial weights, sampling, minibatches, dropout), and fix the "
                    "threads",
                    tuple(r for r in common if r not in equal),
                )
            return
        if equal:
            yield Finding(
                FAULT,
                f"another seed gave the same bits as in {name}",
                f"seeds {seeds[0]} and {seeds[1]}; {len(equal)} of {len(common)} rounds are equal",
                "the spread over seeds is 0, so significance tests mean nothing",
                "pass the seed on to everything that is random",
                tuple(equal),
            )
            return
        both = [r for r in self.samples if r in other.samples]
        if both and all(self.samples[r] == other.samples[r] for r in both):
            n = self.case.total
            chance = -sum(math.log(math.comb(n, min(len(self.samples[r]), n))) for r in both)
            if chance < math.log(1e-3):
                yield Finding(
                    WARNING,
                    f"another seed drew the same clients as in {name}",
                    f"in all {len(both)} rounds; by chance with probability {math.exp(chance):.1e}",
                    "the spread over seeds leaves out the sampling",
                    "seed the sampling of clients, too",
                    tuple(both),
                )
        if self.start is not None and self.start == other.start:
            yield Finding(
                INFORMATION,
                f"another seed began with the same weights as in {name}",
                "the initial weights are bitwise equal",
                "the spread over seeds leaves out the initialisation",
                "nothing to do if this is intended",
            )


def _without_seed(case: Case) -> str:
    config = recipe(case.config)
    config.pop("rounds", None)
    return json.dumps(config, sort_keys=True, default=str)


def _machine(case: Case) -> list[Any]:
    """What decides the bits besides config and seed."""
    about = {
        k: v
        for k, v in case.run.about.get("provenance", {}).items()
        if k not in ("seed", "time", "date")
    }
    segments = [
        {k: s.get(k) for k in ("torch", "machine", "capability", "threads")}
        for s in (r["segment"] for r in case.run.records if "segment" in r)
    ]
    return [about, segments]
