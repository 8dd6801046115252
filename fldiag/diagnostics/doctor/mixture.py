"""One round as a mixture of its clients: coefficients, and what they leave unexplained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fldiag.diagnostics.doctor.case import Case, CohortWeights

if TYPE_CHECKING:
    from torch import Tensor

#: The part of a server's update that a rule may leave unexplained.
RESIDUAL = 1e-3


class Mixture:
    """The server's update u = w' - w of one round against its clients' d_k = w_k - w.

    ``means``: name -> weights [K], the first is the one that the run names; ``past``: global models of earlier rounds, where
    they are needed.
    """

    def __init__(
        self,
        cohort: CohortWeights,
        means: dict[str, np.ndarray],
        case: Case,
        past: Sequence[Tensor] = (),
    ):
        self.cohort, self.means, self.case, self.past = cohort, means, case, past
        self.k, self.gram = len(cohort.ids), cohort.gram
        self.u = float(np.sqrt(self.gram[self.k, self.k]))
        self.main = next(iter(means.values()))

    @cached_property
    def coefficients(self) -> np.ndarray:
        """Of the clients' updates [K], by least squares."""
        g, k = self.gram, self.k
        return np.linalg.lstsq(g[:k, :k], g[:k, k], rcond=1e-10)[0]

    def residual(self, c: np.ndarray, total: float = 0.0, gram: np.ndarray | None = None) -> float:
        """||u - sum c_k d_k - total w|| / ||u||, 0 where it is rounding."""
        g = self.gram if gram is None else gram
        x = np.concatenate([c, [-1.0, total]])
        left = float(np.sqrt(max(x @ g @ x, 0.0)))
        sizes = np.sqrt(np.diag(g))
        largest = sizes[-1] + sizes[:-1].max()  # no weights are longer
        return (
            0.0
            if left <= 4 * self.cohort.eps * largest
            else left / max(float(sizes[self.k]), 1e-300)
        )
