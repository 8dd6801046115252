"""How sure a number and a difference is: standard errors, Wilson's interval, intervals and p-values over pairs of seeds and over
examples; how evenly numbers are spread.

One set of rules for the whole toolkit: the checks of runs and the verdicts on the papers' statements both stand on these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fldiag.seeding import numpy_rng

LEVEL = 0.95
#: Pairs of seeds from which on a t interval decides.
SEEDS = 3
#: Draws of a bootstrap, and numbers held at once while they are made.
DRAWS, ROOM = 4000, 2_000_000


@dataclass(frozen=True)
class Interval:
    """``value`` with the ends of its interval and the two-sided ``p`` of 0; None where that cannot be known. ``test``: what the
    p is of, where that is not the interval."""

    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    test: str = ""


def paired_t(differences: np.ndarray, level: float = LEVEL) -> Interval:
    """The t interval of the mean of paired differences. One pair has none. Pairs that all differ by the same leave no spread to
    judge by: no interval, unless all are 0 (p = 1)."""
    from scipy import stats  # half a second, which means and shares do not need

    d = np.asarray(differences, float)
    mean, n = float(d.mean()), len(d)
    if n < 2 or float(d.std(ddof=1)) <= 1e-12 * float(np.abs(d).max()):
        return Interval(mean) if n < 2 or mean else Interval(0.0, 0.0, 0.0, 1.0)
    test = stats.ttest_1samp(d, 0.0)
    low, high = test.confidence_interval(level)
    return Interval(mean, float(low), float(high), float(test.pvalue))


def mcnemar(a: np.ndarray, b: np.ndarray) -> float:
    """The exact p of McNemar's test that two models are right equally often; ``a``, ``b``: right or wrong, example by example."""
    from scipy import stats

    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    return float(stats.binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0


def weights(n: int) -> Iterator[np.ndarray]:
    """Weights [some, n] of the Bayesian bootstrap (Rubin 1981), in blocks: no example is ever left out, so that every client
    keeps some. The same numbers give the same draws, which pairs two models on the same examples."""
    rng = numpy_rng(0, "bayesian bootstrap", n)
    each = max(1, min(DRAWS, ROOM // max(n, 1)))
    for start in range(0, DRAWS, each):
        yield rng.standard_exponential((min(each, DRAWS - start), n))


def means(columns: np.ndarray) -> np.ndarray:
    """The means [draws, c] of columns [n, c] over the draws of one bootstrap of the rows."""
    return np.concatenate([w @ columns / w.sum(1, keepdims=True) for w in weights(len(columns))])


def basic(value: float, draws: np.ndarray, level: float = LEVEL) -> Interval:
    """The basic bootstrap interval, which takes out the bias that the draws show, as of a minimum or a sum of absolute values.
    None where all draws are alike."""
    if float(np.ptp(draws)) <= 1e-12 * max(abs(value), float(np.abs(draws).max())):
        return Interval(value)
    high, low = 2 * value - np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    tail = min(int((draws >= 2 * value).sum()), int((draws <= 2 * value).sum()))
    p = min(1.0, 2 * (tail + 1) / (len(draws) + 1))
    return Interval(value, float(low), float(high), p)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values: the probability that any of several decisions is wrong stays below what each is held to."""
    ordered = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    worst = 0.0
    for rank, (p, i) in enumerate(ordered):
        worst = max(worst, min(1.0, (len(ordered) - rank) * p))
        adjusted[i] = worst
    return adjusted


def sample_mean(values: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """``value``: the mean of a sample, such as of the clients' numbers; ``stderr``: its standard error s / sqrt(n), with
    s^2 = sum (x - mean)^2 / (n - 1). None where undefined.

    >>> sample_mean([1.0, 3.0]), sample_mean([])
    ({'value': 2.0, 'stderr': 1.0}, {'value': None, 'stderr': None})
    """
    sample, n = np.asarray(values, float), len(values)
    stderr = float(sample.std(ddof=1)) / math.sqrt(n) if n > 1 else None
    return {"value": float(sample.mean()) if n else None, "stderr": stderr}


def share(right: float, n: float) -> dict[str, float]:
    """``value``: right / n, n > 0, with its binomial ``stderr`` and the ends ``low`` and ``high`` of Wilson's interval."""
    p = right / n
    low, high = wilson(right, n)
    return {"value": p, "stderr": math.sqrt(p * (1 - p) / n), "low": low, "high": high}


def wilson(right: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of the share right / n, n > 0 (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    # scipy.stats.binomtest gives the same interval, but tests a hypothesis first, which takes a hundred times as long:
    # `forgetting` has 100,000 shares.
    z, p = NormalDist().inv_cdf(0.975), right / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (0.0 if right == 0 else middle - reach), (1.0 if right == n else middle + reach)


def gini(values: np.ndarray) -> np.ndarray:
    """Gini coefficient over the last axis: mean absolute difference of two values over twice their mean; 0 where all are 0.

    >>> float(gini(np.array([0.0, 0.0, 0.0, 1.0]))), float(gini(np.array([2.0, 2.0])))
    (0.75, 0.0)
    """
    x = np.sort(np.asarray(values, float), axis=-1)
    k = x.shape[-1]
    total = x.sum(-1)
    difference = ((2 * np.arange(1, k + 1) - k - 1) * x).sum(-1)
    return np.divide(difference, k * total, out=np.zeros_like(total), where=total > 0)


def worst_decile(values: np.ndarray) -> np.ndarray:
    """The mean of the lowest tenth (rounded up) over the last axis.

    >>> float(worst_decile(np.arange(20.0)))
    0.5
    """
    x = np.sort(np.asarray(values, float), axis=-1)
    return x[..., : -(-x.shape[-1] // 10)].mean(-1)
