"""Calibration in bins of the confidence, and how evenly numbers are spread."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


def bin_of(confidence: np.ndarray, bins: int) -> np.ndarray:
    """Which of ``bins`` equal parts of [0, 1]; an edge belongs to the part below it, as in scikit-learn's calibration_curve."""
    return np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], confidence)


@dataclass(frozen=True)
class Binned:
    """Counts of one model on some examples; ``a + b`` is what all the examples of both give.

    ``sums`` [5, bins]: in every bin of the confidence c the number of examples and the sums of r (1: right), c, c² and rc.
    """

    sums: np.ndarray

    @staticmethod
    def of(right: np.ndarray, confidence: np.ndarray, bins: int) -> Binned:
        """Of examples that are right or wrong [n], with a confidence [n]."""
        r, place = right.astype(float), bin_of(confidence, bins)
        columns = (np.ones(len(r)), r, confidence, confidence**2, r * confidence)
        return Binned(np.stack([np.bincount(place, weights=v, minlength=bins) for v in columns]))

    def __add__(self, other: Binned) -> Binned:
        return Binned(self.sums + other.sums)

    @property
    def n(self) -> int:
        return int(self.sums[0].sum())

    @property
    def right(self) -> int:
        return int(self.sums[1].sum())

    def ece(self) -> tuple[float, float]:
        """The expected calibration error, sum over bins of (n_b / n) |accuracy - confidence| (Guo et al. 2017), and its standard
        error to first order: of a mean of r - c with the sign of its bin, over examples drawn anew."""
        n, r, c, cc, rc = self.sums
        error = float(np.abs(r - c).sum() / n.sum())
        square = float((r - 2 * rc + cc).sum() / n.sum())  # mean of (r - c)^2
        return error, math.sqrt(max(square - error**2, 0.0) / float(n.sum()))

    def ece_floor(self) -> float:
        """The calibration error that a perfectly calibrated model with these confidences would show on so few examples."""
        _, _, c, cc, _ = self.sums
        return floor(np.maximum(c - cc, 0), self.n)


def floor(variances: np.ndarray, n: float) -> float:
    """Mean of sum_b |N(0, variances_b)| / n: what chance alone adds to a calibration error."""
    return float(np.sqrt(2 / np.pi * variances).sum() / n)


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
