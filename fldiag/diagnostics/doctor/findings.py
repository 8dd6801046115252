"""What a check says of a run, and how many tests it may make before chance speaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fldiag.diagnostics.doctor.case import Case, CohortWeights

FAULT, WARNING, INFORMATION, HEALTHY, UNCHECKED = (
    "fault",
    "warning",
    "information",
    "healthy",
    "not checked",
)
#: From the worst to the best; ``not checked`` says nothing of the run.
SEVERITIES = (FAULT, WARNING, INFORMATION, HEALTHY, UNCHECKED)
#: Chance that the statistical checks of a run raise any false alarm.
LEVEL = 0.01


@dataclass(frozen=True)
class Finding:
    """``what`` is wrong, by which numbers (``evidence``), what follows (``consequence``), and what to do (``remedy``).
    ``rounds``, ``client`` and ``layer`` say where; ``p``: the p-value of a statistical check, which ``beyond_chance`` judges."""

    severity: str
    what: str
    evidence: str
    consequence: str
    remedy: str
    rounds: Sequence[int] = ()
    client: int | None = None
    client_b: int | None = None
    layer: str | None = None
    value: float | None = None
    p: float | None = None


@dataclass(frozen=True)
class Clear:
    """Nothing was found, and this is what was looked at."""

    evidence: str


@dataclass(frozen=True)
class Skip:
    """Nothing can be said."""

    why: str
    remedy: str = ""


Outcome = Finding | Clear | Skip


class Check:
    """One check of one run: ``see`` gets every stored round in order, ``end`` says what was found.

    The docstring of a check begins with what it finds and gives its rule; ``fldiag explain doctor`` shows it. ``peers``: the
    same check of the other runs that were given. ``tests``: how many statistical tests it made.
    """

    name = title = ""

    def __init__(self, case: Case):
        self.case, self.tests = case, 0
        self.peers: list[Check] = []

    def see(self, cohort: CohortWeights) -> None:
        """A round."""

    def end(self) -> Iterator[Outcome]:
        """What is to be said after the last round; nothing means that it is not checked."""
        yield from ()


def beyond_chance(outcomes: Sequence[Outcome], tests: int, level: float = LEVEL) -> list[Outcome]:
    """Findings without a p-value, and those that Holm's step-down procedure keeps of ``tests`` tests: the chance of any
    false one is at most ``level``. (A test that gave no finding counts in ``tests`` only.)"""
    from fldiag.results.uncertainty import holm  # imports scipy

    ps = [s.p if isinstance(s, Finding) else None for s in outcomes]
    padding = tests - sum(p is not None for p in ps)
    return [
        s
        for s, p in zip(outcomes, holm([*ps, *[1.0] * padding]), strict=False)
        if p is None or p <= level
    ]
