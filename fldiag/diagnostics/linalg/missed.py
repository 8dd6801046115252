"""The probability that a Lanczos sequence has overlooked an eigenvalue."""

from __future__ import annotations

import math


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
