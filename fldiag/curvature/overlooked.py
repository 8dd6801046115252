"""The probability that a Lanczos sequence has overlooked an eigenvalue."""

from __future__ import annotations

import math

import numpy as np


class Unseen:
    """How probably has a sequence from a random start not shown an eigenvalue at or beyond ``point``?

    Its tridiagonal matrix bounds the share of the start vector that can lie there: by the inequality of
    Chebyshev, Markov and Stieltjes, at most 1 / sum_i p_i(point)^2 with the orthonormal polynomials p_i of the
    matrix. Of a random start, the squared share of a given direction is chi-squared / dimension, so a share
    below s has a probability of at most sqrt(2 / pi * s * dimension).
    """

    def __init__(self, point: float, dimension: int):
        self.point, self.dimension, self.total = point, dimension, 1.0
        self._last, self._before, self._beta = 1.0, 0.0, 0.0

    def extend(self, alpha: float, beta: float) -> None:
        value = ((self.point - alpha) * self._last - self._beta * self._before) / beta
        self._before, self._last, self._beta = self._last, value, beta
        self.total += value**2

    @property
    def probability(self) -> float:
        return min(1.0, math.sqrt(2 / math.pi * self.dimension / self.total))


#: Share of its distance from the edge that the residual of a further Ritz vector may have, and how many are used.
NEARLY, FURTHER = 0.1, 25


def innocent(height: np.ndarray, residuals: np.ndarray, edge: float, k: int) -> tuple[int, float]:
    """How many of the leading Ritz vectors may be taken out of a search for eigenvalues beyond ``edge``, so that it
    gets on faster, and by how much the sought one can sink thereby.

    ``height``: Ritz values, descending. An eigenvector of a value mu beyond the edge has at most the share
    s_j = residual_j / (mu - theta_j) in Ritz vector j (Davis and Kahan 1970), and its quotient outside all of them is
    at least mu - sum s_j^2 (mu - theta_j) / (1 - sum s_j^2). The first k are out in any case.
    """
    distance = edge - height[k : k + FURTHER]
    good = (distance > 0) & (residuals[k : k + FURTHER] <= NEARLY * distance)
    count = int(np.argmin(good)) if not good.all() else len(good)
    shares = (residuals[k : k + count] / distance[:count]) ** 2
    return k + count, float((shares * distance[:count]).sum() / (1 - shares.sum()))
