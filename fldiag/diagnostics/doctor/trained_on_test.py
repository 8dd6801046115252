"""Whether clients have trained on the test examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fldiag.diagnostics.doctor.findings import LEVEL, WARNING, Check, Clear, Finding, Outcome, Skip
from fldiag.diagnostics.doctor.statistics import CLIENTS, ROUNDS, excess, strata_excess
from fldiag.errors import counted

if TYPE_CHECKING:
    from fldiag.diagnostics.doctor.models import Models, Scored

#: z above which, in the mean of the rounds, test examples are fitted better than training examples.
BETTER = 1.64
#: z of one client's loss being lower on test examples than on its own.
LOWER = 1.0
#: z of the recorded data (see own_data) below which clients may have trained on others.
UNFIT = 2.0
#: z of the losses alone, and share of the training loss, at which the test loss is too low whatever else is known.
ALONE, SHARE = 4.0, 0.75
#: Share of the other clients that may fit test examples better than their own.
FEW = 0.1


@dataclass(frozen=True)
class TestEvidence:
    """Losses of the last global model on ``test`` and ``train`` examples, and z, in the mean of the rounds after the first: of
    the test loss being ``lower``, of single clients fitting ``single`` test examples, and of the recorded data (``recorded``)."""

    test: float
    train: float
    lower: float
    single: float
    recorded: float

    @property
    def is_convincing(self) -> bool:
        is_unfit = self.lower > BETTER and self.single > BETTER and self.recorded < UNFIT
        return is_unfit or (self.lower > ALONE and self.test < SHARE * self.train)


def trained_rounds(models: Models) -> dict[int, Scored]:
    """The evaluated rounds whose clients are stored and finite."""
    return {
        r: s
        for r, s in models.scores.items()
        if s.clients is not None and np.isfinite(s.clients).all() and np.isfinite(s.loss).all()
    }


def test_evidence(models: Models) -> TestEvidence | None:
    """What says that all clients train on test examples; None where there are no test examples of classes, or no rounds."""
    data, pool, rounds = models.history.dataset, models.history.pool, trained_rounds(models)
    if not rounds or not data.tested or data.regression:
        return None
    test, train = pool.test, pool.clients
    strata = models.labels[test], models.labels[train]
    later = list(rounds.values())[1:] or list(rounds.values())
    lower = [strata_excess(-s.loss[test], -s.loss[train], *strata) for s in later]
    single = [
        strata_excess(_singled(s)[test], _singled(s)[train], *strata)
        for s in later
        if len(s.ids) >= CLIENTS
    ]
    recorded = [excess(f.advantage, f.ids, seed=r) for r, f in models.fits.items()]
    return TestEvidence(
        float(later[-1].loss[test].mean()),
        float(later[-1].loss[train].mean()),
        float(np.mean(lower)),
        float(np.mean(single)) if single else 0.0,
        float(np.mean(recorded)) if recorded else float("inf"),
    )


class TestData(Check):
    """Clients that have trained on test examples.

    Rule: in up to 6 rounds. All clients: the loss of the global model is lower on test examples than on the clients' training
    examples of the same class (van Elteren's z above 1.64 in the mean of the rounds after the first), single clients fit single
    test examples better than the median client does, by more than they fit training examples (the same test on log(median /
    least loss over the clients)), and the clients do not fit their recorded data (z below 2, see own_data). Or z of the losses
    is above 4 alone, and the test loss is less than 0.75 of the training loss.
    One client: its advantage over the round's median client on test examples is above 0 in the mean, and larger than on its own
    examples of the same classes in every one of at least 3 rounds, while it is larger for at most a tenth of the other clients in
    their median, and the loss of its own model is lower on test examples (van Elteren's z above 1 in the mean); p is the
    share of larger ones among the others' to the number of rounds.
    """

    name, title = "test_data", "No client trains on test examples"

    def end(self) -> Iterator[Outcome]:
        history = self.case.opened(classes=True, parts=True)
        if not history.dataset.tested:
            yield Skip("the run has no test examples")
            return
        models = self.case.models
        evidence = test_evidence(models)
        if evidence is None:
            yield Skip(self.case.lacks("no round can be evaluated"))
            return
        self.rounds = trained_rounds(models)
        if evidence.is_convincing:
            yield Finding(
                WARNING,
                "clients seem to train on the test examples",
                f"the last global model has loss {evidence.test:.3g} on test examples and {evidence.train:.3g} on the clients' "
                f"training examples (z = {evidence.lower:.1f} within classes); single clients fit test examples as their own (z "
                f"= {evidence.single:.1f}), and their recorded data with z = {evidence.recorded:.1f}",
                "test accuracy is training accuracy, and too high",
                "look which split the clients' loaders read",
                tuple(self.rounds),
                value=evidence.test - evidence.train,
            )
        else:
            yield from self._one_client()
        yield Clear(
            f"loss {evidence.test:.3g} on test and {evidence.train:.3g} on training examples (z = {evidence.lower:.1f} within "
            "classes)"
        )

    def _one_client(self) -> Iterator[Finding]:
        values: dict[int, dict[int, float]] = {}
        tested: dict[int, list[float]] = {}
        for r, s in self.rounds.items():
            if len(s.ids) < CLIENTS:
                continue
            for k, i in enumerate(s.ids):
                on_test, on_own = self._advantages(s, k)
                if np.isfinite(on_test - on_own):
                    values.setdefault(i, {})[r] = on_test - on_own
                    tested.setdefault(i, []).append(on_test)
        values = {i: by_round for i, by_round in values.items() if len(by_round) >= ROUNDS}
        self.tests += len(values)
        for i, by_round in values.items():
            rest = [list(v.values()) for k, v in values.items() if k != i]
            pooled = [v for row in rest for v in row]
            p = ((sum(v > 0 for v in pooled) + 1) / (len(pooled) + 2)) ** len(by_round)
            like = sum(float(np.median(row)) > 0 for row in rest)
            is_fitted = min(by_round.values()) > 0 and np.mean(tested[i]) > 0
            if (
                not is_fitted
                or self._lower(i) < LOWER
                or len(rest) < CLIENTS
                or like > FEW * len(rest)
            ):
                continue
            value = float(np.median(list(by_round.values())))
            yield Finding(
                WARNING,
                f"{self.case.client(i)} seems to train on test examples",
                f"in all {counted(len(by_round), 'round')} its training lowers the loss of test examples by {value:.3g} nats "
                "more than that of its own of the same classes, compared with what the other clients' training does",
                "test accuracy is partly training accuracy, and too high",
                "look which split the client's loader reads",
                tuple(by_round),
                client=i,
                value=value,
                p=p if p > LEVEL / 1e6 else LEVEL / 1e6,
            )

    def _lower(self, i: int) -> float:
        """z of a client's model having a lower loss on test examples than on its own of the class, mean of the rounds."""
        models = self.case.models
        mine, test = models.history.pool.train_slice(i), models.history.pool.test
        strata = models.labels[test], models.labels[mine]
        rows = [
            s.clients[s.ids.index(i)]
            for s in self.rounds.values()
            if s.clients is not None and i in s.ids
        ]
        return float(np.mean([strata_excess(-row[test], -row[mine], *strata) for row in rows]))

    def _advantages(self, s: Scored, k: int) -> tuple[float, float]:
        """The advantage of client k on test examples and on its own ones, both by the shares of its classes."""
        models = self.case.models
        pool = models.history.pool
        assert s.clients is not None
        advantage = np.median(s.clients, 0) - s.clients[k]
        mine, test = pool.train_slice(s.ids[k]), pool.test
        y_own, y_test = models.labels[mine], models.labels[test]
        rows = [
            (
                float((y_own == c).sum()),
                advantage[test][y_test == c].mean(),
                advantage[mine][y_own == c].mean(),
            )
            for c in np.intersect1d(y_own, y_test)
        ]
        if not rows:
            return float("nan"), float("nan")
        n, on_test, on_own = np.array(rows).T
        return float(n @ on_test / n.sum()), float(n @ on_own / n.sum())


def _singled(s: Scored) -> np.ndarray:
    """By how much the best client fits each example better than the median client does."""
    assert s.clients is not None
    return np.log((np.median(s.clients, 0) + 1e-6) / (s.clients.min(0) + 1e-6))
