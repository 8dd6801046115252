"""Statistics that several checks share: robust spread, and how unusual a sum is among random assignments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

#: Clients in a round from which on they are compared with each other, and rounds in which one must be odd.
CLIENTS, ROUNDS = 4, 3
#: Random assignments against which one is compared.
ASSIGNMENTS = 400
#: Fewer examples say nothing of a client's labels.
EXAMPLES = 10


def coordinates(size: int, most: int) -> slice:
    """At most so many of the coordinates, evenly."""
    return slice(None, None, max(1, -(-size // most)))


def spread(values: Iterable[float], centre: float | None = None) -> float:
    """1.48 times the median absolute deviation from the median, or from ``centre``.

    >>> round(spread([1.0, 2.0, 3.0, 4.0, 100.0]), 4)
    1.4826
    """
    x = np.asarray(list(values))
    return 1.4826 * float(np.median(np.abs(x - (np.median(x) if centre is None else centre))))


def excess(matrix: np.ndarray, columns: Sequence[int], seed: int = 0) -> float:
    """z of the mean of ``matrix[k, columns[k]]`` among random assignments of different columns to the rows."""
    usable = np.flatnonzero(np.isfinite(matrix).all(0))
    rows = [k for k, j in enumerate(columns) if j in set(usable.tolist())]
    if len(rows) < CLIENTS or len(usable) < len(rows):
        return 0.0
    rng = np.random.default_rng(seed)
    value = float(np.mean([matrix[k, columns[k]] for k in rows]))
    random = [
        float(np.mean(matrix[rows, rng.permutation(usable)[: len(rows)]]))
        for _ in range(ASSIGNMENTS)
    ]
    deviation = float(np.std(random))
    return (value - float(np.mean(random))) / deviation if deviation > 0 else 0.0


def strata_excess(
    a: np.ndarray, b: np.ndarray, strata_a: np.ndarray, strata_b: np.ndarray
) -> float:
    """van Elteren's z: above 0 where values ``a`` lie above ``b`` of the same stratum. 0 where no stratum has two of both.

    >>> one, two = np.arange(20.0), np.arange(20.0) + 5
    >>> strata_excess(two, one, np.repeat([0, 1], 10), np.repeat([0, 1], 10)) > 2
    True
    """
    from scipy.stats import rankdata

    total = variance = 0.0
    for stratum in np.unique(strata_a):
        u, v = a[strata_a == stratum], b[strata_b == stratum]
        n, m = len(u), len(v)
        if n < 2 or m < 2:
            continue
        ranks = rankdata(np.concatenate([u, v]))
        weight = 1 / (n + m + 1)
        total += weight * (ranks[:n].sum() - n * (n + m + 1) / 2)
        variance += weight**2 * n * m * (n + m + 1) / 12
    return total / float(np.sqrt(variance)) if variance > 0 else 0.0


def tie(change: np.ndarray, labels: np.ndarray) -> float:
    """z of the sum of ``change[i, labels[i]]`` among all permutations of the labels; NaN where they cannot differ.

    ``change`` [n, C]: of the log-probability of every class by training. The mean and variance over the permutations are exact
    (Hoeffding, 1951).

    >>> change = np.log(np.eye(3)[[0, 1, 2] * 5] + 0.1)
    >>> tie(change, np.array([0, 1, 2] * 5)) > 5 > -2 > tie(change, np.array([1, 2, 0] * 5))
    True
    """
    n, classes = change.shape
    counts = np.bincount(labels, minlength=classes)
    if n < EXAMPLES or (counts > 0).sum() < 2:
        return math.nan
    centred = change - change @ counts[:, None] / n
    centred = centred - centred.mean(0)
    variance = float((centred**2 @ counts).sum()) / (n - 1)
    return (
        float(centred[np.arange(n), labels].sum()) / math.sqrt(variance)
        if variance > 1e-18
        else math.nan
    )
