"""Weights that are no numbers: where the first came from. Files that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
)
from fldiag.errors import counted

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Origin:
    """Where weights became no numbers that were numbers before: ``client`` None is the server, ``layer`` the first layer."""

    client: int | None
    layer: str
    rounds: list[int]


class Finite(Check):
    """Weights that are not numbers, a run that diverged, and rounds that cannot be read.

    Rule: a weight or buffer of a client is NaN or infinite although those that it received are not, or one of the aggregate
    is although those of its clients are not. This is the cause, with its round, client and first layer. Whatever is not finite
    after it, the run's status (diverged), and what other checks find only in rounds from the first global model on that is not
    finite, are its consequences: they stand in its line. Also: a listed checkpoint is missing or is not the file that the run
    wrote.
    """

    name, title = "finite", "Weights are finite, files are intact"

    def __init__(self, case: Case):
        super().__init__(case)
        self.rounds = 0
        self.origins: dict[int | None, Origin] = {}
        self.server: list[int] = []
        self.clients: dict[int, list[int]] = {}

    def see(self, cohort: CohortWeights) -> None:
        self.rounds += 1
        layer = _first_infinite({**cohort.weights, **cohort.states})
        layers = {j: name for j in range(len(cohort.ids)) if (name := _layer_of_client(cohort, j))}
        for j, name in layers.items():
            self.clients.setdefault(cohort.ids[j], []).append(cohort.round)
            if self._starts_finite(cohort):
                self._keep(cohort.ids[j], name, cohort.round)
        if layer and not layers and self._starts_finite(cohort):
            self._keep(None, layer, cohort.round)
        if layer:
            self.server.append(cohort.round)

    def _starts_finite(self, cohort: CohortWeights) -> bool:
        """Whether what the clients of the round received is finite, as far as that is known."""
        if cohort.received is None:
            return not self.server
        before = cohort.before.states if cohort.before is not None else {}
        return bool(cohort.received.isfinite().all()) and not _first_infinite(before)

    def _keep(self, client: int | None, layer: str, r: int) -> None:
        self.origins.setdefault(client, Origin(client, layer, [])).rounds.append(r)

    def end(self) -> Iterator[Outcome]:
        for i, origin in enumerate(self.origins.values()):
            yield self._finding(origin, is_first=i == 0)
        if self.case.run.status == "diverged" and not self.origins:
            yield Finding(
                FAULT,
                "the run diverged",
                f"its status says so after round {self.case.run.done}",
                "its last rounds are missing",
                "lower train.lr, or clip gradients (train.clip)",
            )
        if not self.origins and self.server:  # the rounds before it are not stored
            yield Finding(
                FAULT,
                "the global weights are not finite",
                f"in {counted(len(self.server), 'round')}, first in round {self.server[0]}; what came before is not stored",
                "everything after it is NaN",
                "go back to the round before, and leave out the client that broke it",
                tuple(self.server),
            )
        for r, why in self.case.lost.items():
            yield Finding(
                WARNING,
                f"round {r} cannot be read",
                why,
                "no check sees this round",
                "restore the file",
                (r,),
            )
        interval = int(self.case.section("checkpoint").get("every", 1))
        gaps = sorted(
            set(range(self.case.rounds[0], self.case.rounds[-1] + 1, interval))
            - set(self.case.rounds)
        )
        if gaps:
            yield Finding(
                INFORMATION,
                "rounds are missing between others",
                f"{counted(len(gaps), 'round')}, the first is {gaps[0]}",
                "no check sees them, and consecutive rounds are compared only if both are stored",
                "nothing to do if they were pruned",
                gaps,
            )
        yield Clear(f"intact and finite: {counted(self.rounds, 'round')}")

    def _finding(self, origin: Origin, is_first: bool) -> Finding:
        from fldiag.runs.round_weights import ranges  # imports PyTorch

        r = origin.rounds[0]
        later = []
        if is_first:
            if self.server:
                later.append(
                    f"the global model is not finite in round{'s' * (len(self.server) > 1)} {ranges(self.server)}"
                )
            followers = sorted(set(self.clients) - set(self.origins))
            if followers:
                later.append(f"{self.case.client(*followers)} received or made such weights later")
            if self.case.run.status == "diverged":
                later.append("the run ended as diverged")
        remedy = (
            "look at the server's step: a division by zero, or the root of a negative number"
            if origin.client is None
            else "lower its learning rate, clip its gradients, look at its data; leave such an update out of the mean"
        )
        who = "the server's aggregate" if origin.client is None else self.case.client(origin.client)
        return Finding(
            FAULT,
            f"the trained weights of {who} are not finite"
            if origin.client is not None
            else "the global weights are not finite, although those of the clients are",
            "; ".join([f"first in round {r}, {origin.layer}", *later]),
            "one such update makes the mean NaN, and everything after it",
            remedy,
            tuple(origin.rounds),
            client=origin.client,
            layer=origin.layer,
        )


def _first_infinite(tensors: Mapping[str, Tensor]) -> str:
    """The name of the first tensor that is not finite, "" for none."""
    return next((name for name, t in tensors.items() if not bool(t.isfinite().all())), "")


def _layer_of_client(cohort: CohortWeights, j: int) -> str:
    """The first layer of the client in row j whose weights or buffers are not finite."""
    if cohort.clients is None:
        return ""
    row = cohort.clients[j]
    views = {name: row[part] for name, part in cohort.slices.items()}
    if len(row) != cohort.aggregated.numel():
        views = {"its weights": row}
    return _first_infinite({**views, **{n: rows[j] for n, rows in cohort.client_states.items()}})
