"""How uncertain a mean is, and a share of examples: standard errors and Wilson's interval; how evenly numbers are spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np


def sample_mean(values: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """``value``: the mean of a sample, such as of the clients' numbers; ``stderr``: its standard error s / sqrt(n), with
    s^2 = sum (x - mean)^2 / (n - 1). None where undefined.

    >>> sample_mean([1.0, 3.0]), sample_mean([])
    ({'value': 2.0, 'stderr': 1.0}, {'value': None, 'stderr': None})
    """
    sample, n = np.asarray(values, dtype=float), len(values)
    stderr = float(sample.std(ddof=1)) / math.sqrt(n) if n > 1 else None
    return {"value": float(sample.mean()) if n else None, "stderr": stderr}


def share(right: float, n: float, confidence: float = 0.95) -> dict[str, float]:
    """``value``: right / n, n > 0, with its binomial ``stderr`` and the ends ``low`` and ``high`` of Wilson's interval."""
    p = right / n
    low, high = wilson(right, n, confidence)
    return {"value": p, "stderr": math.sqrt(p * (1 - p) / n), "low": low, "high": high}


def wilson(right: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of the share right / n, n > 0 (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    # scipy.stats.binomtest gives the same interval, but tests a hypothesis first, which takes a hundred times as long:
    # `forgetting` has 100,000 shares.
    z, p = NormalDist().inv_cdf(0.5 + confidence / 2), right / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (0.0 if right == 0 else middle - reach), (1.0 if right == n else middle + reach)


def gini(values: np.ndarray) -> np.ndarray:
    """Gini coefficient over the last axis: mean absolute difference of two values over twice their mean; 0 where all are 0.

    >>> float(gini(np.array([0.0, 0.0, 0.0, 1.0]))), float(gini(np.array([2.0, 2.0])))
    (0.75, 0.0)
    """
    x = np.sort(np.asarray(values, dtype=float), axis=-1)
    k = x.shape[-1]
    total = x.sum(-1)
    difference = ((2 * np.arange(1, k + 1) - k - 1) * x).sum(-1)
    return np.divide(difference, k * total, out=np.zeros_like(total), where=total > 0)


def worst_decile(values: np.ndarray) -> np.ndarray:
    """The mean of the lowest tenth (rounded up) over the last axis.

    >>> float(worst_decile(np.arange(20.0)))
    0.5
    """
    x = np.sort(np.asarray(values, dtype=float), axis=-1)
    return x[..., : -(-x.shape[-1] // 10)].mean(-1)
