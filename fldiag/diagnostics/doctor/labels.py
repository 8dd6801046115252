"""Whether training ties the labels to the inputs, and which labels a client seems to have trained on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fldiag.diagnostics.doctor.findings import LEVEL
from fldiag.diagnostics.doctor.statistics import EXAMPLES, tie
from fldiag.results.select import spread

if TYPE_CHECKING:
    from fldiag.diagnostics.doctor.models import Models

#: Rounds of a client that are looked at.
ROUNDS = 3


def ties_of(models: Models, clients: Iterable[int]) -> dict[int, tuple[float, float]]:
    """Client -> z of how its training ties its labels to its inputs, and the probability of one so low by chance.

    One permutation of the labels holds for all rounds of a client, whose changes are added. Clients for which labels cannot be
    permuted are left out.
    """
    from scipy.stats import norm

    if models.history.dataset.regression:
        return {}
    stretches = {i: models.history.pool.train_slice(i) for i in clients}
    rounds = {
        i: set(spread([r for r, scored in models.scores.items() if i in scored.ids], ROUNDS))
        for i, stretch in stretches.items()
        if stretch.stop - stretch.start >= EXAMPLES
    }
    changes: dict[int, np.ndarray] = {}
    for r in sorted(set().union(*rounds.values())):  # a round is read once
        cohort = models.history.stored(r)
        for i in (i for i in rounds if r in rounds[i]):
            j = cohort.ids.index(i)
            after = models.log_probabilities(cohort.client(j), stretches[i])
            change = after - models.log_probabilities(cohort.start_of(j), stretches[i])
            changes[i] = changes.get(i, 0.0) + change
    ties = {i: tie(change, models.labels[stretches[i]]) for i, change in changes.items()}
    return {i: (z, float(norm.cdf(z))) for i, z in ties.items() if math.isfinite(z)}


@dataclass(frozen=True)
class LabelMap:
    """``labels``: recorded class -> the one that the client's model takes it for; ``right`` and ``recorded``: shares of held-out
    examples for which the map, and the recorded label, is what it predicts."""

    labels: dict[int, int]
    right: float
    recorded: float

    def describe(self) -> str:
        steps = {(b - a) for a, b in self.labels.items()}
        examples = ", ".join(f"{a} as {b}" for a, b in list(self.labels.items())[:4] if a != b)
        same = f", each by {next(iter(steps)):+d}" if len(steps) == 1 else ""
        return (
            f"takes the labels for others ({examples}{same}), which is right for {self.right:.0%} of held-out "
            f"examples, and the recorded labels for {self.recorded:.0%}"
        )


def find_label_map(models: Models, client: int) -> LabelMap | None:
    """The relabelling of a client's examples that its trained model has learnt, where it is another than the recorded labels.

    It is made from every second example and judged on the others: right for at least half of them, more than the most frequent
    prediction, and better than the recorded labels at 1 % (McNemar).
    """
    from scipy.stats import binom

    stretch = models.history.pool.train_slice(client)
    if models.history.dataset.regression or stretch.stop - stretch.start < 2 * EXAMPLES:
        return None
    r = max((r for r, s in models.scores.items() if client in s.ids), default=None)
    if r is None:
        return None
    cohort = models.history.stored(r)
    logs = models.log_probabilities(cohort.client(cohort.ids.index(client)), stretch)
    y, predicted = models.labels[stretch], logs.argmax(1)
    order = np.argsort(y, kind="stable")
    even, odd = order[::2], order[1::2]
    label_map = {int(c): int(logs[even[y[even] == c]].mean(0).argmax()) for c in np.unique(y[even])}
    learnt = np.array([label_map.get(int(c), int(c)) for c in y[odd]])
    right, recorded = predicted[odd] == learnt, predicted[odd] == y[odd]
    better, worse = int((right & ~recorded).sum()), int((recorded & ~right).sum())
    p = float(binom.sf(better - 1, better + worse, 0.5)) if better else 1.0
    usual = float(np.bincount(predicted[odd]).max()) / len(odd)
    is_various = 2 * len(set(label_map.values())) > len(label_map)
    if p > LEVEL or right.mean() < 0.5 or not is_various or right.mean() <= usual:
        return None
    return LabelMap(label_map, float(right.mean()), float(recorded.mean()))


def agree(maps: Sequence[Mapping[int, int]], most: float = 0.8) -> bool:
    """Whether at least 3 relabellings take a class for the same one, wherever two of them have it.

    >>> agree([{0: 1, 1: 2}, {0: 1, 2: 3}, {1: 2, 2: 3}]), agree([{0: 1, 1: 0}, {0: 5, 1: 6}, {0: 2, 1: 1}])
    (True, False)
    """
    targets: dict[int, list[int]] = {}
    for label_map in maps:
        for label, other in label_map.items():
            targets.setdefault(label, []).append(other)
    several = [labels for labels in targets.values() if len(labels) > 1]
    same = sum(max(map(labels.count, labels)) for labels in several)
    return len(maps) >= 3 and bool(several) and same >= most * sum(map(len, several))
