"""What clients can send instead of their examples so that accuracy, F1, AUC and calibration error of all of them can be computed.

Sample-weighted means of clients' F1, AUC and calibration error are not those of the pooled examples (the observation of FLAM,
arXiv 2605.07962; only its abstract was read, the states here are our own choice). Counts add up, so these are counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

#: Log-odds at which the histograms of scores end, and their bins: what is further out falls into the last one.
REACH, SCORES = 20.0, 2000


def log_odds(logits: np.ndarray) -> np.ndarray:
    """log p - log(1 - p) of every class's probability, from outputs [n, C]; exact also where p rounds to 1."""
    z = np.asarray(logits, dtype=np.float64)
    z = z - z.max(1, keepdims=True)
    rows, top = np.arange(len(z)), z.argmax(1)
    log_sum = np.log(np.exp(z).sum(1, keepdims=True))
    rest_logits = z.copy()
    rest_logits[rows, top] = -np.inf
    with np.errstate(divide="ignore"):  # one class only: its probability is 1
        rest = np.log(np.exp(rest_logits).sum(1))
    p = np.exp(z - log_sum)
    p[rows, top] = 0.0
    odds = z - log_sum - np.log1p(-p)
    odds[rows, top] = z[rows, top] - rest
    return odds


def bin_of(confidence: np.ndarray, bins: int) -> np.ndarray:
    """Which of ``bins`` equal parts of [0, 1]; an edge belongs to the part below it, as in scikit-learn's calibration_curve."""
    return np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], confidence)


@dataclass(frozen=True)
class Binned:
    """Counts of one model on some examples; ``a + b`` is what all the examples of both give.

    ``confusion`` [C, C]: by true and by predicted class. ``calibration`` [5, bins]: in every bin of the confidence c the number
    of examples and the sums of r (1: right), c, c² and rc. ``scores`` [2, C, SCORES]: by bins of a class's log-odds, the
    examples of that class and the others.
    """

    confusion: np.ndarray
    calibration: np.ndarray
    scores: np.ndarray

    @staticmethod
    def of(logits: np.ndarray, y: np.ndarray, bins: int) -> Binned:
        """Of outputs [n, C] and labels [n]."""
        count, classes = logits.shape
        odds = log_odds(logits)
        guess = logits.argmax(1)
        confidence = 1 / (1 + np.exp(-odds[np.arange(count), guess]))
        right = (guess == y).astype(float)
        confusion = np.bincount(y * classes + guess, minlength=classes**2).reshape(classes, classes)
        bin_numbers = bin_of(confidence, bins)
        calibration = np.stack(
            [
                np.bincount(bin_numbers, weights=v, minlength=bins)
                for v in (np.ones(count), right, confidence, confidence**2, right * confidence)
            ]
        )
        place = np.clip((odds + REACH) * (SCORES / (2 * REACH)), 0, SCORES - 1).astype(np.int64)
        flat = (
            (1 - (y[:, None] == np.arange(classes))) * classes * SCORES
            + np.arange(classes) * SCORES
            + place
        )
        scores = np.bincount(flat.ravel(), minlength=2 * classes * SCORES).reshape(
            2, classes, SCORES
        )
        return Binned(confusion, calibration, scores)

    def __add__(self, other: Binned) -> Binned:
        return Binned(
            self.confusion + other.confusion,
            self.calibration + other.calibration,
            self.scores + other.scores,
        )

    @property
    def n(self) -> int:
        return int(self.confusion.sum())

    @property
    def right(self) -> int:
        return int(np.trace(self.confusion))

    def f1(self) -> float:
        """The mean of the F1 scores of all classes that occur or are predicted."""
        hits = np.diag(self.confusion)
        both = self.confusion.sum(0) + self.confusion.sum(1)
        return float((2 * hits[both > 0] / both[both > 0]).mean())

    def auc(self) -> tuple[float, float] | None:
        """The area under the ROC curve, one class against the rest, mean over the classes; and by how much the binning may have
        moved it, at most. None where no class has examples inside and outside of it."""
        inside, outside = (s.astype(float) for s in self.scores)
        p, n = inside.sum(1), outside.sum(1)
        has_both = (p > 0) & (n > 0)
        if not has_both.any():
            return None
        inside, outside, pairs = inside[has_both], outside[has_both], (p * n)[has_both]
        below = np.cumsum(outside, 1) - outside
        ties = (inside * outside).sum(1)
        return float((((inside * below).sum(1) + ties / 2) / pairs).mean()), float(
            (ties / 2 / pairs).mean()
        )

    def ece(self) -> tuple[float, float]:
        """The expected calibration error, sum over bins of (n_b / n) |accuracy - confidence| (Guo et al. 2017), and its standard
        error to first order: of a mean of r - c with the sign of its bin, over examples drawn anew."""
        n, r, c, cc, rc = self.calibration
        error = float(np.abs(r - c).sum() / n.sum())
        square = float((r - 2 * rc + cc).sum() / n.sum())  # mean of (r - c)^2
        return error, math.sqrt(max(square - error**2, 0.0) / float(n.sum()))

    def ece_floor(self) -> float:
        """The calibration error that a perfectly calibrated model with these confidences would show on so few examples."""
        _, _, c, cc, _ = self.calibration
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
